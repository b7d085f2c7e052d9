"""`executor="thread"`: the slots of a node are threads of one process.

Here are its properties beyond the engine suite.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("patient_output")


@pytest.fixture(scope="module")
def heard() -> list[sky.LogLine]:
    return []


@pytest.fixture(scope="module")
def pool(heard: list[sky.LogLine]) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(sky.Local(), nodes=2, concurrency=3, executor="thread", logs=heard.append) as pool:
        yield pool


def test_the_slots_of_a_node_share_a_process(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def meet(me: int) -> tuple[int, str]:
        (tmp_path / str(me)).touch()
        until(lambda: len(os.listdir(tmp_path)) == 6)
        return os.getpid(), threading.current_thread().name

    met = sky.gather(*map(meet, range(6))) >> pool
    assert len({pid for pid, _ in met}) == 2
    assert len(set(met)) == 6


def test_each_thread_knows_its_place(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def place(me: int) -> tuple[int, int]:
        (tmp_path / str(me)).touch()
        until(lambda: len(os.listdir(tmp_path)) == 6)
        info = sky.instance_info()
        assert info is not None
        return info.node, info.worker

    assert set(sky.gather(*map(place, range(6))) >> pool) == {(n, w) for n in range(2) for w in range(3)}


def test_prints_belong_to_their_task(pool: sky.ComputePool, heard: list[sky.LogLine], tmp_path: Path) -> None:
    def chatter(me: int) -> None:
        (tmp_path / str(me)).touch()
        until(lambda: len(os.listdir(tmp_path)) == 6)
        for i in range(30):
            print(f"{me}:{i}")
            print(f"{me}!{i}", file=sys.stderr)

    heard.clear()
    for future in [sky.compute(name=f"task{me}")(chatter)(me) > pool for me in range(6)]:
        future.result(timeout=60)
    for me in range(6):
        assert [x.text for x in heard if x.task == f"task{me}" and x.stream == "stdout"] == [
            f"{me}:{i}" for i in range(30)
        ]
        assert [x.text for x in heard if x.task == f"task{me}" and x.stream == "stderr"] == [
            f"{me}!{i}" for i in range(30)
        ]


def test_muting_one_task_does_not_mute_its_neighbour(
    pool: sky.ComputePool, heard: list[sky.LogLine], tmp_path: Path
) -> None:
    def speak(me: int) -> None:
        (tmp_path / str(me)).touch()
        until(lambda: len(os.listdir(tmp_path)) == 6)
        print("from", me)

    heard.clear()
    loud, quiet = sky.compute(speak), sky.compute(sky.silent(speak))
    calls = [quiet(i) if i % 2 else loud(i) for i in range(6)]
    sky.gather(*calls) >> pool
    assert sorted(x.text for x in heard) == ["from 0", "from 2", "from 4"]


def test_output_of_c_code_belongs_to_the_node(pool: sky.ComputePool, heard: list[sky.LogLine]) -> None:
    def write() -> None:
        os.write(1, b"from below\n")

    heard.clear()
    sky.compute(write)() >> pool
    until(lambda: heard)
    assert [(x.text, x.task) for x in heard] == [("from below", "")]


def test_a_cancelled_python_loop_is_interrupted(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def spin() -> None:
        try:
            (tmp_path / "began").touch()
            while True:
                pass
        finally:
            (tmp_path / "ended").touch()

    future = spin() > pool
    until((tmp_path / "began").exists)
    assert future.cancel()
    until((tmp_path / "ended").exists)
    assert sky.compute(abs)(-1) @ pool == [1, 1]


def test_the_initializer_runs_once_in_the_process(tmp_path: Path) -> None:
    def note() -> None:
        with (tmp_path / "notes").open("a") as file:
            file.write("made\n")

    with sky.ComputePool(sky.Local(), concurrency=4, executor="thread", initializer=note, logs=False) as pool:
        assert pool.map(abs, range(-40, 0)) == list(range(40, 0, -1))
    assert (tmp_path / "notes").read_text() == "made\n"


def test_large_arguments_leave_no_descriptors_behind(pool: sky.ComputePool) -> None:
    def descriptors(block: bytes) -> int:
        return len(os.listdir("/proc/self/fd"))

    counts = [max(sky.compute(descriptors)(bytes([i]) * 400_000) @ pool) for i in range(12)]
    assert counts[-1] <= counts[2] + 2
