"""Which task goes to which node: a pure state machine without I/O, threads or a clock."""
