"""Shared state as users hold it: `sky.dict(name)` in a task, `pool.dict(name)` in the program, and the other kinds."""
