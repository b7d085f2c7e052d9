"""Fixtures and rules for every test."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest
from hypothesis import HealthCheck, settings
from pytest_timeout import Settings

from skyward.core.process import collect_rarely
from tests.__main__ import HOSTS
from tests.browser import browser_address, browser_driver, page
from tests.hosts.fixtures import (
    addresses,
    bed,
    ec2,
    ec2_server,
    hosts,
    new_host,
    package_index,
    pytest_collection_finish,
    ray_index,
    relay,
    require_hosts,
    s3_index,
    torch_index,
    users_ray,
)
from tests.promises import is_promise

__all__ = [
    "addresses",
    "bed",
    "browser_address",
    "browser_driver",
    "ec2",
    "ec2_server",
    "hosts",
    "new_host",
    "package_index",
    "page",
    "pytest_collection_finish",
    "ray_index",
    "relay",
    "s3_index",
    "torch_index",
    "users_ray",
]


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a script: tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # started by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if "COVERAGE_PROCESS_CONFIG" in os.environ:  # set by coverage's `patch = subprocess`: this is `make coverage`
    from tests import measured

    measured.measure_children()

# Threads of OpenMP spin while they wait for each other. On busy cores that takes longer than the work: a training
# beside other tests took 64 s of processor time instead of 15. All processes that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Threads of OpenBLAS spin too, for 2**n cycles, and 4 is the smallest n that it takes. Three fits of scikit-learn
# beside other tests took 7.7 s of processor time instead of 2.9.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
# JAX compiles many small functions in each process and calls each a few times. Without most of XLA's optimizations that
# takes half the processor time. Some examples keep them (test_examples.py).
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# Modules that the tests import stay. Looking through their millions of objects for garbage, over and over, took most of
# the processor time of tests with Hugging Face's Trainer, which asks for it.
gc.disable()

# No property fails because the machine is busy. All other settings stay as they are, on a CI server too.
settings.register_profile("busy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(scope="session", autouse=True)
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep records of tests' pools apart from the user's, because only a limited number of outputs is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Send what a test module defines by value, unless it is marked `by_reference`.

    Each process of a node that imports the module, and pytest with it, takes 0.1 s of processor time.
    """
    if request.node.get_closest_marker("by_reference"):
        yield
        return
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def patient_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let values wait for the output before them as long as a busy machine needs: no reader stalls here."""
    for limit in ("_STALLED_S", "_SLOW_S"):
        monkeypatch.setattr(f"skyward.console.outlet.{limit}", 20.0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("promises", "rest"), help="only the tests of `make test`, or only all others")
    parser.addoption("--progress-file", help="a file to keep the number of finished tests and the failures in")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    stray = [item.nodeid for item in items if item.get_closest_marker("hosts") and not item.nodeid.startswith(HOSTS)]
    if stray:
        raise pytest.UsageError(
            f"{stray[0]}: tests marked `hosts` belong into one of {HOSTS}, where test-all runs them"
        )
    part = config.getoption("--part")
    if part is not None:
        chosen = [item for item in items if is_promise(item) == (part == "promises")]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
    # Modules and tests live to the end. Each full collection would visit them: 0.2 s of processor time.
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Leave what was imported out of all further garbage collections, which begin here.

    They took a tenth of the processor time of tests that parse all modules.
    """
    gc.enable()
    gc.freeze()
    collect_rarely()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Limit what a failed test does at its end too. pytest-timeout has just stopped its timer, for a debugger."""
    if isinstance(node, pytest.Item) and not node.config.getoption("usepdb"):
        marker = node.get_closest_marker("timeout")
        limit_s = float(marker.args[0] if marker else node.config.getini("timeout"))
        limit = Settings(limit_s, "signal", func_only=False, disable_debugger_detection=False)
        node.config.hook.pytest_timeout_set_timer(item=node, settings=limit)


class _Progress:
    """Keep "finished/total" in a file, for the process that runs several pytests side by side.

    Each failure has a line behind it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._total = self._finished = 0
        self._failures: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._failures.append(f"{report.nodeid}: {getattr(crash, 'message', report.when).partition(chr(10))[0]}")
        self._finished += report.when == "teardown"
        if report.when != "teardown" and not report.failed:
            return
        failed = f", {len(self._failures)} failed" if self._failures else ""
        new = self._path.with_suffix(".new")
        new.write_text("\n".join([f"{self._finished}/{self._total}{failed}", *self._failures]))
        new.replace(self._path)  # a reader never sees half of it


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--progress-file")
    if path is not None:
        config.pluginmanager.register(_Progress(Path(path)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and not (sys.platform == "linux" and os.geteuid() == 0):
        pytest.skip("needs root on Linux")
    if item.get_closest_marker("hosts"):
        require_hosts()
