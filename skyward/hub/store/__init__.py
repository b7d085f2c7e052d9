"""Tables, points and blobs of the hub: the only room with SQL."""
