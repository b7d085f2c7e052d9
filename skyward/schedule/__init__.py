"""Which task goes where, as a pure state machine: events in, actions out; no I/O, no clock, no threads."""
