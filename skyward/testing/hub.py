"""A hub for tests: the real server on loopback, in a folder, in this process."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from ..hub.http.settings import Settings
    from ..hub.services.hub import Hub

__all__ = ["HubServer"]


class HubServer:
    """A hub in a folder, served on a free port of 127.0.0.1 by a thread of this process.

    Leaving the `with` block stops the server and closes the database. Needs the extra `hub`.

    Args:
        folder: Where the hub keeps its data.
        with_auth: Whether requests need a token.
        settings: Configuration in place of the defaults of a hub in `folder`. Its port should be 0.

    Attributes:
        url: Address of the server.
        token: Token of the owner. Empty without authentication.
        headers: Headers that carry the token.

    Example:
        from skyward.testing.hub import HubServer

        with HubServer(tmp_path) as server:
            mlflow.set_tracking_uri(server.url)
    """

    def __init__(self, folder: str | Path, *, with_auth: bool = True, settings: Settings | None = None) -> None:
        from ..hub.http.settings import local_settings

        self.settings = settings or local_settings(Path(folder), port=0, with_auth=with_auth)
        self.url = ""
        self.token = ""
        self._ready: Future[tuple[Hub, str]] = Future()
        self._thread = threading.Thread(target=self._serve, name="skyward-hub", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def __enter__(self) -> Self:
        self._thread.start()
        self.hub, self.url = self._ready.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        from ..hub.client.pools import finish_records

        finish_records()  # a pool that was closed a moment ago
        assert self._loop is not None
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except asyncio.CancelledError:
            return
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _run(self) -> None:
        from ..hub.http.serve import serve_forever

        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        await serve_forever(self.settings, self._greet)

    async def _greet(self, hub: Hub, url: str) -> None:
        if hub.with_auth:
            owner = await hub.access.actor_named(hub.owner, None)
            self.token = (await hub.people.create_token(owner, "of a test")).text
        self._ready.set_result((hub, url))
