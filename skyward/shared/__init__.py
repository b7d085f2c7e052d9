"""Shared state of a pool: dictionaries, queues, locks and more. A pure state machine without I/O, threads or a clock.

`store` takes requests and gives answers. `thing` is the base of all things with a name. `containers` has those that
only hold values, and `waits` and `leases` have those that a task can wait for. `messages` has their form on the wire.
The classes that users hold are in `skyward.node.slot.shared`.
"""
