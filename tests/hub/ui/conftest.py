"""Pages in a browser, on the application of canned answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.hub.ui.canned import Canned, canned_app
from tests.hub.ui.serving import served
from tests.waiting import until


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
