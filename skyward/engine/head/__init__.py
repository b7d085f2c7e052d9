"""Head of a pool: a process near the nodes that hosts the scheduler. Its client side is `engine.hosted`."""
