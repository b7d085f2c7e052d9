"""Scripts of this folder run on a node: how they get there, and those that clean up.

All that is run for a node carries the name of its folder in its environment, see `marked`; so does its agent. What was
begun there and is not wanted any more is ended by that name, whatever came of it, see `undo`. What is kept there for
the next pool, environments, downloads and code, is under ~/.cache/skyward.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import BinaryIO, Protocol

from ..errors import ProviderError
from ..ssh import SSHResult

__all__ = [
    "CACHE_LIMIT_GIB",
    "VARIABLE",
    "Cleared",
    "Runner",
    "clear_cache",
    "marked",
    "script",
    "undo",
]

VARIABLE = "SKYWARD_NODE"
CACHE_LIMIT_GIB = 20.0
"""All that is kept by one user on one node; beyond it the least recently used environments go."""
_UNDO_LIMIT_S = 20.0
_CLEAR_LIMIT_S = 120.0


class Runner(Protocol):
    """Runs a command of the node's shell, as `skyward.ssh.Connection.run` does.

    `input` is its standard input, to the end. `on_line` gets each line of its output when it comes, without its end.
    Returns when the command has ended. Raises TimeoutError after `timeout_s` seconds, and whatever the transport
    raises when the link is lost; what ran then may go on for a while.
    """

    def __call__(
        self,
        command: str,
        *,
        input: bytes | BinaryIO | None = None,  # noqa: A002  # as subprocess calls it
        timeout_s: float,
        on_line: Callable[[str], None] | None = None,
    ) -> SSHResult: ...


def script(names: tuple[str, ...], variables: Mapping[str, str], more: str = "") -> bytes:
    """Scripts of this folder as one text for sh, with these variables; `more` goes ahead of the last one."""
    assigned = "".join(f"{variable}={shlex.quote(value)}\n" for variable, value in variables.items())
    *first, last = (_text(name) for name in names)
    return (assigned + "".join(first) + more + last).encode()


@functools.cache
def _text(name: str) -> str:
    return (files(__package__) / name).read_text()


def marked(command: str, folder: str) -> str:
    """The same line of sh, which must `exec`, so that `undo` finds what it becomes and starts."""
    return f"{VARIABLE}={shlex.quote(folder)}; export {VARIABLE}; {command}"


def undo(run: Runner, folders: Sequence[str]) -> None:
    """Leave nothing of the nodes with folders of these names: kill what runs, remove the folders. Idempotent.

    What was sent to the machine and has not begun yet finds no folder, and ends by itself.

    Raises ProviderError if the machine's shell does not answer, and what `run` raises.
    """
    text = script(("node.sh", "undo.sh"), {"nodes": " ".join(folders)})
    done = run("exec sh -s", input=text, timeout_s=_UNDO_LIMIT_S)
    if not any(line.startswith("\1end ") for line in done.text.splitlines()):
        raise ProviderError(
            f"the shell there ended with code {done.code} before {', '.join(folders)} were removed: {done.error_text}"
        )


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """`kept`: environments that processes use, or that were used in the last quarter of an hour."""

    removed: tuple[str, ...]
    kept: tuple[str, ...]
    freed_gib: float


def clear_cache(run: Runner, *, patience_s: int = 60) -> Cleared:
    """Remove what this user's pools have left on a machine, but for what is in use. Idempotent.

    Pools that are being made ready there are waited for, for `patience_s`.

    Raises ProviderError if they take longer or the machine's shell does not answer, and what `run` raises.
    """
    order = script(("node.sh", "cache.sh", "clear.sh"), {"patience_s": str(patience_s)})
    done = run("exec sh -s", input=order, timeout_s=patience_s + _CLEAR_LIMIT_S)
    removed: list[str] = []
    kept: list[str] = []
    freed_kib = 0
    is_whole = False
    for line in done.text.splitlines():
        name, _, text = line.removeprefix("\1").partition(" ")
        if not line.startswith("\1"):
            continue
        if name == "removed":
            size, _, path = text.partition(" ")
            freed_kib += int(size or 0)
            removed.append(path)
        elif name == "kept":
            kept.append(text)
        elif name == "busy":
            raise ProviderError(f"the cache was not cleared: pools are being made ready there, by {text}; try again")
        is_whole |= name == "end"
    if not is_whole:
        raise ProviderError(f"the cache was not cleared: the shell there ended with code {done.code}")
    return Cleared(removed=tuple(removed), kept=tuple(kept), freed_gib=freed_kib / 2**20)
