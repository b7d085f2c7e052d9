"""Scripts that run on a node: how they get there, and those that clean up.

Every process of a node, its agent included, has the name of the node's folder in its environment (`marked`). That name
finds them again, so an abandoned start can be undone whatever became of it (`undo`). Environments, downloads and code
for the next pool are kept under ~/.cache/skyward.
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

VARIABLE = "SKYWARD_NODE"
CACHE_LIMIT_GIB = 20.0
"""Limit of one user's cache on one node. Beyond it the least recently used environments are removed."""
_UNDO_LIMIT_S = 20.0
_CLEAR_LIMIT_S = 120.0


class Runner(Protocol):
    """Function that runs a command in the node's shell and waits for its end, as `skyward.ssh.Connection.run` does.

    `input` is the complete standard input. `on_line` gets each line of output as it arrives, without the newline.
    Raises TimeoutError after `timeout_s` seconds, and the transport's errors when the link is lost. The command may
    then continue for a while.
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
    """Join scripts of this folder to one text for sh, preceded by variables. `more` goes before the last script."""
    assigned = "".join(f"{variable}={shlex.quote(value)}\n" for variable, value in variables.items())
    *first, last = (_text(name) for name in names)
    return (assigned + "".join(first) + more + last).encode()


@functools.cache
def _text(name: str) -> str:
    return (files(__package__) / name).read_text()


def marked(command: str, folder: str) -> str:
    """Mark a line of sh, so that `undo` finds the process and its children. The line must `exec`."""
    return f"{VARIABLE}={shlex.quote(folder)}; export {VARIABLE}; {command}"


def undo(run: Runner, folders: Sequence[str]) -> None:
    """Remove nodes with folders of these names: kill their processes, remove the folders. Idempotent.

    A start that was sent to the machine but has not begun finds no folder, and ends by itself.

    Args:
        run: Runs commands on the machine.
        folders: Names of the nodes' folders.

    Raises:
        ProviderError: The machine's shell does not answer.
        Exception: Any error of `run`.
    """
    text = script(("node.sh", "undo.sh"), {"nodes": " ".join(folders)})
    done = run("exec sh -s", input=text, timeout_s=_UNDO_LIMIT_S)
    if not any(line.startswith("\1end ") for line in done.text.splitlines()):
        raise ProviderError(
            f"node folders: the shell exited with code {done.code} before it removed {', '.join(folders)}: "
            f"{done.error_text or 'no message'}; log in there, and run `sh -c true`"
        )


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """Result of `clear_cache`.

    `kept` lists environments that processes use, or that were used in the last quarter of an hour.
    """

    removed: tuple[str, ...]
    kept: tuple[str, ...]
    freed_gib: float


def clear_cache(run: Runner, *, patience_s: int = 60) -> Cleared:
    """Remove everything that this user's pools left on a machine, except environments in use. Idempotent.

    Args:
        run: Runs commands on the machine.
        patience_s: Seconds to wait for pools that are starting there.

    Raises:
        ProviderError: A pool takes longer to start, or the machine's shell does not answer.
        Exception: Any error of `run`.
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
            raise ProviderError(f"cache {text}: not cleared, because pools are starting there; try again later")
        is_whole |= name == "end"
    if not is_whole:
        raise ProviderError(f"cache: not cleared, because the shell exited with code {done.code}; try again")
    return Cleared(removed=tuple(removed), kept=tuple(kept), freed_gib=freed_kib / 2**20)
