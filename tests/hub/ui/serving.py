"""An ASGI application on a port of this machine, in a thread, for a browser."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from tests.waiting import until


@contextmanager
def served(app: Any) -> Iterator[tuple[str, asyncio.AbstractEventLoop]]:
    """Serve `app` and give its address, and the loop that it runs in."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="pages-under-test")
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", loops[0]
    finally:
        server.should_exit = True
        thread.join(60)
