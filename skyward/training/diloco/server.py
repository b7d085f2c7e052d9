"""`DiLoCoServer`: an exchange behind HTTP, with a thread for its event loop and one that evicts silent workers."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import ssl
import threading
from types import TracebackType
from typing import Any, Self

import torch
import uvicorn

from ...errors import CheckpointSaveFailed, UsageError
from ..control.server import bind, is_loopback
from .addresses import FIRST_PORT
from .algorithm import OUTER_LR, OUTER_MOMENTUM, OuterOptimizer
from .http_app import DiLoCoApp
from .opening import end_exchange, open_exchange
from .server_settings import DiLoCoSettings
from .tokens import ServerTokens, token_in

START_S = 60.0
"""Longest wait for the event loop to answer requests, in seconds."""
STOP_S = 600.0
"""Longest wait for the last save, in seconds."""
MOST_PORT = 65535
LAST_ANSWERS_S = 2
"""Seconds that running requests have to end once the server stops."""

_log = logging.getLogger(__name__)


class DiLoCoServer:
    """Server of loosely joined training: it averages the workers' progress, and holds the global parameters.

    Rounds are synchronous by default. Each waits for the workers that were present when it began. A worker that joins
    later takes part in the next one, and one that is silent for too long is no longer waited for. With `async_mode`
    nobody waits.

    With `save_dir`, the state is saved before the workers of a round get their answers. A server that was killed goes
    on from there, and its workers notice nothing but a pause.

    Args:
        model: Model whose parameters, and buffers of floating point, are the first global ones; None: the first worker
            sends its own. A save in `save_dir` comes before both.
        num_workers: Workers that the first round waits for; in asynchronous mode, workers that are expected.
        port: Port to listen on, 0 for any free one; None: the first free one from 8512 on.
        outer_optimizer: Optimizer of the global parameters; None: SGD with Nesterov momentum, in asynchronous mode
            `DelayedNesterov`. `TorchOuter` makes one of any optimizer of torch.
        host: Address to listen on. Other machines reach any but a loopback address, so it needs `cert`.
        save_dir: Folder of the saves; None: the state is lost with the process.
        save_every_n_rounds: Rounds between two saves. With more than 1, a server that was killed goes back by some
            rounds, and so do its workers.
        heartbeat_timeout: Seconds of silence after which a worker is evicted; 0: never.
        min_workers: Least number of workers that end a round. Fewer wait for more, except once the others have ended
            their training: then the last ones train on alone.
        bf16_answers: Answer with updates in bfloat16, a quarter to a half of the bytes. The global parameters then move
            by the rounded updates.
        quantization_bits: Answer with updates of 8 or 4 bits for a value, and add the rounding error of each to the
            next one; 0: do not. All workers get the same answer, so they stay equal to the bit.
        async_mode: Apply each worker's update as it arrives, for the parameters that it was computed from. No worker
            waits for another, and each update is a round.
        dn_buffer_size: Updates between two updates of the momentum in asynchronous mode (delayed Nesterov); 0:
            `num_workers`.
        weighting: Weight of each worker in the mean: "equal" for all; "samples" that it has read by a `DiLoCoSampler`
            since its base round; or "tokens" that it has counted since then by `count_tokens`. The latter two need
            synchronous rounds of the whole model.
        outer_lr: Learning rate of that SGD, > 0.
        outer_momentum: Its momentum, >= 0 and < 1. With 0 there is none.
        token: The operator's token, which workers may use, too; None: 32 random bytes, which `save_dir` keeps for the
            next start in its file `token`. `add_token` makes one for a worker alone.
        cert: PEM file with the certificate for TLS and its key.

    Raises:
        UsageError: An argument is not legal, the port is taken, or the save is of another model.
        CheckpointSaveFailed: At the end of a `with` block: the last state could not be saved. If the block raises, that
            error has a note of it.

    Example:
        with DiLoCoServer(model, num_workers=2, save_dir="global") as server:
            print(server.address, server.token)
            input("Enter ends the server")
    """

    def __init__(  # noqa: PLR0913  # keyword-only options
        self,
        model: torch.nn.Module | None = None,
        num_workers: int = 1,
        *,
        port: int | None = None,
        outer_optimizer: OuterOptimizer | None = None,
        host: str = "127.0.0.1",
        save_dir: str | os.PathLike[str] | None = None,
        save_every_n_rounds: int = 1,
        heartbeat_timeout: float = 120.0,
        min_workers: int = 1,
        bf16_answers: bool = False,
        quantization_bits: int = 0,
        async_mode: bool = False,
        dn_buffer_size: int = 0,
        weighting: str = "equal",
        outer_lr: float = OUTER_LR,
        outer_momentum: float = OUTER_MOMENTUM,
        token: str | None = None,
        cert: str | os.PathLike[str] | None = None,
    ) -> None:
        settings = DiLoCoSettings(
            num_workers=num_workers,
            min_workers=min_workers,
            outer_optimizer=outer_optimizer,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            save_dir=save_dir,
            save_every_n_rounds=save_every_n_rounds,
            heartbeat_timeout=heartbeat_timeout,
            bf16_answers=bf16_answers,
            quantization_bits=quantization_bits,
            async_mode=async_mode,
            dn_buffer_size=dn_buffer_size,
            weighting=weighting,
        )
        if not is_loopback(host) and cert is None:
            raise UsageError(
                f"host={host!r}: other machines reach it, and cert=None means no encryption; "
                "set cert= to a certificate, or keep host='127.0.0.1' and use `ssh -L`"
            )
        if port is not None and not 0 <= port <= MOST_PORT:
            raise UsageError(
                f"port={port!r}: must be from 0 to {MOST_PORT}; set 0 for any free one", field="port", value=port
            )
        self._host, self._port, self._cert = host, port, cert
        self._token = token or (secrets.token_hex(32) if save_dir is None else token_in(save_dir))
        self._tokens = ServerTokens(self._token, save_dir)
        self._save_dir = None if save_dir is None else os.fspath(save_dir)
        self._exchange = open_exchange(settings, model)
        self._look_s = heartbeat_timeout / 3 if heartbeat_timeout else None
        self._stop = threading.Event()
        self._socket: socket.socket | None = None
        self._server: uvicorn.Server | None = None
        self._app: DiLoCoApp | None = None
        self._threads: list[threading.Thread] = []
        self._ending: threading.Thread | None = None
        self._save_failure: Exception | None = None

    @property
    def token(self) -> str:
        """The operator's token. Workers may use it, too; see `add_token` for one that can do less."""
        return self._token

    @property
    def address(self) -> str:
        """Address for workers, such as `http://127.0.0.1:8512`. The server has been started."""
        assert self._socket is not None
        host, port = self._socket.getsockname()[:2]
        return f"{'http' if self._cert is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"

    def status(self) -> dict[str, Any]:
        """Return the open round, the workers and the last save, as `skyward diloco status --json` prints them."""
        return self._exchange.status()

    def history(self) -> list[dict[str, Any]]:
        """Return the last 512 rounds, the oldest first: losses, norms, and the cosines of the workers' deltas."""
        return self._exchange.history()

    @property
    def tokens(self) -> dict[str, bool]:
        """Workers that were ever given a token of their own, and whether it is accepted."""
        return self._tokens.workers()

    def add_token(self, worker: str) -> str:
        """Return a new token for one worker. It exchanges deltas under that id, and reads the status, but no more.

        Nobody can look it up later: the server keeps its hash, in `save_dir` if there is one.

        Raises:
            UsageError: The worker has a token, or the name is not legal.
        """
        return self._tokens.issue(worker)

    def revoke_token(self, worker: str) -> bool:
        """Refuse the token of a worker from now on, and evict the worker. Return whether it was present.

        Raises:
            UsageError: The worker has no token.
        """
        self._tokens.revoke(worker)  # first, so that it cannot join again
        return self._exchange.evict(worker)

    def start(self) -> None:
        """Listen, and return once requests are answered.

        Raises:
            UsageError: The port or the certificate cannot be used.
        """
        self._socket = bind(self._host, self._port, first=FIRST_PORT)
        self._app = DiLoCoApp(self._exchange, tokens=self._tokens, stop=self._stop.set)
        try:
            self._server = uvicorn.Server(self._config(self._app))
        except BaseException:
            self._socket.close()
            raise
        self._threads = [threading.Thread(target=self._serve, name="skyward-diloco-server", daemon=True)]
        if self._look_s is not None:
            self._threads.append(threading.Thread(target=self._look, name="skyward-diloco-eviction", daemon=True))
        for thread in self._threads:
            thread.start()
        self._await_start(self._server)

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Save, end all requests, and return when nothing runs. Idempotent.

        Args:
            timeout_s: Longest wait, in seconds. A disk may stall, and its writer cannot be interrupted.

        Returns:
            Whether it has ended, and its last state is saved if there is a `save_dir`. The log says why not. Threads
            that have not ended do so once the disk goes on, or with the process.
        """
        self._stop.set()
        if self._server is None or self._app is None:
            return self._save_failure is None
        self._app.end_waits()
        self._server.should_exit = True
        if self._ending is None:
            self._ending = threading.Thread(target=self._end, name="skyward-diloco-end", daemon=True)
            self._ending.start()
        self._ending.join(timeout_s)
        if self._ending.is_alive():
            _log.error("the server has not saved its last state after %g s; it is lost if the process ends", timeout_s)
            return False
        return self._save_failure is None

    def wait(self) -> None:
        """Return when an operator asks the server to stop (`skyward diloco stop`), or another thread calls `stop`."""
        while not self._stop.wait(1.0):  # so that Ctrl-C is seen
            pass

    def run(self) -> None:
        """Serve until an operator asks the server to stop, or an exception such as Ctrl-C ends it."""
        with self:
            self.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stop():
            return
        failure = self._save_failure
        why = f"is still being written after {STOP_S:g} s" if failure is None else f"could not be saved: {failure}"
        unsaved = CheckpointSaveFailed(
            f"save_dir={self._save_dir!r}: the last state {why}; check the disk and its space"
        )
        if error is None:
            raise unsaved from failure
        error.add_note(str(unsaved))

    def _config(self, app: DiLoCoApp) -> uvicorn.Config:
        config = uvicorn.Config(
            app.asgi,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=LAST_ANSWERS_S,
            ssl_certfile=None if self._cert is None else os.fspath(self._cert),
        )
        try:
            config.load()
        except OSError as error:  # an ssl.SSLError is one
            problem = (
                "has no certificate, or not its key"
                if isinstance(error, ssl.SSLError)
                else f"cannot be read: {error.strerror}"
            )
            raise UsageError(
                f"cert={self._cert!r}: {problem}; name a PEM file with a certificate and its key, as "
                "`cat ca.pem key.pem` writes it"
            ) from error
        return config

    def _serve(self) -> None:
        assert self._server is not None
        assert self._socket is not None
        try:
            self._server.run(sockets=[self._socket])
        except Exception:
            _log.exception("the server ended")
        finally:
            self._socket.close()
            self._stop.set()

    def _end(self) -> None:
        for thread in self._threads:
            thread.join()
        if self._app is not None:
            self._app.close()
        self._save_failure = end_exchange(self._exchange)
        self._server = None

    def _look(self) -> None:
        while not self._stop.wait(self._look_s):
            try:
                self._exchange.evict_silent()
            except Exception:
                _log.exception("a round could not be closed")

    def _await_start(self, server: uvicorn.Server) -> None:
        for _ in range(int(START_S / 0.01)):
            if server.started:
                return
            if self._stop.wait(0.01):
                break
        self.stop()
        raise UsageError(f"host={self._host!r}: the server did not start; see the log above for the reason")
