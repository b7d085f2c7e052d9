"""What a run answers: routes and bodies, the same by HTTP and by a pool's channel. Who may ask is for those to see to.

    GET  /jobs                                    {"jobs": [status, ...]}
    GET  /jobs/{id}/status                        see RunStatus
    GET  /jobs/{id}/history?since=0               {"records": [...], "next": 12}
    POST /jobs/{id}/control[?wait=SECONDS]        {"command", "data", "request_id"}; the last two may be left out
    GET  /jobs/{id}/commands                      {"commands": [state, ...]}
    GET  /jobs/{id}/commands/{request}[?wait=S]   see CommandState

A POST is answered 200 when the command is executed, else 202: it is on its way. Errors have {"error"}; an unknown
command is a 400 with "valid_commands".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import parse_qs

from ...calls.control import COMMANDS, CommandState
from ...errors import UsageError
from .commands import ControlledRun

__all__ = ["BODY_LIMIT", "MAX_WAIT_S", "Answer", "ControlRequest", "answer"]

BODY_LIMIT = 64 * 1024
"""Bytes of a request's body."""
MAX_WAIT_S = 60.0
"""Seconds that one request may wait; a longer wait is this long."""

_PATH = re.compile(r"/jobs(?:/([^/]+)/([a-z]+)(?:/([^/]+))?)?", re.ASCII)
_METHODS = {"jobs": "GET", "status": "GET", "history": "GET", "control": "POST", "commands": "GET", "command": "GET"}


@dataclass(frozen=True, kw_only=True)
class ControlRequest:
    """`path` without its query; `body` as it came."""

    method: str
    path: str
    query: str = ""
    body: bytes = b""

    @property
    def wait_s(self) -> float:
        """How long it wants to wait: within 0 and MAX_WAIT_S. Raises: UsageError."""
        text = _last(self.query, "wait")
        if text is None:
            return 0.0
        try:
            seconds = float(text)
        except ValueError:  # refused below
            seconds = math.nan
        if not seconds >= 0:
            raise UsageError(f"wait: {text[:40]!r} is not a number of seconds, 0 or more")
        return min(seconds, MAX_WAIT_S)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`status` as HTTP's."""

    status: int
    body: dict[str, Any]
    headers: tuple[tuple[str, str], ...] = field(default=())


def answer(runs: Iterable[ControlledRun], request: ControlRequest, *, may_wait: bool = True) -> Answer:
    """The answer to one request; blocks for as long as it waits. Raises nothing that a request can bring about."""
    try:
        return _routed({controlled.job_id: controlled for controlled in runs}, request, may_wait=may_wait)
    except UsageError as error:
        return _error(400, str(error))


def _routed(runs: dict[str, ControlledRun], request: ControlRequest, *, may_wait: bool) -> Answer:
    found = _PATH.fullmatch(request.path)
    if found is None:
        return _error(404, "there is no such path")
    job_id, part, request_id = found.groups()
    name = "jobs" if job_id is None else "command" if part == "commands" and request_id else part
    if name not in _METHODS or (request_id and name != "command"):
        return _error(404, "there is no such path")
    if request.method != _METHODS[name]:
        message = f"{name} is asked by {_METHODS[name]}"
        return Answer(status=405, body={"error": message}, headers=(("Allow", _METHODS[name]),))
    if job_id is None:
        return Answer(status=200, body={"jobs": [controlled.seen() for controlled in runs.values()]})
    controlled = runs.get(job_id)
    if controlled is None:
        return _error(404, "there is no such job here")
    wait_s = min(request.wait_s, MAX_WAIT_S if may_wait else 0.0)
    if name == "command":
        return _of_command(controlled.command(request_id, wait_s))
    return _HANDLERS[name](controlled, request, wait_s)


def _status(controlled: ControlledRun, request: ControlRequest, wait_s: float) -> Answer:
    return Answer(status=200, body=controlled.seen())


def _history(controlled: ControlledRun, request: ControlRequest, wait_s: float) -> Answer:
    text = _last(request.query, "since") or "0"
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise UsageError(f"since: {text[:40]!r} is not the number of a record")
    records, following = controlled.history(int(text))
    return Answer(status=200, body={"records": records, "next": following})


def _commands(controlled: ControlledRun, request: ControlRequest, wait_s: float) -> Answer:
    return Answer(status=200, body={"commands": [asdict(state) for state in controlled.commands()]})


def _control(controlled: ControlledRun, request: ControlRequest, wait_s: float) -> Answer:
    try:
        said = json.loads(request.body)
    except (ValueError, RecursionError):
        return _error(400, 'the body is not JSON; send {"command": "status"}')
    command = said.get("command") if isinstance(said, dict) else None
    if not isinstance(command, str) or command not in COMMANDS:
        return Answer(
            status=400,
            body={"error": f"there is no command {str(command)[:40]!r}", "valid_commands": list(COMMANDS)},
        )
    request_id = said.get("request_id")
    if request_id is not None and not isinstance(request_id, str):
        return _error(400, "request_id is not a string")
    try:
        state = controlled.submit(command, request_id)
    except RuntimeError as error:
        return _error(409 if controlled.status == "ended" else 503, str(error))
    if command == "status":
        return Answer(status=200, body={**controlled.seen(), **asdict(state), "status": controlled.status})
    return _of_command((controlled.command(state.request_id, wait_s) if wait_s else state) or state)


_HANDLERS: dict[str, Callable[[ControlledRun, ControlRequest, float], Answer]] = {
    "status": _status,
    "history": _history,
    "control": _control,
    "commands": _commands,
}


def _of_command(state: CommandState | None) -> Answer:
    if state is None:
        return _error(404, "there is no such request, or it is too long ago")
    return Answer(status=200 if state.is_final else 202, body=asdict(state))


def _error(status: int, message: str) -> Answer:
    return Answer(status=status, body={"error": message})


def _last(query: str, name: str) -> str | None:
    """The last value that a query gives a name; None: none."""
    try:
        values = parse_qs(query, max_num_fields=16).get(name)
    except ValueError as error:
        raise UsageError("the query has too many fields") from error
    return values[-1] if values else None
