"""Start of the command lines of `Connection.argv`: a short Python program that becomes, or talks to, the SSH client.

Plain `ssh` would not do. Before it runs, a lost connection must be re-established, by one process and not by twenty,
and a client that hangs must be killed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from ..core.process import PACKAGE_ROOT
from ..errors import SkywardError
from .target import SSHTarget

_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from skyward.ssh.launch import main
main(*sys.argv[2:])
"""
_NO_CONNECTION = 255


def argv(module: str, folder: str, target: SSHTarget, command: str) -> list[str]:
    """Build a command line that runs `module.main(folder, target, command)` in Python without site and environment."""
    path = json.dumps(list(dict.fromkeys([PACKAGE_ROOT, *map(os.path.abspath, sys.path)])))
    words = [module, folder, target.to_json(), command]
    return [sys.executable, "-S", "-E", "-s", "-c", _BOOT, path, *words]


def main(module: str, folder: str, target: str, command: str = "") -> None:
    try:
        importlib.import_module(module).main(folder, SSHTarget.from_json(target), command)
    except SkywardError as error:
        sys.stderr.write(f"skyward: {error}\n")
        sys.exit(_NO_CONNECTION)
