"""The ASGI application of a hub."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from .credentials import Credentials
from .edge import Edge
from .routing import Table
from .settings import LOOPBACK, Settings
from .table import ROUTES

if TYPE_CHECKING:
    from ..services.hub import Hub
    from .figures import Figures


class HubApplication(Starlette):
    """A hub as an ASGI application.

    Requests go straight to the `Edge`, because Starlette's own layers cost as much as the hub's whole work on a hot
    route. Starlette runs the lifespan.

    Attributes:
        hub: Services, once the application has started.
        figures: Metrics, where the settings ask for them.
        table: All routes.
    """

    def __init__(self, settings: Settings, open_services: Callable[[], Hub]) -> None:
        super().__init__(lifespan=self._run)
        self.settings = settings
        self.table = Table(ROUTES)
        self.hub: Hub | None = None
        self.figures: Figures | None = None
        self._open_services = open_services
        self._edge: Edge | None = None
        if settings.metrics.enabled:
            from .figures import Figures

            self.figures = Figures()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._edge is not None:
            await self._edge(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    @asynccontextmanager
    async def _run(self, _app: Starlette) -> AsyncIterator[None]:
        settings = self.settings
        hub = await asyncio.to_thread(self._open_services)
        self.hub = hub
        try:
            await hub.start()
            hosts = LOOPBACK | {settings.server.host, *settings.server.allowed_hosts}
            credentials = Credentials(hub.access, None if settings.auth.enabled else settings.auth.owner)
            self._edge = Edge(hub, self.table, credentials, frozenset(hosts), self.figures)
            yield
        finally:
            self._edge = None
            await hub.close()


def create_app(settings: Settings) -> HubApplication:
    """Make the application of a hub. It opens the database when a server starts it.

    Args:
        settings: Where the data are, and who may call.

    Raises:
        RouteIncomplete: A route of the table lacks its schema or its permission.
    """

    def open_services() -> Hub:
        from ..services.hub import open_hub

        return open_hub(
            settings.database.url,
            settings.storage.place,
            owner=settings.auth.owner,
            with_auth=settings.auth.enabled,
            lost_after_s=settings.server.lost_after_s,
            search_s=settings.database.search_s,
            rules=settings.notify.rules,
            secrets=Path(settings.notify.secrets) if settings.notify.secrets else None,
        )

    return HubApplication(settings, open_services)
