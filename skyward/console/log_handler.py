"""Show the client's log records on standard error, unless the program that embeds skyward handles them itself.

Everything in the client's process logs to `logging.getLogger("skyward")` or a child of it. `StderrHandler` is the only
handler that skyward installs. It writes through an outlet, so a terminal that stalls blocks no call, and it steps
aside as soon as the program has a handler for the record: on the root logger (`logging.basicConfig`), on "skyward" or
on a child. So records are never shown twice, and a `NullHandler` on "skyward" silences them. A handler of the program
runs in the thread that logs; it should be quick, because that thread may be one that the pool needs.

Other processes and parts do not log, because no user configures logging there:

- Agent, watchdog, standby, zygotes and slots (`skyward/node`): they run on a node and write to their
  own standard error, which is the node's log file. They start before the user's code is imported.
- The keeper (`skyward/engine/keeper_process.py`): a separate process of the client; its log file is in its folder.
- The commands that carry an SSH connection (`skyward/ssh/launch.py`, `skyward/ssh/pure.py`): their standard error is
  read by the client, which raises it as an error.
- `skyward` on the command line: standard error is its user interface.
- The views of a pool (`open_console`) are made of its events; `console=False` turns them off, `on_event=` routes them.
"""

from __future__ import annotations

import logging

from .outlet import notify

_ROOT = "skyward"


class StderrHandler(logging.Handler):
    """Write records that no handler of the program gets, one message each. Never blocks."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_handled_elsewhere(record.name):
            notify(self.format(record))


def install_handler() -> None:
    """Add the handler to the logger "skyward". Idempotent; every pool does so when it starts."""
    logger = logging.getLogger(_ROOT)
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        logger.addHandler(StderrHandler())


def _is_handled_elsewhere(name: str) -> bool:
    """Return whether a record of this logger reaches a handler of the program, as `Logger.callHandlers` does."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(handler, StderrHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
