"""Callback that lets other processes inspect, save and stop a run while it trains."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import secrets
import sys
import time
import weakref
from collections.abc import Mapping
from typing import Any

from ...calls.control import check_job_id
from ...errors import UsageError
from ..agree import Alone, Ranks
from ..events import TrainerCallback
from . import channel, endpoint
from .commands import ControlledRun
from .requests import request, request_abort
from .server import AccessCheck, ControlServer, bind, bind_local, is_loopback

_log = logging.getLogger(__name__)


class TrainerControlCallback(TrainerCallback):
    """Take commands for the run (save, stop, abort), and report its progress.

    Other processes of this user on this machine use `skyward train` or `skyward.training.control.find(job_id)`, through
    a socket that only they can open. Other machines use HTTP, if it is enabled (see docs/control.md). Inside a call of
    a pool, the pool's program uses `pool.control(...)`, and nothing listens.

    Rank 0 takes commands at the end of each step, and the ranks agree on them there. So all of them stop at the same
    step. Signal handlers stay as they are.

    Args:
        job_id: id of the run: letters, digits, ".", "_" and "-". None: `job_<time>_<host>_<process>`.
        port: HTTP port, 0 for any free one. None: with HTTP, the first free one from 8900 on.
        enable_http: whether to listen on a port. With True, it also listens inside a call of a pool. None: True if
            port, host, auth_token or disable_auth is set.
        host: address to listen on. None: 127.0.0.1, which only this machine reaches.
        auth_token: token that requests to the port must carry. None: 32 random bytes, created when the run begins.
        disable_auth: accept requests without a token. Everyone who reaches the port can then end the run.

    Raises:
        UsageError: an argument is out of range. When training begins, on all ranks: the port is taken, a living run
            has the job id, or its files cannot be written.

    Example:
        trainer = Trainer(model, args, callbacks=[TrainerControlCallback(job_id="my-run")])
        trainer.train()
    """

    collective_events = frozenset({"on_train_begin", "on_log"})

    def __init__(
        self,
        job_id: str | None = None,
        port: int | None = None,
        enable_http: bool | None = None,
        host: str | None = None,
        auth_token: str | None = None,
        disable_auth: bool = False,
    ) -> None:
        if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535):
            raise UsageError(f"port={port!r}: not a port; set 0 to 65535, or None for the first free one from 8900")
        if auth_token is not None:
            _check_token(auth_token)
            if disable_auth:
                raise UsageError("auth_token=...: has no effect with disable_auth=True; remove one of them")
        self._wanted_id = None if job_id is None else check_job_id(job_id)
        self._port = port
        is_configured = port is not None or host is not None or auth_token is not None or disable_auth
        self._has_http = is_configured if enable_http is None else enable_http
        self._host = host or "127.0.0.1"
        self._given_token = auth_token
        self._disable_auth = disable_auth
        self._controlled: ControlledRun | None = None
        self._job_id: str | None = self._wanted_id
        self._servers: list[ControlServer] = []
        self._http: ControlServer | None = None
        self._is_aborting = False
        self._close: weakref.finalize[Any, Any] | None = None

    @property
    def job_id(self) -> str | None:
        """Id of the run on every rank, once training has begun."""
        return self._job_id

    @property
    def port(self) -> int | None:
        """HTTP port of rank 0; None if it does not listen on one."""
        return None if self._http is None else self._http.port

    # Life -----------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, ranks: Ranks | None = None, **_: Any) -> None:
        ranks = ranks or Alone(rank=0 if state.is_world_process_zero else 1)
        self._end()
        self._is_aborting = False
        if ranks.rank == 0:
            self._begin(args, state, ranks)
        self._job_id = ranks.share(self._job_id)
        self._tell_ranks(state, ranks)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._controlled is not None:
            self._controlled.global_step = state.global_step
            self._controlled.epoch = state.epoch
        self._end()

    def _begin(self, args: Any, state: Any, ranks: Ranks) -> None:
        endpoint.sweep()
        controlled = ControlledRun(self._wanted_id or endpoint.default_job_id())
        controlled.max_steps, controlled.global_step, controlled.epoch = state.max_steps, state.global_step, state.epoch
        controlled.world_size = ranks.world_size
        controlled.ranks([_rank_report(state, ranks)])  # those of the other ranks follow after the first exchange
        channel.answer_here(controlled)
        if self._has_http or not channel.is_in_call():
            self._listen(controlled, args)
        self._controlled, self._job_id = controlled, controlled.job_id
        # A run that ends by an exception does not fire on_train_end.
        self._close = weakref.finalize(self, _close, controlled, self._servers)

    def _listen(self, controlled: ControlledRun, args: Any) -> None:
        with contextlib.ExitStack() as undo:
            token = None if self._disable_auth else self._given_token or secrets.token_hex(32)
            http = None
            if self._has_http:
                # The port comes first: it is the likeliest to fail, and then no file has to be taken back.
                gate = AccessCheck(host=self._host, token=token)
                http = ControlServer([controlled], bind(self._host, self._port), gate=gate)
                undo.callback(http.close)
            endpoint.claim(controlled.job_id)
            undo.callback(endpoint.withdraw, controlled.job_id)
            local = ControlServer([controlled], bind_local())
            undo.callback(local.close)
            self._servers = [local] if http is None else [local, http]
            for server in self._servers:
                server.start()
            # Announced last, when the servers answer, so that whoever finds the files gets an answer.
            endpoint.announce(
                endpoint.Endpoint(
                    job_id=controlled.job_id,
                    host=None if http is None else http.host,
                    port=None if http is None else http.port,
                    socket=local.path,
                    pid=os.getpid(),
                    started_at=time.time(),
                    output_dir=_text(args, "output_dir"),
                    logging_dir=_text(args, "logging_dir"),
                    has_auth=http is not None and token is not None,
                ),
                None if http is None else token,
            )
            undo.pop_all()
        self._http = http
        if http is not None:
            self._warn()
            _log.info("control of %s listens on %s port %d", controlled.job_id, self._host, http.port)
        _log.info("control of %s: run `skyward train status %s`", controlled.job_id, controlled.job_id)

    def _warn(self) -> None:
        if not is_loopback(self._host):
            _log.warning(
                "control listens on %s, which other machines may reach, without encryption; to be safe, keep the "
                "default, 127.0.0.1, and connect by `ssh -L`",
                self._host,
            )
        if self._disable_auth:
            _log.warning("control requires no token (disable_auth=True): everyone who reaches its port can end the run")

    def _end(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close()
        self._controlled = self._http = None
        self._servers = []

    # Events -----------------------------------------------------------------------------------------------------------

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        controlled = self._controlled
        if controlled is not None:
            controlled.step_at = time.time()
            controlled.global_step, controlled.max_steps = state.global_step, state.max_steps
            controlled.epoch = state.epoch
            if controlled.has_new:
                self._apply(controlled, args, control)
        self._keep_aborting(control)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        ranks: Ranks | None = None,
        **_: Any,
    ) -> None:
        if self._controlled is not None and logs:
            self._controlled.logged(logs)
        self._tell_ranks(state, ranks or Alone())
        self._keep_aborting(control)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        if self._controlled is not None and metrics:
            self._controlled.evaluated(metrics)
        self._keep_aborting(control)

    def on_save(self, args: Any, state: Any, control: Any, saved_step: int | None = None, **_: Any) -> None:
        if self._controlled is not None:
            self._controlled.saved(state.global_step if saved_step is None else saved_step)
        self._keep_aborting(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._keep_aborting(control)

    on_epoch_begin = on_epoch_end = on_step_begin

    # Helpers ----------------------------------------------------------------------------------------------------------

    def _apply(self, controlled: ControlledRun, args: Any, control: Any) -> None:
        """Set the flags of the commands on rank 0. All ranks adopt them when they agree at the end of this step."""
        for command in controlled.take(controlled.global_step).commands:
            _log.info("control: applied %s at step %d", command, controlled.global_step)
            if command == "abort":
                self._is_aborting = True
            else:
                request(command, args, control)
        if self._is_aborting:
            request_abort(control)

    def _keep_aborting(self, control: Any) -> None:
        """Suppress later requests for a save or an evaluation, such as a schedule's, on every rank after an abort."""
        if self._is_aborting or getattr(control, "should_abort_without_save", False):
            control.should_save = control.should_evaluate = False
            control.should_training_stop = True

    def _tell_ranks(self, state: Any, ranks: Ranks) -> None:
        reports = ranks.exchange(_rank_report(state, ranks))
        if self._controlled is not None:
            self._controlled.ranks(reports)


def _rank_report(state: Any, ranks: Ranks) -> dict[str, Any]:
    return {
        "rank": ranks.rank,
        "node": os.environ.get("GROUP_RANK"),
        "host": platform.node(),
        "pid": os.getpid(),
        "global_step": state.global_step,
        "at": time.time(),
        "memory_bytes": _memory_bytes(),
    }


def _close(controlled: ControlledRun, servers: list[ControlServer]) -> None:
    """Clean up after the run. Its files go first, so that nobody finds an endpoint that no longer answers."""
    controlled.ended()
    if servers:
        endpoint.withdraw(controlled.job_id)
    for server in servers:
        server.close()


def _text(args: Any, name: str) -> str | None:
    value = getattr(args, name, None)
    return None if value is None else str(value)


def _check_token(token: str) -> None:
    if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("auth_token=...: must be visible ASCII characters without spaces; use secrets.token_hex(32)")


def _memory_bytes() -> int | None:
    """Return the memory allocated on this rank's device, or else the process's resident memory."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.memory_allocated())
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc, as on macOS
        return None
