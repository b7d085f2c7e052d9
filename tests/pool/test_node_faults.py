"""Faults on a node stay small: they fail one task or one process, and the node goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

import skyward as sky
from skyward.errors import RemoteError, RendezvousFailed, SlotLost, TaskTimeout, UsageError
from skyward.integrations.base import IntegrationBase, integrate
from skyward.values.topology import Rank
from tests.hosts.meeting import Meeting
from tests.waiting import until


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=1, concurrency=1, logs=False)


@sky.compute
def raise_long(length: int) -> None:
    raise ValueError("x" * length)


@sky.compute
def one() -> int:
    return 1


@pytest.mark.parametrize("length", [130_000, 400_000])
def test_an_error_with_a_huge_message_arrives(pool: sky.ComputePool, length: int) -> None:
    agents = pool.agent_pids()
    with pytest.raises((ValueError, RemoteError), match="x" * 1000) as caught:
        raise_long(length) >> pool
    if isinstance(caught.value, RemoteError):
        assert "exceeds the limit" in str(caught.value)
        assert "bytes left out" in str(caught.value)
    assert pool.agent_pids() == agents


def test_a_huge_print_in_a_thread_slot_arrives_whole() -> None:
    heard: list[sky.LogLine] = []

    @sky.compute
    def shout() -> None:
        print("y" * 400_000)
        print("z" * 400_000, end="")

    with sky.ComputePool(sky.Local(), executor="thread", logs=heard.append) as pool:
        shout() >> pool
    assert "".join(line.text for line in heard) == "y" * 400_000 + "z" * 400_000


def test_only_the_slot_that_sends_an_invalid_frame_is_killed(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def garble() -> None:
        from skyward.node.slot.link import Link

        def send(self: Any, *args: object, **kwargs: object) -> None:
            self._sock.sendall(b"\xff" * 64)

        Link.send_payload = send  # type: ignore[method-assign]

    agents = pool.agent_pids()
    # While a call is open, the next goes by way of the agent, which reads the answer.
    other = pool.submit(sky.compute(until)((tmp_path / "go").exists))
    garbled = pool.submit(garble())
    (tmp_path / "go").touch()
    with pytest.raises(SlotLost):
        garbled.result()
    assert other.result() is None
    assert one() >> pool == 1
    assert pool.agent_pids() == agents


@sky.compute
def close_everything(notes: Path) -> None:
    with notes.open("a") as file:
        file.write("ran\n")
    os.closerange(3, 256)


@pytest.mark.parametrize("executor", ["process", "thread"])
def test_a_call_that_closes_the_slots_own_files_is_lost_and_not_run_again(
    executor: Literal["process", "thread"], pool: sky.ComputePool, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        if executor == "thread":
            pool = stack.enter_context(sky.ComputePool(sky.Local(), executor="thread", logs=False))
        for notes in (tmp_path / "waited for", tmp_path / "sent"):
            with pytest.raises(SlotLost) as caught:
                if notes.name == "sent":
                    pool.submit(close_everything(notes)).result(60)
                else:
                    close_everything(notes) >> pool
            assert caught.value.started is True
            assert notes.read_text() == "ran\n"
        assert one() >> pool == 1


@sky.compute
def fork(how: str) -> tuple[str, int]:
    child = os.fork()
    if not child:
        if how == "raises":
            raise ValueError("in the child")
        if how == "exits":
            sys.exit(3)
        return "child", 0
    _, status = os.waitpid(child, 0)
    return "parent", os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("raises", 1), ("exits", 3)])
def test_a_child_that_a_call_forks_ends_where_the_call_would(pool: sky.ComputePool, how: str, code: int) -> None:
    assert fork(how) >> pool == ("parent", code)
    assert pool.submit(fork(how)).result(60) == ("parent", code)
    assert one() >> pool == 1


def test_a_child_that_a_map_forks_runs_none_of_its_other_calls(pool: sky.ComputePool, tmp_path: Path) -> None:
    def mark(name: str) -> bool:
        with (tmp_path / name).open("a") as file:
            file.write("ran\n")
        child = os.fork() if name == "1" else -1
        if child > 0:
            os.waitpid(child, 0)
        return child != 0

    assert pool.map(mark, ["0", "1", "2", "3"], chunk=4) == [True] * 4
    assert [(tmp_path / name).read_text() for name in "0123"] == ["ran\n"] * 4


def test_cancelled_calls_leave_their_thread_slot_working(tmp_path: Path) -> None:
    @sky.compute
    def spin(started: Path) -> None:
        started.touch()
        while True:
            pass

    @sky.compute
    def nothing() -> int:
        return 5

    with sky.ComputePool(sky.Local(), executor="thread", logs=False) as pool:
        for number in range(20):
            future = spin(tmp_path / str(number)) > pool
            until((tmp_path / str(number)).exists)
            future.cancel()
            cut = nothing() > pool
            cut.cancel()
            assert (nothing() > pool).result(60) == 5


# Ranks ------------------------------------------------------------------------------------------------------------


class Preloads(IntegrationBase):
    """Integration whose zygote imports a module of the test."""

    name: ClassVar[str] = "preloads"
    extra: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *modules: str) -> None:
        self.preload = modules  # type: ignore[misc]  # of each instance

    def session(self, rank: Rank) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Return a file that nodes opened from now on import as a module of its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / f"preloaded_{abs(hash(request.node.name))}.py"


def test_a_rank_whose_zygote_hangs_in_an_import_can_be_abandoned(module: Path) -> None:
    module.write_text("import time; time.sleep(60)\n")
    train = sky.compute(timeout_s=0.3)(integrate(os.getpid, Preloads(module.stem)))
    with sky.ComputePool(sky.Local(), logs=False, cancel_grace_s=0.1) as pool:
        with pytest.raises(TaskTimeout):
            train() >> pool
        assert one() >> pool == 1


def test_variables_are_set_before_modules_that_read_them_are_imported(module: Path) -> None:
    module.write_text("import os\nSEEN = [os.environ.get(name) for name in ('SKY_A', 'SKY_B', 'SKY_C')]\n")

    def seen() -> list[str | None]:
        found: list[str | None] = sys.modules[module.stem].SEEN
        return found

    settings = ("SKY_A=a=1", "SKY_B?=from here", "SKY_C=over")
    image = sky.Image(env={"SKY_B": "the user's", "SKY_C": "the user's"})
    with sky.ComputePool(sky.Local(), logs=False, image=image) as pool:
        rank = sky.compute(integrate(seen, Preloads(*settings, module.stem)))
        assert rank() >> pool == ["a=1", "the user's", "over"]


def test_a_rank_ends_though_a_thread_of_its_task_does_not(module: Path) -> None:
    module.write_text("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")

    def body() -> int:
        threading.Thread(target=threading.Event().wait).start()
        return os.getpid()

    with sky.ComputePool(sky.Local(), logs=False) as pool:
        rank = sky.compute(integrate(body, Preloads(module.stem)))() >> pool
        until(lambda: not os.path.exists(f"/proc/{rank}"))


@pytest.mark.parametrize("starts_a_thread", [False, True])
def test_a_rank_is_forked_only_from_a_process_without_threads(module: Path, starts_a_thread: bool) -> None:
    threads = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    module.write_text("import os\nmade_in = os.getpid()\n" + threads * starts_a_thread)
    name = module.stem

    def body() -> tuple[bool, bool, int]:
        preloaded = sys.modules.get(name)  # modules imported before it was a rank
        is_forked = preloaded is not None and preloaded.made_in == os.getppid()
        sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return is_forked, b"import fresh" in Path("/proc/self/cmdline").read_bytes(), sleeper.pid

    with sky.ComputePool(sky.Local(), logs=False) as pool:
        is_forked, is_fresh, sleeper = sky.compute(integrate(body, Preloads(name)))() >> pool
        assert (is_forked, is_fresh) == (not starts_a_thread, starts_a_thread)
        until(lambda: not os.path.exists(f"/proc/{sleeper}"))


# Streams ----------------------------------------------------------------------------------------------------------


def test_unread_items_leave_no_descriptors(pool: sky.ComputePool) -> None:
    @sky.compute
    def first(arrays: Iterator[Any]) -> float:
        return float(next(arrays)[0])

    @sky.compute
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors() >> pool
    for number in range(3):
        arrays = [np.full(100_000, 10.0 * number + i) for i in range(8)]
        assert first(iter(arrays)) >> pool == 10.0 * number
    until(lambda: (descriptors() >> pool) <= before + 1)


def test_another_thread_cannot_read_a_tasks_input(pool: sky.ComputePool) -> None:
    @sky.compute
    def read_beside(numbers: Iterator[int]) -> str:
        met: list[str] = []

        def read() -> None:
            try:
                next(numbers)
            except UsageError as error:
                met.append(str(error))

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return met[0]

    assert "only the thread that runs the function" in read_beside(iter([1, 2])) >> pool
    assert one() >> pool == 1


# Limits -----------------------------------------------------------------------------------------------------------


def test_slots_may_open_as_many_files_as_the_machine_allows(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import resource\nimport skyward as sky\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "with sky.ComputePool(sky.Local(), logs=False) as pool:\n"
        "    print(*(sky.compute(resource.getrlimit)(resource.RLIMIT_NOFILE) >> pool))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert done.stdout.split() == [str(hard), str(hard)]


def test_a_gang_that_can_lock_no_port_fails_alone_with_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="sky-", dir="/tmp") as folder:  # a socket's path must be short
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        in_the_way = Path(folder, f"skyward-ports-{os.getuid()}")
        in_the_way.touch()
        gang = sky.compute(integrate(os.getpid, Meeting()))
        with sky.ComputePool(sky.Local(), nodes=1, concurrency=2, logs=False) as pool:
            agents = pool.agent_pids()
            other = sky.compute(until)(Path(folder, "go").exists) > pool
            with pytest.raises(RendezvousFailed, match=f"'getpid': no rendezvous on node 0: .*{in_the_way}"):
                gang() >> pool
            in_the_way.unlink()
            assert (gang() >> pool) > 0
            Path(folder, "go").touch()
            other.result(60)
            assert pool.agent_pids() == agents
