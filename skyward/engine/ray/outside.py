"""Starts Ray on a node from a login there, so that it outlives the login and ends with the node.

    python -S -E -s -c "...start()" FOLDER < JSON      prints one line of JSON: {"pid", "started", "address", ...}

The order has the secrets, which go to files that only this user can read.
"""

from __future__ import annotations

import json
import os
import sys

from ...node.agent.apart import start_apart
from .settings import FILES

_BOOT = """
import sys
sys.path[:] = sys.argv[1:]
from skyward.engine.ray.companion import main
sys.exit(main())
"""


def start() -> int:
    """Start Ray in a folder, which exists."""
    order, folder = json.load(sys.stdin), sys.argv[-1]
    os.umask(0o077)
    for name, text in zip(FILES, order.pop("secrets"), strict=True):
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)
    data = json.dumps(order | {"folder": folder}).encode() + b"\n"
    started = start_apart("ray", _BOOT, data, folder, lines=2, limit_s=order["limit_s"])
    if started is None:
        return 1
    sys.stdout.write(json.dumps(started[0] | json.loads(started[1])) + "\n")
    return 0
