"""A line to a server that breaks at a chosen byte, or after the server has taken everything in."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

ANSWER = 1 << 40
"""A cut after the request: the server gets all of it, and its answer is lost."""
_PIECE = 1 << 16


class LossyLine:
    """Listens in front of a server, and passes on its requests.

    Args:
        target: Port of the server.
        request: Beginning of the requests that are cut, such as "PUT /updates".
        cuts: For each such request in turn: byte of its body before which the line breaks. Negative ones are in its
            head. Later requests pass.
        answer_cuts: The same for the answers with a body to such requests.
        gate: Event that all such requests wait for, once they have come in whole; None: they do not wait.
    """

    def __init__(
        self,
        target: int,
        *,
        request: str,
        cuts: Sequence[int] = (),
        answer_cuts: Sequence[int] = (),
        gate: threading.Event | None = None,
    ) -> None:
        self._target, self._request = target, request.encode()
        self.cuts, self.answer_cuts = list(cuts), list(answer_cuts)
        self._gate = gate
        self.begun: list[str] = []
        """First words of the requests that have come in."""
        self.ended: list[str] = []
        """First words of those whose answers have passed."""
        self.bodies: list[bytes] = []
        """Bodies of answers to the chosen requests, as far as they have passed."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                worker, _ = self._listener.accept()
                threading.Thread(target=self._join, args=(worker,), daemon=True).start()

    def _join(self, worker: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            worker,
            socket.create_connection(("127.0.0.1", self._target)) as server,
        ):
            self._carry(worker, server)

    def _carry(self, worker: socket.socket, server: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            request += worker.recv(_PIECE)
        head, _, body = request.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields.get(b"content-length", 0))
        while len(body) < length:
            body += worker.recv(_PIECE)
        request = head + b"\r\n\r\n" + body
        words = head.partition(b"?")[0].decode()
        self.begun.append(words)
        is_chosen = head.startswith(self._request)
        if is_chosen and self._gate is not None:
            assert self._gate.wait(100)
        cut = self.cuts.pop(0) if self.cuts and is_chosen else None
        if cut is not None and cut != ANSWER:
            server.sendall(request[: len(request) - length + cut])
            # The server ends first: a worker that tries again at once would race with the bytes that have come.
            server.shutdown(socket.SHUT_WR)
            while server.recv(_PIECE):
                pass
            return
        server.sendall(request)
        answer = b""
        while piece := server.recv(_PIECE):
            if cut == ANSWER:
                return
            if is_chosen:
                answer += piece
            else:
                worker.sendall(piece)
        if is_chosen and not self._pass_answer(worker, answer):
            return
        self.ended.append(words)

    def _pass_answer(self, worker: socket.socket, answer: bytes) -> bool:
        """Pass on an answer to a chosen request, and return whether it passed whole."""
        body = answer.partition(b"\r\n\r\n")[2]
        cut = self.answer_cuts.pop(0) if self.answer_cuts and body else None
        passed = len(answer) if cut is None else len(answer) - len(body) + cut
        worker.sendall(answer[:passed])
        self.bodies.append(body[: len(body) if cut is None else max(0, cut)])
        return cut is None
