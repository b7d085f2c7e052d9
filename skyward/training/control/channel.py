"""Control over a pool's existing channel to a node: a run inside a call answers the requests of `ComputePool.control`.

A caller who can send such a request owns the pool, or is the same user on the node. So there is no token, and no port.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ...node.slot import answers
from ...node.slot.runtime import current_call
from .api import ControlRequest, answer
from .commands import ControlledRun
from .server import MAX_WAITING

_serving = threading.Lock()
_waiting = threading.BoundedSemaphore(MAX_WAITING)


def is_in_call() -> bool:
    """Return whether this code runs inside a call of a pool."""
    return current_call() is not None


def answer_here(controlled: ControlledRun) -> bool:
    """Let the current call answer for a run until the call ends. Return False outside a call."""
    with _serving:
        handler = answers.handler_here()
        if isinstance(handler, _Runs):
            handler.runs.append(controlled)
            return True
        return answers.serve(_Runs([controlled]))


def command_here(command: str) -> bool:
    """Send a command to the runs within the current call. Return whether one of them takes it."""
    handler = answers.handler_here()
    is_taken = False
    for controlled in list(handler.runs) if isinstance(handler, _Runs) else []:
        with contextlib.suppress(RuntimeError):  # it has ended, or has enough to do
            controlled.submit(command)
            is_taken = True
    return is_taken


@dataclass
class _Runs:
    """Runs of one call, including ended ones: the outcome of a command can be queried until the call ends."""

    runs: list[ControlledRun]

    def __call__(self, question: bytes, reply: Callable[[bytes], None]) -> None:
        _on_question(self.runs, question, reply)


def _on_question(runs: list[ControlledRun], question: bytes, reply: Callable[[bytes], None]) -> None:
    try:
        fields = json.loads(question)
        path, _, query = str(fields["path"]).partition("?")
        body = fields.get("body")
        request = ControlRequest(
            method=str(fields["method"]),
            path=path,
            query=query,
            body=b"" if body is None else json.dumps(body).encode(),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        reply(_packed(400, {"error": "the request is malformed"}))
        return

    def respond(*, may_wait: bool) -> None:
        response = answer(runs, request, may_wait=may_wait)
        reply(_packed(response.status, response.body))

    def wait() -> None:
        try:
            respond(may_wait=True)
        finally:
            _waiting.release()

    # A request that waits gets a thread, because the channel's own thread must stay free. If too many wait, it is
    # answered at once.
    if "wait=" in query and _waiting.acquire(blocking=False):
        threading.Thread(target=wait, name="skyward-answers-wait", daemon=True).start()
    else:
        respond(may_wait=False)


def _packed(status: int, body: dict[str, object]) -> bytes:
    return json.dumps({"status": status, "body": body}).encode()
