"""How bytes travel: frames on a channel, payloads inside frames, blobs beside them."""
