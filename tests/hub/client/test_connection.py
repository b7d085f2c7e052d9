"""Connections to a hub that is not there."""

from __future__ import annotations

import socket
from typing import NoReturn

import pytest

from skyward.errors import HubUnreachable
from skyward.hub.client.connection import HubConnection
from skyward.hub.client.settings import Address


def test_a_hub_that_resets_a_connection_while_it_starts_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with HubConnection(Address(url="http://127.0.0.1:1")) as connection:
        for _ in range(2):
            with pytest.raises(HubUnreachable, match="the hub does not answer"):
                connection.json("POST", "/v1/runs", {"name": "first"})
