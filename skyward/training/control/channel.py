"""Control by the channel that a pool has to a node anyway: a run inside a call answers what `ComputePool.control` asks.

Whoever can ask this way has the pool, or is the same user on the node; there is no token. Nothing listens.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ...node.slot import answers
from ...node.slot.runtime import current_call
from .api import ControlRequest, answer
from .commands import ControlledRun
from .server import MAX_WAITING

__all__ = ["answer_here", "is_in_call"]

_serving = threading.Lock()
_waiting = threading.BoundedSemaphore(MAX_WAITING)


def is_in_call() -> bool:
    """Whether this code runs inside a call of a pool."""
    return current_call() is not None


def answer_here(controlled: ControlledRun) -> bool:
    """The running call answers for that run, until the call ends. False: there is no call."""
    with _serving:
        there = answers.handler_here()
        if isinstance(there, _Runs):
            there.runs.append(controlled)
            return True
        return answers.serve(_Runs([controlled]))


@dataclass
class _Runs:
    """Those of one call, also when they have ended: what became of a command may be asked until the call ends."""

    runs: list[ControlledRun]

    def __call__(self, question: bytes, reply: Callable[[bytes], None]) -> None:
        _on_question(self.runs, question, reply)


def _on_question(runs: list[ControlledRun], question: bytes, reply: Callable[[bytes], None]) -> None:
    try:
        said = json.loads(question)
        path, _, query = str(said["path"]).partition("?")
        body = said.get("body")
        request = ControlRequest(
            method=str(said["method"]),
            path=path,
            query=query,
            body=b"" if body is None else json.dumps(body).encode(),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        reply(_packed(400, {"error": "the question is not understood"}))
        return

    def say(*, may_wait: bool) -> None:
        done = answer(runs, request, may_wait=may_wait)
        reply(_packed(done.status, done.body))

    def wait() -> None:
        try:
            say(may_wait=True)
        finally:
            _waiting.release()

    if "wait=" in query and _waiting.acquire(blocking=False):
        threading.Thread(target=wait, name="skyward-answers-wait", daemon=True).start()
    else:
        say(may_wait=False)


def _packed(status: int, body: dict[str, object]) -> bytes:
    return json.dumps({"status": status, "body": body}).encode()
