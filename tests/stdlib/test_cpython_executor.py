"""CPython's own tests of executors and futures, run against `pool.executor()` and its futures.

The file is CPython's and unchanged. It is found where Debian's libpython3.11-testsuite puts it, or in the standard
library, and imported under its own name with its folder on `sys.path`. So its functions travel to the slots by name,
like those of any module of a user.
"""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import importlib
import inspect
import logging
import os
import subprocess
import sys
import sysconfig
import textwrap
import time
import unittest
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import skyward as sky
from skyward.calls.futures import Future
from tests.waiting import until

NAME = "test_concurrent_futures"
VERSION = sysconfig.get_python_version()
FOLDERS = [Path(path) for path in importlib.import_module("test").__path__] + [Path(f"/usr/lib/python{VERSION}/test")]
FOLDER = next((folder for folder in FOLDERS if (folder / f"{NAME}.py").exists()), None)

if sys.version_info >= (3, 12):
    pytest.skip(
        f"from Python 3.12 on {NAME} is a package with other tests; the table below is for 3.11's file",
        allow_module_level=True,
    )
if FOLDER is None:
    missing = f"CPython's {NAME}.py for Python {VERSION} is not here; on Debian it is in libpython{VERSION}-testsuite"
    if os.environ.get("CI"):
        raise RuntimeError(missing)
    pytest.skip(missing, allow_module_level=True)

sys.path.append(str(FOLDER))
try:
    cpython: Any = importlib.import_module(NAME)
finally:
    sys.path.remove(str(FOLDER))

INTERNALS_OF_THREADS = "looks at ThreadPoolExecutor's threads, or relies on sharing memory with the caller"
INTERNALS_OF_PROCESSES = "looks at ProcessPoolExecutor's processes, queues and start methods"
BREAKS = "expects the pool to break for good; ours raises for the call that was hit and goes on with a new process"
OTHER_CONSTRUCTOR = "constructs the executor with a number of workers; ours comes from a pool, which checks its own"
SHARED_MANAGER = "sends a multiprocessing manager's proxy, which only children of the caller may unpickle"

# Every test of the file that does not run unchanged: (class, test) or class -> why.
NOT_RUN: dict[str, str] = {
    "FailingInitializerMixin.test_initializer": BREAKS,
    "ExecutorShutdownTest.test_interpreter_shutdown": "its script names a class of the library; adapted below",
    "ExecutorShutdownTest.test_submit_after_interpreter_shutdown": "its script names a class of the library; adapted",
    "ExecutorShutdownTest.test_hang_gh83386": "its script names a class of the library; adapted below",
    "ThreadPoolShutdownTest.test_cancel_futures_wait_false": "its script names a class of the library; adapted below",
    "ThreadPoolShutdownTest": INTERNALS_OF_THREADS,
    "ProcessPoolShutdownTest": INTERNALS_OF_PROCESSES,
    "ThreadPoolWaitTests.test_pending_calls_race": INTERNALS_OF_THREADS,
    "ExecutorTest.test_free_reference": "expects the value to be gone at once, but the thread that settled the future "
    "may hold it for another moment; adapted below",
    "ExecutorTest.test_max_workers_negative": OTHER_CONSTRUCTOR,
    "ThreadPoolExecutorTest": INTERNALS_OF_THREADS,
    "ProcessPoolExecutorTest.test_max_workers_too_large": OTHER_CONSTRUCTOR,
    "ProcessPoolExecutorTest.test_killed_child": BREAKS,
    "ProcessPoolExecutorTest.test_traceback": "expects its class of cause; ours puts the traceback in a note",
    "ProcessPoolExecutorTest.test_ressources_gced_in_workers": SHARED_MANAGER,
    "ProcessPoolExecutorTest.test_saturation": INTERNALS_OF_PROCESSES,
    "ProcessPoolExecutorTest.test_idle_process_reuse_one": INTERNALS_OF_PROCESSES,
    "ProcessPoolExecutorTest.test_idle_process_reuse_multiple": INTERNALS_OF_PROCESSES,
    "ProcessPoolExecutorTest.test_max_tasks_per_child": OTHER_CONSTRUCTOR,
    "ProcessPoolExecutorTest.test_max_tasks_per_child_defaults_to_spawn_context": OTHER_CONSTRUCTOR,
    "ProcessPoolExecutorTest.test_max_tasks_early_shutdown": OTHER_CONSTRUCTOR,
    "ExecutorDeadlockTest": BREAKS,
    "FutureTests.test_cancel": "looks at the private state after a cancel; ours has no separate step of notifying",
}


def is_gone(reference: weakref.ref[Any]) -> bool:
    return reference() is None


def own_tests(cls: type) -> list[str]:
    return [name for name in vars(cls) if name.startswith("test_")]


@pytest.fixture(scope="module", autouse=True)
def _spared_collector() -> Iterator[None]:
    """The file's tests collect garbage again and again: spare them the libraries that earlier tests have loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[sky.ComputePool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        with sky.ComputePool(provider=sky.Local(), concurrency=5, logs=False) as pool:
            yield pool


class OnAPool(unittest.TestCase):
    """Replacement of the file's ExecutorMixin: the executor is a pool's."""

    worker_count = 5
    executor: Any
    pool: sky.ComputePool

    @pytest.fixture(autouse=True)
    def _open(self, shared_pool: sky.ComputePool) -> None:
        self.pool = shared_pool

    def setUp(self) -> None:
        super().setUp()
        self.executor = self.pool.executor()

    def tearDown(self) -> None:
        self.executor.shutdown(wait=True)
        self.executor = None
        super().tearDown()


def without_those_not_run(mixin: type) -> type:
    """Return the mixin with its tests, except the ones that the table names."""
    hidden = {name: None for name in own_tests(mixin) if f"{mixin.__name__}.{name}" in NOT_RUN}
    return type(mixin.__name__, (mixin,), hidden)


class TestSubmitAndMap(without_those_not_run(cpython.ExecutorTest), OnAPool, cpython.BaseTestCase):  # type: ignore[misc]
    test_map_chunksize = cpython.ProcessPoolExecutorTest.test_map_chunksize

    def test_free_reference(self) -> None:
        for value in self.executor.map(cpython.make_dummy_object, range(10)):
            reference = weakref.ref(value)
            del value
            until(functools.partial(is_gone, reference))


class TestWait(cpython.WaitTests, OnAPool, cpython.BaseTestCase):  # type: ignore[misc]
    pass


class TestAsCompleted(cpython.AsCompletedTests, OnAPool, cpython.BaseTestCase):  # type: ignore[misc]
    pass


class TestShutdown(without_those_not_run(cpython.ExecutorShutdownTest), OnAPool, cpython.BaseTestCase):  # type: ignore[misc]
    pass


class TestInitializer(cpython.BaseTestCase):  # type: ignore[misc]
    worker_count = 2
    test_initializer = cpython.InitializerMixin.test_initializer

    def setUp(self) -> None:
        super().setUp()
        with mock.patch.object(sys, "path", [*sys.path, str(FOLDER)]):
            self.pool = sky.ComputePool(
                provider=sky.Local(), concurrency=2, initializer=cpython.init, initargs=("initialized",)
            ).start()
        self.executor = self.pool.executor()

    def tearDown(self) -> None:
        self.executor.shutdown()
        self.pool.close()
        super().tearDown()


class TestFuture(without_those_not_run(cpython.FutureTests)):  # type: ignore[misc]
    """The futures of an executor keep every promise of the standard ones."""

    def setUp(self) -> None:
        super().setUp()
        self.put_in_place("Future", functools.partial(Future, is_strict=True))
        for name in [name for name in vars(cpython) if name.endswith("_FUTURE")]:
            standard = getattr(cpython, name)
            # The standard library's own, as its tests read them.
            self.put_in_place(name, cpython.create_future(standard._state, standard._exception, standard._result))
        # Under pytest the root logger has handlers, so the handler of last resort gets nothing.
        assert logging.lastResort is not None
        logger = logging.getLogger("concurrent.futures")
        logger.addHandler(logging.lastResort)
        self.addCleanup(logger.removeHandler, logging.lastResort)

    def put_in_place(self, name: str, ours: object) -> None:
        patch: Any = mock.patch.object(cpython, name, ours)
        patch.start()
        self.addCleanup(patch.stop)


RUN: dict[str, tuple[str, ...]] = {
    "InitializerMixin": ("test_initializer",),
    "ExecutorTest": tuple(own_tests(cpython.ExecutorTest)),
    "WaitTests": tuple(own_tests(cpython.WaitTests)),
    "AsCompletedTests": tuple(own_tests(cpython.AsCompletedTests)),
    "ExecutorShutdownTest": tuple(own_tests(cpython.ExecutorShutdownTest)),
    "FutureTests": tuple(own_tests(cpython.FutureTests)),
    "ProcessPoolExecutorTest": ("test_map_chunksize",),
}


def test_every_test_of_the_file_runs_or_is_named_with_a_reason() -> None:
    classes = [cls for _, cls in inspect.getmembers(cpython, inspect.isclass) if cls.__module__ == NAME]
    forgotten = [
        f"{cls.__name__}.{name}"
        for cls in classes
        for name in own_tests(cls)
        if name not in RUN.get(cls.__name__, ())
        and f"{cls.__name__}.{name}" not in NOT_RUN
        and cls.__name__ not in NOT_RUN
    ]
    assert not forgotten
    known = {f"{cls.__name__}.{name}" for cls in classes for name in own_tests(cls)} | {c.__name__ for c in classes}
    assert set(NOT_RUN) <= known


# The tests whose scripts name a class of the library, with a pool in its place.

BEFORE = f"""
import sys
sys.path.append({str(FOLDER)!r})
import skyward as sky
from {NAME} import sleep_and_print


def open_pool():
    return sky.ComputePool(provider=sky.Local(), concurrency=2, logs=lambda line: print(line.text, flush=True)).start()
"""


def run_script(tmp_path: Path, script: str) -> tuple[str, str]:
    path = tmp_path / "script.py"
    path.write_text(BEFORE + textwrap.dedent(script))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_interpreter_shutdown(tmp_path: Path) -> None:
    out, err = run_script(
        tmp_path,
        """
        if __name__ == "__main__":
            pool = open_pool()
            t = pool.executor()
            t.submit(sleep_and_print, 1.0, "apple")
        """,
    )
    assert (out, err) == ("apple", "")


def test_submit_after_interpreter_shutdown(tmp_path: Path) -> None:
    out, err = run_script(
        tmp_path,
        """
        import atexit

        @atexit.register
        def run_last():
            try:
                t.submit(id, None)
            except RuntimeError:
                print("runtime-error")
                raise

        if __name__ == "__main__":
            pool = open_pool()
            t = pool.executor()
            t.submit(id, 42).result()
        """,
    )
    assert "RuntimeError: cannot schedule new futures" in err
    assert out == "runtime-error"


def test_hang_gh83386(tmp_path: Path) -> None:
    out, err = run_script(
        tmp_path,
        """
        if __name__ == "__main__":
            pool = open_pool()
            t = pool.executor()
            t.submit(sleep_and_print, 1.0, "apple")
            t.shutdown(wait=False)
        """,
    )
    assert (out, err) == ("apple", "")


def test_cancel_futures_wait_false(tmp_path: Path) -> None:
    out, err = run_script(
        tmp_path,
        """
        if __name__ == "__main__":
            pool = open_pool()
            t = pool.executor()
            t.submit(sleep_and_print, 0.1, "apple")
            t.shutdown(wait=False, cancel_futures=True)
        """,
    )
    assert (out, err) == ("apple", "")


def test_shutdown_of_the_executor_leaves_the_pool_open(shared_pool: sky.ComputePool) -> None:
    executor = shared_pool.executor()
    future = executor.submit(time.sleep, 0.2)
    executor.shutdown()
    assert future.done()
    assert concurrent.futures.wait([shared_pool.executor().submit(pow, 2, 8)]).done.pop().result() == 256
