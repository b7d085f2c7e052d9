"""Many nodes as one engine: a channel to each, the scheduler's decisions carried out, and the keeper."""
