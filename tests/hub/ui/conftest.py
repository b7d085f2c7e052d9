"""Pages in a browser: on the application of canned answers, or on a real hub.

A test asks for `page` last, so that the browser leaves before the server stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from skyward.testing.hub import HubServer
from tests.hub.ui.canned import Canned, canned_app
from tests.hub.ui.serving import served
from tests.hub.ui.worked import Workers, fill
from tests.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Page


@dataclass(slots=True)
class Site:
    """The canned application, as it runs."""

    address: str
    canned: Canned
    loop: asyncio.AbstractEventLoop

    def send(self, event: dict[str, Any]) -> None:
        """Send an event to the page, once it listens."""
        until(lambda: self.canned.streams)
        self.loop.call_soon_threadsafe(self.canned.send, event)


@pytest.fixture
def site() -> Iterator[Site]:
    canned = Canned()
    with served(canned_app(canned)) as (address, loop):
        yield Site(address, canned, loop)
        loop.call_soon_threadsafe(canned.send, None)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def owner(hub: HubServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hub.url, headers=hub.headers) as client:
        yield client


@pytest.fixture
def open_hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub", with_auth=False) as server:
        yield server


@pytest.fixture
def signed_in(hub: HubServer, owner: httpx.Client, page: Page) -> Page:
    user = owner.get("/v1/me").json()["user"]
    page.goto(owner.post(f"/v1/users/{user}/link").json()["link"])
    page.wait_for_url("**/experiments")
    return page


@dataclass(slots=True)
class Worked:
    """A hub with jobs in most states, whose runners are requests of the test."""

    address: str
    workers: Workers
    ids: dict[str, str]


@pytest.fixture(scope="session")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worked]:
    """One for all tests. Each of them changes only jobs that it has made, or that no other one looks at."""
    with (
        HubServer(tmp_path_factory.mktemp("worked") / "hub", with_auth=False) as server,
        Workers(server.url) as workers,
    ):
        yield Worked(server.url, workers, fill(workers))
