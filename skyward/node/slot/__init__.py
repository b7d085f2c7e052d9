"""Code that runs in the user's environment on a node: worker, zygote, the user's calls."""
