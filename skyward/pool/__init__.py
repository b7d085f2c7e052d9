"""`ComputePool`: a provider's machines and an engine, for the length of a `with` block."""
