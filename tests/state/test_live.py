"""Open pools are found by other processes, which may read their output and ask them to end."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import skyward as sky
from skyward import events
from skyward.errors import PoolClosed, UsageError
from skyward.state import live
from skyward.state.outputs import OutputFile, outputs, read_output
from skyward.values.machine import LogLine
from tests.waiting import until


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "skyward"


@sky.compute
def say(text: str) -> None:
    print(text)


@sky.compute
def hang() -> None:
    import time

    time.sleep(600)


def test_an_open_pool_is_recorded_for_this_user_alone(state: Path) -> None:
    with sky.ComputePool(sky.Local(), nodes=2, name="train") as pool:
        (found,) = live.live_pools()
        assert found == live.find("train") == live.find(found.pool)
        assert found.is_alive
        assert not found.is_rented
        assert (found.label, found.provider, found.wanted) == ("train", "local", 2)
        assert [node.node for node in found.nodes] == [0, 1]
        assert all(os.path.exists(node.socket_path) for node in found.nodes)
        (file,) = (state / "live").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        before = {node.node: node.pid for node in found.nodes}
        os.kill(pool.agent_pids()[1], signal.SIGKILL)
        until(lambda: {node.node: node.pid for node in live.find("train").nodes} != before)
        assert live.find("train").nodes[0].since == found.nodes[0].since
    assert live.live_pools() == []
    with pytest.raises(UsageError, match="pool 'train': no open pool of that name on this machine; open one"):
        live.find("train")


def test_a_pool_that_failed_to_start_is_not_recorded(state: Path) -> None:
    with pytest.raises(sky.errors.NoCapacity):
        sky.ComputePool(sky.Local(), vcpus=100_000).start()
    assert live.live_pools() == []


def test_a_pool_works_if_nothing_can_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with sky.ComputePool(sky.Local()) as pool:
        say("x") >> pool
        assert live.live_pools() == []


def test_the_pool_of_a_killed_program_is_known_to_be_dead(state: Path) -> None:
    body = "    print('open', flush=True)\n    time.sleep(60)\n"
    code = f"import skyward as sky, time\nwith sky.ComputePool(sky.Local()):\n{body}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "open\n"
        (found,) = live.live_pools()
        assert found.is_alive
        program.kill()
        program.wait()
    assert not live.live_pools()[0].is_alive


def test_another_process_can_end_a_pool_and_its_calls_say_so() -> None:
    pool = sky.ComputePool(sky.Local(), name="train", logs=False)
    seen = pool.events()
    with pool:
        waiting = threading.Thread(target=lambda: until(lambda: live.find("train").nodes))
        waiting.start()
        waiting.join()
        future = hang() > pool
        live.ask_to_end(live.find("train").pool, "it was ended by `skyward down`")
        with pytest.raises(PoolClosed, match="ended by `skyward down`"):
            future.result(60)
        until(lambda: not pool.is_active)
        with pytest.raises(PoolClosed, match="ended by `skyward down`"):
            say("too late") >> pool
    *_, closed = seen
    assert isinstance(closed, events.PoolClosed)
    assert closed.reason == "it was ended by `skyward down`"
    assert live.live_pools() == []


def test_output_of_calls_is_kept_and_can_be_read_by_others(state: Path) -> None:
    with sky.ComputePool(sky.Local(), name="train") as pool:
        say("one\ntwo") >> pool
        name = live.find("train").pool
    kept = list(read_output(name))
    assert [line.text for line in kept] == ["[node 0] one", "[node 0] two"]
    assert not kept[0].is_error
    assert outputs() == [name]
    assert stat.S_IMODE((state / "logs" / f"{name}.log").stat().st_mode) == 0o600
    assert [line.text for line in read_output(name, tail=1)] == ["[node 0] two"]
    with pytest.raises(UsageError, match="pool 'other': no output is kept here; use one of train-"):
        list(read_output("other"))


def test_nothing_is_kept_if_output_is_dropped(state: Path) -> None:
    with sky.ComputePool(sky.Local(), logs=False) as pool:
        say("x") >> pool
    assert outputs() == []


def line(text: str) -> LogLine:
    return LogLine(text=text, stream="stderr", node=1, rank=3, task="f")


def test_kept_output_is_bounded_and_the_oldest_goes_first(state: Path) -> None:
    keep = OutputFile("big", limit_bytes=1000)
    for number in range(100):
        keep(line(f"line {number}"))
    keep.close()
    kept = [one.text for one in read_output("big")]
    assert kept[-1] == "[node 1 rank 3] line 99"
    assert 10 < len(kept) < 60
    assert sum(file.stat().st_size for file in (state / "logs").iterdir()) <= 2000
    for number in range(25):
        one = OutputFile(f"pool-{number}")
        one(line("x"))
        one.close()
        os.utime(state / "logs" / f"pool-{number}.log", (number, number))
    assert len(outputs()) == 20


def test_a_follower_sees_new_lines_also_in_the_next_file(state: Path) -> None:
    keep = OutputFile("big", limit_bytes=300)
    expected = [f"[node 1 rank 3] line {number}" for number in range(20)]
    keep(line("line 0"))
    left = iter(range(1, 20))

    def write_one_more() -> bool:
        number = next(left, None)
        if number is not None:
            keep(line(f"line {number}"))
        return number is not None

    assert [one.text for one in read_output("big", follow_while=write_one_more)] == expected


def test_a_follower_may_come_before_the_first_line(state: Path) -> None:
    keep = OutputFile("late")
    answers = iter([True, False])

    def look() -> bool:
        keep(line("now"))
        return next(answers)

    assert next(one.text for one in read_output("late", follow_while=look)) == "[node 1 rank 3] now"


def test_a_full_disk_loses_only_the_kept_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    keep = OutputFile("full")
    monkeypatch.setattr("skyward.state.outputs.os.write", full)
    keep(line("x"))
    keep(line("y"))
