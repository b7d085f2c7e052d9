"""Log lines of a node's processes, on their own standard error, which is the node's log file.

They do not use `logging`, because no user configures it on a node, and slots run user code that configures its own.
`skyward.console.log_handler` says more.
"""

from __future__ import annotations

import sys


def complain(node: int | None, text: str) -> None:
    """Write one line to the node's log. `node`: number of the node, or None if the process does not know it."""
    where = "" if node is None else f"node {node}: "
    sys.stderr.write(f"skyward: {where}{text}\n")
    sys.stderr.flush()
