"""Reach of a node before Ray starts there: whether it can connect to Ray on the first one."""

from __future__ import annotations

import socket

from skyward.engine.ray.companion import why_unreachable


def test_a_node_that_cannot_connect_to_the_first_one_names_both_addresses_and_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert why_unreachable(address, "127.0.0.2") == ""
    why = why_unreachable(address, "127.0.0.2")
    assert f"no connection from 127.0.0.2 to {address}, which is Ray on the first node (connection refused)" in why
