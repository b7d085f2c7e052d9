"""`skyward ssh`: open a terminal on a node."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..state.live import LivePool

HELP = "open a shell on a node, or run a command there"

DESCRIPTION = """\
Opens a shell on a node of an open pool, or runs a command there. On rented machines it uses the pool's own key and
pinned host key; on your own machines it logs in as your ssh does. The pool keeps running, and does not manage processes
that you start.
"""

EPILOG = """\
examples:
  skyward ssh train
  skyward ssh train 3
  skyward ssh train 3 -- nvidia-smi -l 1

exit status: that of the shell or the command; 1 if there is no such node
from Python: skyward.cli.shell.terminal_of()
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", metavar="POOL", help="name of an open pool")
    parser.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        metavar="[NODE] [-- COMMAND]",
        help="number of the node (default: 0); a command",
    ).required = False  # as in Python 3.12


def run(arguments: argparse.Namespace) -> int:
    from ..state.live import find

    before, has_command, command = _split(arguments.rest)
    if len(before) > 1 or not all(word.isdigit() for word in before) or (has_command and not command):
        arguments.parser.error("wrong arguments; write POOL [NODE] [-- COMMAND], where NODE is a number")
    argv = terminal_of(find(arguments.pool), int(before[0]) if before else 0)
    if command:
        argv = [*argv, shlex.join(command) if len(command) > 1 else command[0]]
    sys.stdout.flush()
    os.execvp(argv[0], argv)


def _split(words: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in words:
        return words, False, []
    at = words.index("--")
    return words[:at], True, words[at + 1 :]


def terminal_of(pool: LivePool, node: int) -> list[str]:
    """Build the command that opens a terminal on a node. With a line of sh appended, it runs that line instead.

    Raises:
        UsageError: the pool has no such node, or skyward cannot log in to it.
    """
    from ..errors import UsageError

    machine = next((one for one in pool.nodes if one.node == node), None)
    name = pool.label or pool.pool
    if machine is None:
        there = ", ".join(str(one.node) for one in pool.nodes) or "none yet"
        raise UsageError(f"node={node}: pool {name!r} has no such node; choose one of: {there}")
    if not machine.terminal:
        local = pool.provider == "local"
        why = "is on this machine" if local else f"has no login (provider {pool.provider})"
        raise UsageError(f"node={node}: node {node} of pool {name!r} {why}; open a terminal here instead")
    return list(machine.terminal)
