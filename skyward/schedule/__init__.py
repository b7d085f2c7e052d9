"""Placement of tasks on nodes: a pure state machine without I/O, threads or a clock."""
