"""A hub's process: the socket, uvicorn, and an orderly end on Ctrl-C and SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from ...errors import UsageError
from .app import HubApplication, create_app
from .connections import PatientProtocol, allow_connections
from .logs import install_logs
from .settings import Settings
from .supervisor import supervise

if TYPE_CHECKING:
    from ..services.hub import Hub

BACKLOG = 2048
LAST_ANSWERS_S = 5
"""Seconds that running requests have to end once the server stops."""
IDLE_S = 75

OnReady = Callable[["Hub", str], Awaitable[None]]
"""`on_ready(hub, url)`, called once requests are answered."""


class _HubServer(uvicorn.Server):
    """Leaves signals to `serve`: uvicorn raises them again at the end, and a clean end would look like a crash."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self.stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    def stop(self) -> None:
        """Stop when running requests have ended; called again, at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self.stopping.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(settings: Settings, on_ready: OnReady | None = None) -> None:
    """Run a hub until SIGINT or SIGTERM.

    Args:
        settings: The hub's configuration.
        on_ready: Is awaited once requests are answered. Not with several workers.

    Raises:
        UsageError: The database or the port cannot be used.
    """
    install_logs(settings.logging.level, settings.logging.format)
    allow_connections()
    if settings.server.workers > 1:
        with listening(settings.server.host, settings.server.port) as listener:
            supervise(settings.server.workers, lambda number: _work(settings, listener, number))
        return
    asyncio.run(serve_forever(settings, on_ready, with_signals=True))


def _work(settings: Settings, listener: socket.socket, number: int) -> None:
    """Run one of several server processes. Each has a port of its own for metrics, because each counts for itself."""
    metrics = replace(settings.metrics, port=settings.metrics.port + number)
    asyncio.run(serve_forever(replace(settings, metrics=metrics), with_signals=True, shared=listener))


async def serve_forever(
    settings: Settings,
    on_ready: OnReady | None = None,
    *,
    with_signals: bool = False,
    shared: socket.socket | None = None,
) -> None:
    """Run a hub on the running event loop until it is cancelled.

    Args:
        settings: The hub's configuration.
        on_ready: Is awaited once requests are answered.
        with_signals: Whether SIGINT and SIGTERM end it too. Only on the main thread.
        shared: Listening socket of several processes. By default one of its own.
    """
    app = create_app(settings)
    own = listening(settings.server.host, settings.server.port)
    with own if shared is None else contextlib.nullcontext(shared) as listener:
        async with app.router.lifespan_context(app):
            assert app.hub is not None
            server = _server(app, settings.server.patience_s)
            with _signals(server, app.hub) if with_signals else contextlib.nullcontext():
                tasks = [asyncio.create_task(server.serve(sockets=[listener]))]
                if app.figures is not None:
                    tasks.append(asyncio.create_task(_serve_metrics(app, server)))
                await server.ready.wait()
                if with_signals:
                    # The process is this hub's alone. Without this, each batch of thousands of records makes the
                    # collector walk all modules and tables: more time than decoding the batch.
                    gc.freeze()
                if on_ready is not None:
                    await on_ready(app.hub, address_of(settings, listener))
                try:
                    # Cancelled itself, uvicorn would leave its connections open; it is told to stop instead.
                    await asyncio.shield(asyncio.gather(*tasks))
                finally:
                    app.hub.end_streams()
                    server.should_exit = True
                    server.stopping.set()
                    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Hold a listening socket.

    Raises:
        UsageError: The port is in use, or the address is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only where the protocol is named, and each answer would take 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, OverflowError) as error:
            raise UsageError(f"port={port}: cannot listen on {host}: {error}; choose another --port") from None
        listener.listen(BACKLOG)
        yield listener


def address_of(settings: Settings, listener: socket.socket) -> str:
    """Return the address of a server for links."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return settings.server.url or f"http://{shown}:{port}"


def _server(app: Any, patience_s: float) -> _HubServer:
    protocol: Any = partial(PatientProtocol, patience_s=patience_s)
    return _HubServer(
        uvicorn.Config(
            app,
            http=protocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=LAST_ANSWERS_S,
            backlog=BACKLOG,
        )
    )


async def _serve_metrics(app: HubApplication, server: _HubServer) -> None:
    """Serve Prometheus metrics on their own port until the hub stops."""
    from .figures import metrics_app

    assert app.figures is not None
    assert app.hub is not None
    metrics = app.settings.metrics
    with listening(metrics.host, metrics.port) as listener:
        own = _server(metrics_app(app.figures, metrics.path, app.hub.usage.counts), app.settings.server.patience_s)
        task = asyncio.create_task(own.serve(sockets=[listener]))
        await server.stopping.wait()
        own.should_exit = True
        await task


@contextlib.contextmanager
def _signals(server: _HubServer, hub: Hub) -> Iterator[None]:
    """Stop on SIGINT and SIGTERM: the first lets running requests end, the second does not."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        hub.end_streams()
        server.stop()

    caught = (signal.SIGINT, signal.SIGTERM)
    for number in caught:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
