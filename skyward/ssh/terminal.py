"""A shell on a machine, on the terminal of whoever types: what `skyward ssh` becomes."""

from __future__ import annotations

import os

from .openssh import Master
from .target import SSHTarget

__all__ = ["main"]


def main(folder: str, target: SSHTarget, command: str) -> None:
    """Of what `Connection.terminal` gives: make sure of the master, then become the `ssh` that goes through it."""
    master = Master(target, folder)
    master.ensure()
    argv = master.shell(command, has_terminal=os.isatty(0))
    os.execvp(argv[0], argv)
