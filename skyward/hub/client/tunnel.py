"""Requests of a task that go through its pool's program, for nodes that do not reach the hub.

The node half, `ProgramRequests`, has the methods of `http.client.HTTPConnection` that `HubConnection` uses. A request
is one message of JSON with the size of its body, and then the body in messages of at most 256 KiB. So is an answer. The
program half is in `forward`.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

from ...errors import SkywardError
from ...node.slot.runtime import RunningCall, current_call
from .settings import Address

NAME = "skyward.hub"
"""Name of the channel. A number behind a slash tells the connections of one task apart."""
PIECE_BYTES = 256 * 1024
_HELLO_S = 10.0


class ProgramAnswer:
    """Answer to one request."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self._body = io.BytesIO(body)

    def read(self, size: int = -1) -> bytes:
        return self._body.read(size)

    def readline(self) -> bytes:
        return self._body.readline()

    def close(self) -> None:
        self._body.close()


class ProgramRequests:
    """Requests through the program, one at a time.

    Args:
        call: The task.
        timeout_s: Longest wait for the program to take a piece, or to answer.

    Raises:
        OSError: The task cannot reach the program.
    """

    def __init__(self, call: RunningCall, timeout_s: float) -> None:
        # Only a task needs the wire, and what it imports is not on the path of a program that logs.
        from ...node.slot.channels import channel_of

        self._timeout_s = timeout_s
        try:
            self._channel = channel_of(call, f"{NAME}/{os.urandom(8).hex()}")
        except SkywardError as error:
            raise ConnectionError(str(error)) from error

    def hello(self) -> dict[str, Any]:
        """Return the program's hub: {"url", "project", "experiment"}, where `url` is None without one."""
        self._channel.send(b'{"hello":1}', _HELLO_S)
        answer: dict[str, Any] = json.loads(self._received(_HELLO_S))
        return answer

    def request(self, method: str, target: str, body: bytes | BinaryIO | None, headers: Mapping[str, str]) -> None:
        """Send a request.

        Raises:
            OSError: The program takes nothing, or is gone.
        """
        source = io.BytesIO(body or b"") if body is None or isinstance(body, bytes) else body
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        kind = headers.get("Content-Type", "")
        head = {"method": method, "target": target, "type": kind, "size": size}
        self._channel.send(json.dumps(head).encode(), self._timeout_s)
        while piece := source.read(PIECE_BYTES):
            self._channel.send(piece, self._timeout_s)

    def getresponse(self) -> ProgramAnswer:
        """Wait for the answer. The program's own wait for the hub ends first."""
        head = json.loads(self._received(2 * self._timeout_s))
        body = io.BytesIO()
        while body.tell() < head["size"]:
            body.write(self._received(self._timeout_s))
        return ProgramAnswer(head["status"], body.getvalue())

    def close(self) -> None:
        self._channel.close()

    def _received(self, timeout_s: float) -> bytes:
        try:
            return self._channel.receive(timeout_s)
        except EOFError as error:
            raise ConnectionResetError(str(error)) from error


def program_hub() -> tuple[Address | None, str | None]:
    """Return the hub of this task's program, to which its requests go through the program, and its experiment.

    (None, None) outside tasks, and if the program has none.
    """
    call = current_call()
    if call is None:
        return None, None
    try:
        requests = ProgramRequests(call, _HELLO_S)
        try:
            told = requests.hello()
        finally:
            requests.close()
    except OSError:  # the program uses no hub, or does not answer
        return None, None
    if not told["url"]:
        return None, None
    return Address(url=told["url"], project=told["project"], through_program=True), told["experiment"]
