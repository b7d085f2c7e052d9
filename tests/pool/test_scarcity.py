"""A shortage of descriptors, memory, processes or disk fails or delays only the call it concerns."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky

HEAD = """
import contextlib, errno, os, resource, sys, time
import numpy as np
import skyward as sky

@sky.compute
def total(array):
    return float(array.sum())

@sky.compute
def large(size):
    return np.ones(size)

@sky.compute
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

@sky.compute
def double(x):
    return 2 * x

def pool(**options):
    return sky.ComputePool(provider=sky.Local(), logs=False, console=False, **options)

def open_all(opened):
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.dup(0))
"""


def run(script: str, *, prefix: tuple[str, ...] = (), **environment: str) -> str:
    """Run a program and return its output. It must end without an error, within the time of a test."""
    env = {**os.environ, **environment, "PYTHONWARNINGS": "ignore"}
    argv = [*prefix, sys.executable, "-c", HEAD + textwrap.dedent(script)]
    done = subprocess.run(argv, check=False, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# Descriptors --------------------------------------------------------------------------------------------------------


def test_many_large_arguments_may_wait_under_a_small_limit_of_files(tmp_path: Path) -> None:
    run(
        f"""
        resource.setrlimit(resource.RLIMIT_NOFILE, (192, 192))
        with pool(nodes=1, concurrency=2) as p:
            waiting = [wait_for({str(tmp_path / "go")!r}) > p for _ in range(2)]
            sums = [total(np.full(40_000, i, dtype=float)) > p for i in range(400)]
            small = [double(i) > p for i in range(20)]
            open({str(tmp_path / "go")!r}, "w").close()
            assert [f.result() for f in small] == [2 * i for i in range(20)]
            assert [f.result() for f in sums] == [40_000.0 * i for i in range(400)]
            values = [large(700_000) > p for _ in range(30)]
            time.sleep(0)
            assert all(f.result().size == 700_000 for f in values)
        """
    )


def test_if_the_program_has_opened_every_file_only_calls_that_need_one_fail(tmp_path: Path) -> None:
    run(
        """
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        with pool(nodes=2, concurrency=1) as p:
            assert [double(i) >> p for i in range(4)] == [0, 2, 4, 6]
            opened, errors = [], [None] * 4
            while errors[0] is None or errors[2] is None:  # a thread of the pool may close one that it had open
                open_all(opened)
                futures = [total(np.ones(40_000)) > p, double(1) > p, large(2_000_000) > p, double(2) > p]
                errors = [f.exception(timeout=80) for f in futures]
            assert isinstance(errors[0], sky.errors.UsageError), errors[0]
            assert "total" in str(errors[0]) and "ulimit -n" in str(errors[0]), errors[0]
            assert isinstance(errors[2], OSError) and errors[2].errno == errno.EMFILE, errors[2]
            assert errors[1] is errors[3] is None
            assert [double(i) >> p for i in range(4)] == [0, 2, 4, 6]
            for fd in opened:
                os.close(fd)
            assert total(np.ones(40_000)) >> p == 40_000.0
            assert (large(2_000_000) >> p).size == 2_000_000
        """
    )


def test_a_distant_node_with_few_files_fails_only_the_call_that_needs_many() -> None:
    run(
        """
        from tests.channels import Relayed

        @sky.compute
        def agent():
            parent = os.getppid()  # the zygote, whose parent is the agent
            with open(f"/proc/{parent}/stat") as file:
                return int(file.read().rpartition(")")[2].split()[1])

        @sky.compute
        def totals(*arrays):
            return sum(float(a.sum()) for a in arrays)

        with sky.ComputePool(Relayed(), nodes=1, concurrency=1, logs=False, console=False) as p:
            pid = agent() >> p
            open_files = len(os.listdir(f"/proc/{pid}/fd"))
            for count in (20, 60, 100):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files + 80, open_files + 80))
                arrays = [np.full(40_000, 1.0 + i + 1000 * count) for i in range(count)]
                error = (totals(*arrays) > p).exception(timeout=80)
                if count == 20:
                    assert error is None, error
                else:
                    assert isinstance(error, sky.errors.PayloadNotLoadable), error
                    assert "320000 bytes did not arrive" in str(error) and "ulimit -n" in str(error), error
                assert (agent() >> p) == pid
                assert [double(i) >> p for i in range(4)] == [0, 2, 4, 6]
        """,
    )


# Memory -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def control_group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Make a control group of the kind that the parameter names."""
    group = Path("/sys/fs/cgroup") / request.param / f"skyward-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


def joining(group: Path) -> tuple[str, ...]:
    return "sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"


@pytest.mark.root
@pytest.mark.parametrize("control_group", ["memory"], indirect=True)
def test_in_a_small_control_group_many_arrays_are_sent_one_after_the_other(control_group: Path) -> None:
    (control_group / "memory.limit_in_bytes").write_text(str(600 << 20))
    run(
        """
        with pool(nodes=1, concurrency=1) as p:
            for i in range(60):
                array = np.full(20 << 17, i, dtype=float)  # 20 MiB
                assert total(array) >> p == i * float(20 << 17)
                assert (total(array) > p).result() == i * float(20 << 17)
        """,
        prefix=joining(control_group),
    )


# Processes and threads ----------------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("control_group", ["pids"], indirect=True)
def test_without_processes_a_lost_slot_is_made_again_when_there_are_some(control_group: Path) -> None:
    run(
        f"""
        @sky.compute
        def die():
            os._exit(1)

        @sky.compute
        def start():
            os.fork()

        def limit(count):
            with open({str(control_group / "pids.max")!r}, "w") as file:
                file.write(str(count))

        with pool(nodes=2, concurrency=2) as p:
            assert [double(i) >> p for i in range(4)] == [0, 2, 4, 6]
            limit(1)
            refused = (start() > p).exception(timeout=80)
            assert isinstance(refused, BlockingIOError), refused
            assert isinstance((die() > p).exception(timeout=80), sky.errors.SlotLost)
            assert [f.result(timeout=80) for f in [double(i) > p for i in range(8)]] == [2 * i for i in range(8)]
            # It may meet the slot that cannot be started.
            call = total.with_options(retries=20)(np.ones(4 << 20))
            assert (call > p).result(timeout=80) == 4 << 20
            limit("max")
            assert [f.result(timeout=80) for f in [double(i) > p for i in range(40)]] == [2 * i for i in range(40)]
        """,
        prefix=joining(control_group),
    )


# Room on disks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("mount is not there")
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    made = subprocess.run(mount, check=False, capture_output=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.root
def test_calls_go_on_with_full_temporary_and_state_folders(small_disk: Path) -> None:
    run(
        f"""
        @sky.compute
        def say(x):
            print("said", x)
            return x

        with sky.ComputePool(provider=sky.Local(), nodes=1, concurrency=2, console=False,
                             logs=sky.LogFiles({str(small_disk / "logs")!r}, echo=False)) as p:
            assert double(1) >> p == 2
            with contextlib.suppress(OSError), open({str(small_disk / "filler")!r}, "wb") as file:
                while True:
                    file.write(bytes(65536))
                    file.flush()
            assert [f.result(timeout=80) for f in [say(i) > p for i in range(20)]] == list(range(20))
            assert list(p.map(double, range(1000))) == list(range(0, 2000, 2))
            assert total(np.ones(4 << 20)) >> p == 4 << 20
            assert (large(2_000_000) >> p).size == 2_000_000
        """,
        TMPDIR=str(small_disk),
        XDG_STATE_HOME=str(small_disk / "state"),
    )


# A start without a resource ------------------------------------------------------------------------------------------


def test_a_pool_that_cannot_start_names_the_missing_resource_and_leaves_nothing(tmp_path: Path) -> None:
    """All starts run in one process, so that each must leave the next one its resources."""
    run(
        f"""
        import threading

        def refusal():
            try:
                with pool(nodes=1) as p:
                    assert double(1) >> p == 2
            except sky.errors.SkywardError as error:
                return [str(error)]
            return []

        real, left = threading.Thread.start, [0]

        def start(thread):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
            real(thread)

        threading.Thread.start = start
        for count in range(4):
            left[0] = count
            said = refusal()
            assert not said or "can't start new thread" in said[0], said
            assert count or said
        threading.Thread.start = real

        os.environ["HUGE"] = "x" * 200_000
        (said,) = refusal()
        assert "HUGE" in said, said
        del os.environ["HUGE"]

        sys.argv.clear()
        assert refusal() == []
        del sys.argv
        assert refusal() == []

        os.mkdir({str(tmp_path / "gone")!r})
        os.chdir({str(tmp_path / "gone")!r})
        os.rmdir({str(tmp_path / "gone")!r})
        (said,) = refusal()
        assert "working folder" in said, said
        os.chdir("/")
        assert refusal() == []
        """
    )


def test_a_variable_of_an_image_that_no_process_could_have_is_refused() -> None:
    with pytest.raises(sky.errors.UsageError, match=r"Image.env\['HUGE'\]='<200000 characters>'"):
        sky.Image(env={"HUGE": "x" * 200_000})
