"""Interactive shell on a machine, on the current terminal: the program that `skyward ssh` becomes."""

from __future__ import annotations

import os

from .openssh import Master
from .target import SSHTarget


def main(folder: str, target: SSHTarget, command: str) -> None:
    """Make sure that the master runs, then become the `ssh` that goes through it."""
    master = Master(target, folder)
    master.ensure()
    argv = master.shell(command, has_terminal=os.isatty(0))
    os.execvp(argv[0], argv)
