"""Objects of users that raise anything anywhere, even SystemExit: only their own call fails."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import RemoteError, ResultNotPicklable


def leave() -> object:
    sys.exit("unpickled")


class LeavesWhenPickled(Exception):
    def __reduce__(self) -> Any:
        sys.exit("pickled")


class LeavesWhenUnpickled(Exception):
    """Exit the process that unpickles it, except its own slot, which tries whether it can be loaded."""

    def __reduce__(self) -> Any:
        return _leave_unless, (os.getpid(),)


def _leave_unless(pid: int) -> Exception:
    if pid != os.getpid():
        leave()
    return LeavesWhenUnpickled()


class LeavesWhenShown(Exception):
    def __str__(self) -> str:
        return str(leave())


class LeavesWhenPickledAndShown(LeavesWhenShown):
    def __reduce__(self) -> Any:
        raise LeavesWhenShown


class Value:
    """Value that ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return leave, ()


@sky.compute
def fail(kind: type[Exception]) -> None:
    raise kind("told")


@sky.compute
def number(x: int) -> int:
    return x


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=1, concurrency=2, logs=False)


def works(pool: sky.ComputePool) -> bool:
    return [number(i) >> pool for i in range(3)] == [f.result(60) for f in [number(i) > pool for i in range(3)]]


@pytest.mark.parametrize("kind", [LeavesWhenPickled, LeavesWhenUnpickled, LeavesWhenPickledAndShown])
def test_an_exception_that_cannot_travel_is_a_remote_error(pool: sky.ComputePool, kind: type[Exception]) -> None:
    with pytest.raises(RemoteError, match=kind.__name__):
        fail(kind) >> pool
    with pytest.raises(RemoteError, match=kind.__name__):
        (fail(kind) > pool).result(60)
    assert works(pool)


def test_an_exception_that_cannot_be_shown_travels(pool: sky.ComputePool) -> None:
    error = (fail(LeavesWhenShown) > pool).exception(60)
    assert type(error) is LeavesWhenShown
    assert works(pool)


def test_retry_on_sees_an_exception_whose_unpickling_ends_the_thread(pool: sky.ComputePool) -> None:
    future = fail(LeavesWhenUnpickled).with_options(retries=1, retry_on=ValueError) > pool
    assert isinstance(future.exception(60), RemoteError)
    assert works(pool)


def test_a_value_whose_unpickling_ends_the_process_is_an_error_of_its_call(pool: sky.ComputePool) -> None:
    make = sky.compute(Value)
    with pytest.raises(ResultNotPicklable, match="unpickled"):
        make() >> pool
    future = make() > pool
    assert isinstance(future.exception(60), ResultNotPicklable)
    assert works(pool)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
def test_a_done_callback_that_raises_affects_no_other(
    pool: sky.ComputePool, kind: type[BaseException], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def wait() -> None:
        while not (tmp_path / "go").exists():
            threading.Event().wait(0.01)

    called: list[str] = []
    futures: list[concurrent.futures.Future[Any]] = [sky.compute(wait)() > pool for _ in range(2)]

    def raise_it(_: object) -> None:
        called.append("raised")
        raise kind("in a callback")

    for future in futures:
        future.add_done_callback(raise_it)
        future.add_done_callback(lambda _: called.append("next"))
    with caplog.at_level(logging.ERROR, "concurrent.futures"):
        (tmp_path / "go").touch()
        assert [future.result(60) for future in futures] == [None, None]
        assert works(pool)
    assert sorted(called) == ["next", "next", "raised", "raised"]
    assert "in a callback" in caplog.text


def test_a_log_function_that_ends_its_thread_gets_no_more_lines(caplog: pytest.LogCaptureFixture) -> None:
    @sky.compute
    def say() -> None:
        print("a line")

    def sink(line: sky.LogLine) -> None:
        sys.exit("no more")

    with sky.ComputePool(provider=sky.Local(), nodes=1, logs=sink, console=False) as pool:
        for _ in range(3):
            say() >> pool
        assert works(pool)
    assert caplog.text.count("the function given as logs= raised") == 1


def test_a_client_that_blocks_sigint_can_interrupt_its_calls(tmp_path: Path) -> None:
    script = f"""
import signal, threading, time
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
import skyward as sky
notes = Path({str(tmp_path)!r}) / "notes"

@sky.compute
def wait():
    try:
        notes.write_text("began")
        time.sleep(60)
    except KeyboardInterrupt:
        notes.write_text("interrupted")
        raise

with sky.ComputePool(provider=sky.Local(), nodes=1, logs=False, console=False, cancel_grace_s=10) as pool:
    future = wait() > pool
    while not notes.exists():
        time.sleep(0.01)
    future.cancel()
assert notes.read_text() == "interrupted", notes.read_text()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
