"""Channels between tasks and the program: links that break, calls that end, and waits that end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import skyward as sky
from skyward.errors import PoolClosed, UsageError
from skyward.wire.task_channel import MESSAGE_LIMIT, TaskChannel, services
from tests.channels import Relayed, breaking
from tests.few_modules import lean_frameworks
from tests.waiting import until

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=2, concurrency=2, logs=False, cancel_grace_s=0.3)


def test_each_message_arrives_once_and_in_order_over_links_that_break(tmp_path: Path) -> None:
    def talk(count: int) -> list[int]:
        there = sky.channel("talk")
        received = []
        for number in range(count):
            there.send(b"%d " % number + bytes(number * 97 % 90_000), timeout_s=LIMIT_S)
            received.append(int(there.receive(LIMIT_S).split()[0]))
        there.send(b"over")
        return received

    provider = Relayed(folder=str(tmp_path / "relays"))
    with sky.ComputePool(provider, logs=False) as pool, breaking(pool, provider):
        future = sky.compute(talk)(60) > pool
        here = pool.channel("talk", LIMIT_S)
        received = []
        while (message := here.receive(LIMIT_S)) != b"over":
            received.append(int(message.split()[0]))
            here.send(message, timeout_s=LIMIT_S)
            time.sleep(0.01)  # long enough for several cuts
        assert future.result(LIMIT_S) == received == list(range(60))


def test_a_cut_link_holds_messages_back_and_loses_none(tmp_path: Path) -> None:
    def send_all(go: Path) -> int:
        there = sky.channel("held")
        there.send(b"first")
        while not go.exists():
            time.sleep(0.005)
        for number in range(200):
            there.send(bytes([number]) * 20_000, timeout_s=LIMIT_S)
        return 200

    provider = Relayed(folder=str(tmp_path / "relays"))
    with sky.ComputePool(provider, logs=False) as pool:
        future = sky.compute(send_all)(tmp_path / "go") > pool
        here = pool.channel("held", LIMIT_S)
        assert here.receive(LIMIT_S) == b"first"
        provider.cut()
        (tmp_path / "go").touch()
        with pytest.raises(TimeoutError, match="no message came within"):
            here.receive(0.5)
        provider.mend()
        assert [here.receive(LIMIT_S)[0] for _ in range(200)] == list(range(200))
        assert future.result(LIMIT_S) == 200


def test_a_killed_task_ends_its_channel(pool: sky.ComputePool) -> None:
    def die() -> None:
        sky.channel("killed").send(str(os.getpid()).encode())
        time.sleep(LIMIT_S)

    future = sky.compute(die)() > pool
    here = pool.channel("killed", LIMIT_S)
    os.kill(int(here.receive(LIMIT_S)), signal.SIGKILL)
    with pytest.raises(EOFError, match="'killed'.*call ended"):
        here.receive(LIMIT_S)
    with pytest.raises(BrokenPipeError, match="nothing can be sent"):
        here.send(b"late")
    with pytest.raises(sky.errors.SkywardError):
        future.result(LIMIT_S)


def test_the_program_ends_a_channel_for_its_task(pool: sky.ComputePool) -> None:
    def wait() -> str:
        there = sky.channel("ended")
        try:
            there.receive()
        except EOFError as error:
            with sky.channel("ended") as again:
                again.send(b"again")
            return str(error)
        return ""

    future = sky.compute(wait)() > pool
    pool.channel("ended", LIMIT_S).close()
    assert list(pool.channel("ended", LIMIT_S)) == [b"again"]
    assert "the other side closed it" in future.result(LIMIT_S)


def test_ranks_have_channels_of_their_own(tmp_path: Path) -> None:
    @sky.compute
    @sky.integrations.torch(backend="gloo", processes_per_node=2)
    def rank() -> None:
        sky.channel("rank").send(b"here")

    pytest.importorskip("torch")
    with lean_frameworks(), sky.ComputePool(sky.Local(), logs=False) as pool:
        future = rank() > pool
        opened = [pool.channel("rank", LIMIT_S) for _ in range(2)]
        assert [list(channel) for channel in opened] == [[b"here"], [b"here"]]
        assert {channel.rank for channel in opened} == {0, 1}
        future.result(LIMIT_S)


def test_a_service_serves_each_channel_of_its_name(pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(channel: TaskChannel) -> None:
        for message in channel:
            channel.send(b"served " + message)

    def ask(number: int) -> bytes:
        with sky.channel("skyward.tests") as there:
            there.send(b"%d" % number)
            return there.receive(LIMIT_S)

    monkeypatch.setitem(services, "skyward.tests", serve)
    assert pool.map(ask, range(8)) == [b"served %d" % number for number in range(8)]


def test_a_service_that_fails_ends_its_channel(pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(channel: TaskChannel) -> None:
        raise ValueError(channel.name)

    def ask() -> str:
        try:
            sky.channel("skyward.tests").receive(LIMIT_S)
        except EOFError:
            return "ended"
        return "answered"

    monkeypatch.setitem(services, "skyward.tests", fail)
    assert sky.compute(ask)() >> pool == "ended"


def test_no_wait_is_without_an_end(pool: sky.ComputePool) -> None:
    with pytest.raises(TimeoutError, match=r"channel='nobody': no task opened it within 0\.05 s"):
        pool.channel("nobody", timeout_s=0.05)
    with sky.ComputePool(sky.Local(), logs=False) as closing, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(closing.channel, "nobody")
        until(waiting.running)
        closing.close()
        with pytest.raises(PoolClosed):
            waiting.result(LIMIT_S)


def test_the_end_of_the_pool_ends_its_channels(tmp_path: Path) -> None:
    def wait(sent: Path) -> None:
        sky.channel("open").send(b"here")
        sent.touch()
        time.sleep(LIMIT_S)

    pool = sky.ComputePool(sky.Local(), logs=False, cancel_grace_s=0.3)
    pool.start()
    _ = sky.compute(wait)(tmp_path / "sent") > pool
    here = pool.channel("open", LIMIT_S)
    until((tmp_path / "sent").exists)
    pool.close(cancel=True)
    assert list(here) == [b"here"]


def test_a_wrong_use_is_refused(pool: sky.ComputePool) -> None:
    with pytest.raises(UsageError, match="begins in a task"):
        sky.channel("here")
    with pytest.raises(UsageError, match="name='': is not the name of a channel"):
        pool.channel("")

    def send_too_much() -> str:
        try:
            sky.channel("large").send(bytes(MESSAGE_LIMIT + 1))
        except UsageError as error:
            return str(error)
        return ""

    assert "exceeds the limit" in sky.compute(send_too_much)() >> pool
