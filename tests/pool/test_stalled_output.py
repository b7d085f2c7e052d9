"""A stalled reader (an unread pipe, a hanging sink) loses lines, and blocks nothing."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout

import pytest

import skyward as sky
from tests.waiting import until

STALLED = """
import os, signal, sys, tempfile, threading, time
import skyward as sky
from tests.waiting import until

began_file = tempfile.mktemp()

@sky.compute
def shout(lines):
    for number in range(lines):
        print(f"line {number} " + "x" * 100)
    return lines

@sky.compute
def sleep(seconds, file=os.devnull):
    open(file, "w").close()
    time.sleep(seconds)

def say(text):
    sys.stderr.write(text + "\\n")

with sky.ComputePool(sky.Local(), nodes=2, cancel_grace_s=1) as pool:
    say(f"value {shout(5000) >> pool}")  # far more than a pipe takes
    began = time.monotonic()
    for _ in range(200):
        shout(1) >> pool
    say(f"fast {time.monotonic() - began < 90}")  # half a second for each would be 100
    try:
        sleep.with_options(timeout_s=0.3)(60) >> pool
    except sky.errors.TaskTimeout:
        say("timeout")

    def interrupt():
        until(lambda: os.path.exists(began_file))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        sleep(600, began_file) >> pool
    except KeyboardInterrupt:
        say("interrupted")
    began = time.monotonic()
say(f"closed {time.monotonic() - began < 90}")
"""


def test_an_unread_pipe_blocks_no_call_no_timeout_and_no_ctrl_c() -> None:
    """The reader comes back after the program has ended, and finds the contents of the pipe."""
    command = [sys.executable, "-c", STALLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.read().splitlines()
            assert said == ["value 5000", "fast True", "timeout", "interrupted", "closed True"]
            assert process.wait(60) == 0
            assert process.stdout is not None
            assert process.stdout.read().startswith("[node 0] line 0 xxx")
        finally:
            process.kill()


def test_a_hanging_log_function_loses_only_its_lines(sky_pools: Callable[..., sky.ComputePool]) -> None:
    gate = threading.Event()
    texts: list[str] = []

    def hang(line: sky.LogLine) -> None:
        gate.wait(120)
        texts.append(line.text)

    pool = sky_pools(nodes=1, logs=hang)
    assert [sky.compute(speak)(number) >> pool for number in range(10)] == list(range(10))
    assert pool.map(speak, range(10, 20)) == list(range(10, 20))
    assert list(sky.compute(count)() >> pool) == [20, 21]
    assert texts == []
    gate.set()
    until(lambda: texts == [str(number) for number in range(22)])


def speak(number: int) -> int:
    print(number)
    return number


def count() -> Iterator[int]:
    yield speak(20)
    yield speak(21)


@pytest.mark.usefixtures("patient_output")
def test_output_goes_where_stdout_points_when_the_call_ends(sky_pools: Callable[..., sky.ComputePool]) -> None:
    pool = sky_pools(nodes=1, logs=True)
    for number in range(50):
        with redirect_stdout(io.StringIO()) as text:
            sky.compute(speak)(number) >> pool
        assert text.getvalue() == f"[node 0] {number}\n"
    with redirect_stdout(io.StringIO()) as text:
        pool.map(speak, range(50))
    assert sorted(text.getvalue().split()) == sorted(" ".join(f"[node 0] {n}" for n in range(50)).split())
    with redirect_stdout(io.StringIO()) as text:
        for value in pool.imap(speak, range(5)):
            assert f"[node 0] {value}\n" in text.getvalue()
