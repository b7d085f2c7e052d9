"""Rendezvous ports: no two processes of skyward on a machine hold the same one."""

from __future__ import annotations

import gc
import os
import resource
import socket
from pathlib import Path

import pytest

from skyward.errors import RendezvousFailed
from skyward.node.slot.ports import PortLocks, port_behind


def test_a_held_port_is_given_to_nobody_else_until_it_is_released() -> None:
    mine, other = PortLocks("127.0.0.1"), PortLocks("127.0.0.1")
    port = mine.reserve()
    with pytest.raises(RendezvousFailed, match=str(port)):
        other.hold(port)
    mine.release(port)
    other.hold(port)
    other.release_all()
    mine.hold(port)
    mine.release_all()


def test_a_port_with_a_listener_is_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        free = PortLocks("127.0.0.1")
        drawn = iter([taken, taken, 21_234])
        monkeypatch.setattr("random.choice", lambda ports: next(drawn))
        assert free.reserve() == 21_234
        free.release_all()


def test_following_ports_wrap_around_below_the_ephemeral_range() -> None:
    assert [port_behind(29_998, steps) for steps in (0, 1, 2)] == [29_998, 29_999, 20_000]


@pytest.mark.parametrize("trouble", ["a file", "a broken link", "no descriptors"])
def test_any_failure_to_make_a_lock_is_reported_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trouble: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # pytest's folders are longer than a runtime folder may be.
    monkeypatch.setattr("skyward.core.ownership._LONGEST_BASE", 1000)
    place = tmp_path / f"skyward-ports-{os.getuid()}"
    if trouble == "a file":
        place.touch()
    elif trouble == "a broken link":
        place.symlink_to(tmp_path / "nowhere")
    gc.collect()  # leftovers of other tests do not count
    before = os.listdir("/proc/self/fd")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if trouble == "no descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    ports = PortLocks("127.0.0.1")
    try:
        with pytest.raises(RendezvousFailed, match="cannot be locked"):
            ports.reserve()
        with pytest.raises(RendezvousFailed, match="cannot be locked"):
            ports.hold(20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) <= len(before)  # fewer, if leftovers of other tests were collected
    assert not (tmp_path / "nowhere").exists()


def test_a_single_lock_that_cannot_be_made_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # pytest's folders are longer than a runtime folder may be.
    monkeypatch.setattr("skyward.core.ownership._LONGEST_BASE", 1000)
    (tmp_path / f"skyward-ports-{os.getuid()}" / "20001").mkdir(parents=True)
    drawn = iter([20_001, 20_002])
    monkeypatch.setattr("random.choice", lambda ports: next(drawn))
    ports = PortLocks("127.0.0.1")
    assert ports.reserve() == 20_002
    ports.release_all()
