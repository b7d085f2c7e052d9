"""Output of calls arrives here in time, tagged with its node and task, and blocks nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyward as sky
from tests.waiting import until


class Listener:
    """A sink of log lines."""

    def __init__(self) -> None:
        self.lines: list[sky.LogLine] = []

    def __call__(self, line: sky.LogLine) -> None:
        self.lines.append(line)

    def texts(self, task: str | None = None, stream: str | None = None) -> list[str]:
        return [
            x.text for x in self.lines if (task is None or x.task == task) and (stream is None or x.stream == stream)
        ]


@pytest.fixture(scope="module")
def heard() -> Listener:
    return Listener()


@pytest.fixture(scope="module")
def pool(heard: Listener) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(sky.Local(), nodes=2, concurrency=2, logs=heard) as pool:
        yield pool


@pytest.fixture(autouse=True)
def quiet_before(heard: Listener, patient_output: None) -> None:
    heard.lines.clear()


def test_a_line_has_its_node_its_task_and_its_stream(pool: sky.ComputePool, heard: Listener) -> None:
    @sky.compute(name="speaker")
    def speak() -> None:
        print("to stdout")
        print("to stderr", file=sys.stderr)

    speak() @ pool
    told = {(x.text, x.stream, x.node, x.task, x.rank) for x in heard.lines}
    assert told == {
        (f"to {stream}", stream, node, "speaker", None) for stream in ("stdout", "stderr") for node in (0, 1)
    }


def test_output_arrives_before_the_value(pool: sky.ComputePool, heard: Listener) -> None:
    @sky.compute
    def speak(i: int) -> int:
        print("said", i)
        return i

    for i in range(100):
        assert speak(i) >> pool == i
        assert heard.texts()[-1:] == [f"said {i}"]


def test_concurrent_lines_belong_to_their_tasks(pool: sky.ComputePool, heard: Listener) -> None:
    def chatter(me: int) -> None:
        for i in range(20):
            print(f"{me}:{i}")

    futures = [sky.compute(name=f"task{me}")(chatter)(me) > pool for me in range(40)]
    for future in futures:
        future.result(timeout=60)
    for me in range(40):
        assert heard.texts(f"task{me}") == [f"{me}:{i}" for i in range(20)]


def test_output_of_c_code_and_subprocesses_is_captured(pool: sky.ComputePool, heard: Listener) -> None:
    @sky.compute(name="below python")
    def write() -> None:
        os.write(1, b"written to the descriptor\n")
        subprocess.run("echo from a child; echo its error >&2", shell=True, check=True)

    write() >> pool
    assert heard.texts("below python", "stdout") == ["written to the descriptor", "from a child"]
    assert heard.texts("below python", "stderr") == ["its error"]


def test_a_last_line_without_a_newline_is_shown(pool: sky.ComputePool, heard: Listener) -> None:
    @sky.compute
    def mutter() -> None:
        print("no newline", end="")

    mutter() >> pool
    assert heard.texts() == ["no newline"]


def test_the_last_state_of_a_progress_bar_is_shown_once(pool: sky.ComputePool, heard: Listener, tmp_path: Path) -> None:
    @sky.compute
    def count() -> None:
        write = sys.stderr.write
        for done, rate in ((0, "?"), (60, "19.44"), (60, "19.28")):
            write(f"\r{done}/60 [00:03<00:00, {rate}it/s]")
            sys.stderr.flush()
            if rate != "19.28":
                until((tmp_path / rate).exists)
        write("\n")
        write("after\n")

    shown = ["0/60 [00:03<00:00, ?it/s]", "60/60 [00:03<00:00, 19.44it/s]", "after"]
    future = count() > pool
    for number, rate in enumerate(("?", "19.44"), 1):
        until(lambda number=number: heard.texts() == shown[:number])  # type: ignore[misc]
        time.sleep(1.1)  # a line a second is shown
        (tmp_path / rate).touch()
    future.result(timeout=60)
    assert heard.texts() == shown


def test_output_comes_while_the_call_runs(pool: sky.ComputePool, heard: Listener, tmp_path: os.PathLike[str]) -> None:
    go = os.path.join(tmp_path, "go")

    @sky.compute
    def speak_then_wait() -> None:
        print("early")
        until(lambda: os.path.exists(go))

    future = speak_then_wait() > pool
    until(lambda: heard.texts() == ["early"])
    assert not future.done()
    open(go, "w").close()
    future.result(timeout=60)


def test_text_in_any_language_and_bytes_that_are_no_text_arrive(pool: sky.ComputePool, heard: Listener) -> None:
    @sky.compute
    def speak() -> None:
        print("grüße, 世界 🌍", flush=True)
        os.write(1, b"\xff\xfe broken\n")

    speak() >> pool
    assert heard.texts() == ["grüße, 世界 🌍", "�� broken"]


def test_only_the_head_prints(pool: sky.ComputePool, heard: Listener) -> None:
    @sky.compute
    @sky.stdout(only="head")
    def speak() -> None:
        info = sky.instance_info()
        assert info is not None
        print("python", info.node)
        os.write(1, f"descriptor {info.node}\n".encode())
        sys.stdout.flush()
        subprocess.run(["echo", "child", str(info.node)], check=True)
        print("error", info.node, file=sys.stderr)

    speak() @ pool
    assert sorted(heard.texts(stream="stdout")) == ["child 0", "descriptor 0", "python 0"]
    assert sorted(heard.texts(stream="stderr")) == ["error 0", "error 1"]


def test_a_silent_call_prints_nothing_and_the_next_one_prints(pool: sky.ComputePool, heard: Listener) -> None:
    @sky.compute
    @sky.silent
    def hush() -> None:
        print("out")
        print("err", file=sys.stderr)
        os.write(2, b"c code\n")
        subprocess.run(["echo", "child"], check=True)

    @sky.compute
    def speak() -> None:
        print("loud")

    hush() @ pool
    assert heard.texts() == []
    speak() @ pool
    assert heard.texts() == ["loud", "loud"]


def test_a_flood_drops_the_oldest_with_a_count_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader stands still while more is printed than is kept."""
    monkeypatch.undo()  # this reader stalls, and its caller waits for a moment only
    gate = threading.Event()
    texts: list[str] = []

    def slow(line: sky.LogLine) -> None:
        if not texts:
            gate.wait(220)
        texts.append(line.text)

    @sky.compute
    def flood() -> None:
        line = "x" * 1000
        for i in range(60_000):
            print(i, line)

    with sky.ComputePool(sky.Local(), logs=slow) as pool:
        future = flood() > pool
        try:
            future.result(timeout=180)
        finally:
            gate.set()
    assert any("lines of output were dropped here" in text for text in texts)
    assert any(text.startswith("59999 x") for text in texts)
    assert len(texts) < 60_001


def test_logs_true_prints_here_with_the_node(capfd: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("hello")
        print("oops", file=sys.stderr)

    with sky.ComputePool(sky.Local()) as pool:
        sky.compute(speak)() >> pool
    out, err = capfd.readouterr()
    assert "[node 0] hello\n" in out
    assert "[node 0] oops\n" in err


def test_logs_false_prints_nothing(
    capfd: pytest.CaptureFixture[str], sky_pools: Callable[..., sky.ComputePool]
) -> None:
    pool = sky_pools(nodes=1, concurrency=1, logs=False)
    sky.compute(print)("hello") >> pool
    assert capfd.readouterr() == ("", "")
