"""What the processes of a node say of themselves: on their own standard error, which is the log file of the node.

They do not use `logging`, which `skyward.console.log_handler` explains: no user configures it here, and slots run user
code that configures its own.
"""

from __future__ import annotations

import sys

__all__ = ["complain"]


def complain(node: int | None, text: str) -> None:
    """Write one line to the node's log; `node` where the process knows its number."""
    where = "" if node is None else f"node {node}: "
    sys.stderr.write(f"skyward: {where}{text}\n")
    sys.stderr.flush()
