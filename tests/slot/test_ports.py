"""Rendezvous ports: no two processes of skyward on a machine hold the same one."""

from __future__ import annotations

import socket

import pytest

from skyward.errors import RendezvousFailed
from skyward.slot.ports import PortLocks, port_behind


def test_a_port_that_is_held_is_nobody_elses_until_it_is_released() -> None:
    mine, other = PortLocks("127.0.0.1"), PortLocks("127.0.0.1")
    port = mine.reserve()
    with pytest.raises(RendezvousFailed, match=str(port)):
        other.hold(port)
    mine.release(port)
    other.hold(port)
    other.release_all()
    mine.hold(port)
    mine.release_all()


def test_a_port_that_somebody_listens_on_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        free = PortLocks("127.0.0.1")
        drawn = iter([taken, taken, 21_234])
        monkeypatch.setattr("random.randint", lambda first, last: next(drawn))
        assert free.reserve() == 21_234
        free.release_all()


def test_ports_behind_a_port_go_round_in_the_range_below_the_ephemeral_ports() -> None:
    assert [port_behind(29_998, steps) for steps in (0, 1, 2)] == [29_998, 29_999, 20_000]
