"""How a bootstrap reaches a node: anything that runs a shell command there."""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO, Protocol

__all__ = ["ShellResult", "Runner", "text_of"]


class ShellResult(Protocol):
    """How a command ended. Output that went to `on_line` may be missing in `stdout`."""

    @property
    def code(self) -> int: ...
    @property
    def stdout(self) -> bytes: ...
    @property
    def stderr(self) -> bytes: ...


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
    ) -> ShellResult: ...


def text_of(output: bytes) -> str:
    return output.decode("utf-8", "replace")
