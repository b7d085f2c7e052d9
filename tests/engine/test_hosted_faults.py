"""Pools whose scheduler runs in a head: what breaks, and what belongs to which process."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.engine.head.plain import dump_plain, load_plain
from skyward.errors import InternalError
from skyward.node.agent import attach
from skyward.testing.engine_suite import appear, wait_for
from skyward.values.machine import LogLine
from tests.engines import hosted_pool
from tests.waiting import until

_LIMIT_S = 60.0


def children_of(of: int) -> dict[int, str]:
    """Return the command lines of a process's children."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            line = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if parent == of and line:
            found[int(entry)] = line
    return found


def heads_of(process: int) -> list[int]:
    return [pid for pid, line in children_of(process).items() if "skyward.engine.head.main" in line]


def _links_to_head(process: int) -> list[int]:
    return [pid for pid, line in children_of(process).items() if "head.sock" in line]


def _links_to_nodes(process: int) -> list[int]:
    return [pid for pid, line in children_of(process).items() if "agent.sock" in line]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while alive := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


class Odd(Exception):
    """Error of these tests, which only processes with this module can unpickle."""


@pytest.fixture
def pool() -> Iterator[sky.ComputePool]:
    with hosted_pool(nodes=2, concurrency=2, logs=False) as pool:
        yield pool


@pytest.fixture
def fragile_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[sky.ComputePool]:
    """Open a pool whose links break when their processes die. Others hand their pipes to the far process."""
    command = attach.command
    monkeypatch.setattr(attach, "command", lambda *of: ("sh", "-c", 'cat | "$@" | cat', "sh", *command(*of)))
    with hosted_pool(nodes=2, concurrency=2, logs=False) as pool:
        yield pool


def _break_links(find: Callable[[int], list[int]], count: int) -> None:
    """Kill the processes of the links to a head or to nodes, and wait until there are as many new ones."""
    links = find(os.getpid())  # perhaps with some that have not ended since the test before
    for shell in links:
        for pid in (*children_of(shell), shell):
            with contextlib.suppress(ProcessLookupError):  # it has ended with another one
                os.kill(pid, signal.SIGKILL)
    until(lambda: len(set(find(os.getpid())) - set(links)) == count, _LIMIT_S)


def test_calls_go_on_when_the_link_to_the_head_breaks(fragile_pool: sky.ComputePool, tmp_path: Path) -> None:
    def wait() -> bytes:
        appear(tmp_path / "began")
        wait_for(tmp_path / "go")
        return b"x" * 3_000_000

    future = sky.compute(wait)() > fragile_pool
    wait_for(tmp_path / "began")
    _break_links(_links_to_head, 1)
    appear(tmp_path / "go")
    assert len(future.result(_LIMIT_S)) == 3_000_000
    assert sky.compute(abs)(-1) @ fragile_pool == [1, 1]


def test_calls_go_on_when_a_lent_channel_breaks(fragile_pool: sky.ComputePool, tmp_path: Path) -> None:
    def wait(me: int) -> int:
        appear(tmp_path / f"began-{me}")
        wait_for(tmp_path / "go")
        return me

    futures = [sky.compute(wait)(node) > fragile_pool.node(node) for node in range(2)]
    for node in range(2):
        wait_for(tmp_path / f"began-{node}")
    _break_links(_links_to_nodes, 2)
    appear(tmp_path / "go")
    assert [future.result(_LIMIT_S) for future in futures] == [0, 1]


def test_nodes_outlive_their_lease_while_their_links_are_too_busy_for_pings() -> None:
    with hosted_pool(lease_s=4.5, nodes=2, logs=False) as pool:
        agents = pool.agent_pids()
        until = time.monotonic() + 6.0
        while time.monotonic() < until:
            assert sky.compute(abs)(-1) @ pool == [1, 1]
        assert pool.agent_pids() == agents


def test_everything_ends_with_a_client_that_is_killed(tmp_path: Path) -> None:
    script = f"""
        import sys, time
        sys.path.insert(0, {os.getcwd()!r})
        import skyward as sky
        from tests.engines import hosted_pool
        with hosted_pool(nodes=2, logs=False) as pool:
            print(*(sky.compute(__import__("os").getppid)() @ pool), *pool.agent_pids().values(), flush=True)
            time.sleep(600)
    """
    client = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert client.stdout is not None
    pids = [int(pid) for pid in client.stdout.readline().split()]
    pids += [*heads_of(client.pid), *_links_to_head(client.pid), *_links_to_nodes(client.pid)]
    assert len(pids) >= 8
    client.kill()
    client.wait()
    client.stdout.close()
    _wait_until_gone(pids)


def test_a_fork_of_the_client_holds_nothing_open(tmp_path: Path) -> None:
    script = f"""
        import os, sys, time
        sys.path.insert(0, {os.getcwd()!r})
        import skyward as sky
        from tests.engines import hosted_pool
        with hosted_pool(nodes=2, logs=False) as pool:
            sky.compute(abs)(-1) @ pool
            fork = os.fork()
            if not fork:
                time.sleep(600)
            print(fork, *pool.agent_pids().values(), flush=True)
            time.sleep(600)
    """
    client = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert client.stdout is not None
    fork, *pids = (int(pid) for pid in client.stdout.readline().split())
    try:
        pids += [*heads_of(client.pid), *_links_to_head(client.pid), *_links_to_nodes(client.pid)]
        client.kill()
        client.wait()
        _wait_until_gone(pids)
        assert _is_alive(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
        client.stdout.close()


def test_the_handle_of_an_actor_follows_it_to_another_node(pool: sky.ComputePool) -> None:
    @sky.actor
    class Wanderer:
        def where(self) -> int:
            info = sky.instance_info()
            assert info is not None
            return info.node

    made: Any = Wanderer
    actor = made.with_options(max_restarts=1)() >> pool
    before = actor.where() >> pool
    assert f"on node {before}" in repr(actor)
    os.kill(pool.agent_pids()[before], signal.SIGKILL)
    until(lambda: f"on node {1 - before}" in repr(actor))
    assert actor.where() >> pool == 1 - before


def test_retries_go_by_the_names_of_classes(pool: sky.ComputePool, tmp_path: Path) -> None:
    class Local(Odd):
        pass

    def fail_twice(path: Path, kind: type[Exception]) -> int:
        with path.open("a") as file:
            file.write(".")
        if (count := len(path.read_text())) < 3:
            raise kind("again")
        return count

    call = sky.compute(fail_twice)
    assert call.with_options(retries=2, retry_on=Odd)(tmp_path / "base", Local) >> pool == 3
    assert (
        call.with_options(retries=2, retry_on=(KeyError, OSError))(tmp_path / "builtin", FileNotFoundError) >> pool == 3
    )
    with pytest.raises(ValueError, match="again"):
        call.with_options(retries=2, retry_on=Odd)(tmp_path / "other", ValueError) >> pool
    assert (tmp_path / "other").read_text() == "."


@pytest.mark.usefixtures("patient_output")
def test_output_arrives_whole_and_masked_before_the_value() -> None:
    lines: list[LogLine] = []
    image = sky.Image(env={"TOKEN": sky.Secret("TOKEN", value="very-secret-value")})

    def talk() -> None:
        print("first")
        print("the token is", os.environ["TOKEN"])

    with hosted_pool(image=image, logs=lines.append) as pool:
        sky.compute(talk)() >> pool
        assert [line.text for line in lines] == ["first", "the token is ***"]
        assert {(line.node, line.task, line.stream) for line in lines} == {(0, "talk", "stdout")}


def test_a_head_unpickles_nothing_of_the_users() -> None:
    assert load_plain(dump_plain(LogLine(text="x", stream="stdout", node=0, rank=None, task="f"))).text == "x"
    with pytest.raises(InternalError, match="refuses"):
        load_plain(pickle.dumps(Odd("no")))
