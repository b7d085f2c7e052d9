"""Routes and bodies of a run's control, the same by HTTP and by a pool's channel. The transport checks access.

    GET  /jobs                                    {"jobs": [status, ...]}
    GET  /jobs/{id}/status                        see RunStatus
    GET  /jobs/{id}/history?since=0               {"records": [...], "next": 12}
    POST /jobs/{id}/control[?wait=SECONDS]        {"command", "data", "request_id"}; the last two may be left out
    GET  /jobs/{id}/commands                      {"commands": [state, ...]}
    GET  /jobs/{id}/commands/{request}[?wait=S]   see CommandState

A POST is answered with 200 if the command is executed, with 202 if it is accepted and still pending. Errors have the
body {"error"}; an unknown command is a 400 with "valid_commands".
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

BODY_LIMIT = 64 * 1024
"""Largest body of a request, in bytes."""
MAX_WAIT_S = 60.0
"""Longest wait of one request, in seconds; longer ones are cut to it."""

_PATH = re.compile(r"/jobs(?:/([^/]+)/([a-z]+)(?:/([^/]+))?)?", re.ASCII)
_METHODS = {"jobs": "GET", "status": "GET", "history": "GET", "control": "POST", "commands": "GET", "command": "GET"}


@dataclass(frozen=True, kw_only=True)
class ControlRequest:
    """One request, with `path` without its query and `body` as received."""

    method: str
    path: str
    query: str = ""
    body: bytes = b""

    @property
    def wait_s(self) -> float:
        """Requested wait in seconds, within 0 and MAX_WAIT_S. Raise UsageError if it is not a number."""
        text = _last(self.query, "wait")
        if text is None:
            return 0.0
        try:
            seconds = float(text)
        except ValueError:  # rejected below
            seconds = math.nan
        if not seconds >= 0:
            raise UsageError(f"wait={text[:40]!r}: not a number of seconds; send 0 or more")
        return min(seconds, MAX_WAIT_S)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer, with a `status` of HTTP."""

    status: int
    body: dict[str, Any]
    headers: tuple[tuple[str, str], ...] = field(default=())


_NO_PATH = "path: unknown path; GET /jobs lists the runs"


def answer(runs: Iterable[ControlledRun], request: ControlRequest, *, may_wait: bool = True) -> Answer:
    """Answer one request, after its wait. No request can make it raise."""
    try:
        return _routed({controlled.job_id: controlled for controlled in runs}, request, may_wait=may_wait)
    except UsageError as error:
        return _error(400, str(error))


def _routed(runs: dict[str, ControlledRun], request: ControlRequest, *, may_wait: bool) -> Answer:
    match = _PATH.fullmatch(request.path)
    if match is None:
        return _error(404, _NO_PATH)
    job_id, part, request_id = match.groups()
    name = "jobs" if job_id is None else "command" if part == "commands" and request_id else part
    if name not in _METHODS or (request_id and name != "command"):
        return _error(404, _NO_PATH)
    if request.method != _METHODS[name]:
        message = f"{name}: does not take {request.method}; send {_METHODS[name]}"
        return Answer(status=405, body={"error": message}, headers=(("Allow", _METHODS[name]),))
    if job_id is None:
        return Answer(status=200, body={"jobs": [controlled.seen() for controlled in runs.values()]})
    controlled = runs.get(job_id)
    if controlled is None:
        return _error(404, f"job={job_id[:80]}: unknown job; GET /jobs lists those that are open")
    wait_s = min(request.wait_s, MAX_WAIT_S if may_wait else 0.0)
    if name == "command":
        return _command_answer(controlled.command(request_id, wait_s))
    return _HANDLERS[name](controlled, request, wait_s)


def _status(controlled: ControlledRun, request: ControlRequest, wait_s: float) -> Answer:
    return Answer(status=200, body=controlled.seen())


def _history(controlled: ControlledRun, request: ControlRequest, wait_s: float) -> Answer:
    text = _last(request.query, "since") or "0"
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise UsageError(f"since={text[:40]!r}: not the number of a record; send 0 or more")
    records, following = controlled.history(int(text))
    return Answer(status=200, body={"records": records, "next": following})


def _commands(controlled: ControlledRun, request: ControlRequest, wait_s: float) -> Answer:
    return Answer(status=200, body={"commands": [asdict(state) for state in controlled.commands()]})


def _control(controlled: ControlledRun, request: ControlRequest, wait_s: float) -> Answer:
    try:
        fields = json.loads(request.body)
    except (ValueError, RecursionError):
        return _error(400, 'body: is not JSON; send {"command": "status"}')
    command = fields.get("command") if isinstance(fields, dict) else None
    if not isinstance(command, str) or command not in COMMANDS:
        return Answer(
            status=400,
            body={
                "error": f"command: unknown command {str(command)[:40]!r}; send one of {', '.join(COMMANDS)}",
                "valid_commands": list(COMMANDS),
            },
        )
    request_id = fields.get("request_id")
    if request_id is not None and not isinstance(request_id, str):
        return _error(400, "request_id: is not a string; send one, or leave it out")
    try:
        state = controlled.submit(command, request_id)
    except RuntimeError as error:
        return _error(409 if controlled.status == "ended" else 503, str(error))
    if command == "status":
        return Answer(status=200, body={**controlled.seen(), **asdict(state), "status": controlled.status})
    return _command_answer((controlled.command(state.request_id, wait_s) if wait_s else state) or state)


_HANDLERS: dict[str, Callable[[ControlledRun, ControlRequest, float], Answer]] = {
    "status": _status,
    "history": _history,
    "control": _control,
    "commands": _commands,
}


def _command_answer(state: CommandState | None) -> Answer:
    if state is None:
        return _error(404, "request_id: unknown request, or too long ago; GET /jobs/ID/commands lists the others")
    return Answer(status=200 if state.is_final else 202, body=asdict(state))


def _error(status: int, message: str) -> Answer:
    return Answer(status=status, body={"error": message})


def _last(query: str, name: str) -> str | None:
    """Return the last value of a name in the query; None if there is none."""
    try:
        values = parse_qs(query, max_num_fields=16).get(name)
    except ValueError as error:
        raise UsageError("query: too many fields; send at most 16") from error
    return values[-1] if values else None
