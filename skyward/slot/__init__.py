"""What runs in the user's environment on a node: the zygote, the worker, and what user code sees of its place."""
