"""Operators, targets, options and life of a pool, on real local nodes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import NoActivePool, NoCapacity, PoolClosed, UsageError
from tests.waiting import lines_of, until


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=2, concurrency=2)


@sky.compute
def double(x: int) -> int:
    return 2 * x


@sky.compute
def node_of() -> int:
    info = sky.instance_info()
    assert info is not None
    return info.node


def after(path: Path, value: Any) -> Any:
    """Return `value` once the file exists. The task reports that it began."""
    with open(f"{path}.began", "a") as file:
        file.write("began\n")
    until(path.exists)
    return value


later = sky.compute(after)


class TestOperators:
    def test_run_returns_the_value(self, pool: sky.ComputePool) -> None:
        assert double(21) >> pool == 42
        assert pool.run(double(21)) == 42

    def test_submit_returns_a_future(self, pool: sky.ComputePool) -> None:
        future = double(21) > pool
        assert isinstance(future, concurrent.futures.Future)
        assert future.result() == 42
        assert pool.submit(double(2)).result(timeout=60) == 4

    def test_broadcast_gives_one_value_for_each_node_in_order(self, pool: sky.ComputePool) -> None:
        assert node_of() @ pool == [0, 1]
        assert pool.broadcast(node_of()) == [0, 1]

    def test_a_group_returns_all_values(self, pool: sky.ComputePool) -> None:
        assert (double(1) & double(2) & double(3)) >> pool == (2, 4, 6)
        assert sky.gather(double(1), double(2)) >> pool == (2, 4)
        assert pool.run_group(double(1) & double(2)) == (2, 4)

    def test_a_group_can_be_a_future(self, pool: sky.ComputePool) -> None:
        assert ((double(1) & double(2)) > pool).result() == (2, 4)
        assert pool.submit_group(sky.gather()).result() == ()

    def test_a_call_can_be_awaited(self, pool: sky.ComputePool) -> None:
        async def main() -> tuple[Any, ...]:
            return tuple(await asyncio.gather(*(pool.run_async(double(i)) for i in range(5))))

        assert asyncio.run(main()) == (0, 2, 4, 6, 8)

    def test_map_returns_all_values(self, pool: sky.ComputePool) -> None:
        assert pool.map(double, range(4)) == [0, 2, 4, 6]

    def test_calls_run_in_parallel(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        @sky.compute
        def meet(me: int) -> int:
            (tmp_path / str(me)).touch()
            until(lambda: len(os.listdir(tmp_path)) == 4)
            return os.getpid()

        assert len(set(sky.gather(*map(meet, range(4))) >> pool)) == 4

    def test_keyword_arguments_and_defaults_are_passed(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def describe(a: int, *rest: int, b: int = 2, **more: int) -> tuple[Any, ...]:
            return a, rest, b, more

        assert describe(1, 5, 6, c=7) >> pool == (1, (5, 6), 2, {"c": 7})


class TestTargets:
    def test_the_module_is_the_innermost_pool(self) -> None:
        with sky.ComputePool(sky.Local(), logs=False) as outer:
            with sky.ComputePool(sky.Local(), nodes=2, logs=False) as inner:
                assert len(node_of() @ sky) == 2
                assert len(node_of() @ outer) == 1
                assert double(1) >> inner == 2
            assert node_of() @ sky == [0]
            assert (double(4) > sky).result() == 8
            assert (double(1) & double(2)) >> sky == (2, 4)

    def test_a_thread_sees_the_open_pool(self) -> None:
        with sky.ComputePool(sky.Local(), logs=False), concurrent.futures.ThreadPoolExecutor(2) as threads:
            assert list(threads.map(lambda x: double(x) >> sky, range(4))) == [0, 2, 4, 6]

    def test_in_a_task_there_is_no_pool(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def nested() -> int:
            return double(1) >> sky

        with pytest.raises(NoActivePool, match="Inside a task there is no pool"):
            nested() >> pool

    def test_a_pool_that_is_not_open_is_refused(self) -> None:
        closed = sky.ComputePool(sky.Local())
        with pytest.raises(PoolClosed, match="use it inside its `with` block, or call start"):
            double(1) >> closed
        with pytest.raises(PoolClosed):
            closed.map(double, [1])
        with pytest.raises(PoolClosed):
            closed.executor()


class TestGather:
    def test_a_stream_yields_in_the_order_of_the_calls(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        values = sky.gather(later(tmp_path / "go", "slow"), later(tmp_path, "fast"), stream=True) >> pool
        assert iter(values) is values
        (tmp_path / "go").touch()
        assert list(values) == ["slow", "fast"]

    def test_a_stream_yields_in_the_order_of_completion(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        calls = sky.gather(later(tmp_path / "go", "slow"), later(tmp_path, "fast"), stream=True, ordered=False)
        values = calls >> pool
        assert next(values) == "fast"
        (tmp_path / "go").touch()
        assert list(values) == ["slow"]

    def test_the_first_error_ends_a_stream_and_is_raised(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def inverse(x: int) -> float:
            return 1 / x

        values = sky.gather(inverse(1), inverse(0), inverse(2), stream=True) >> pool
        assert next(values) == 1
        with pytest.raises(ZeroDivisionError):
            next(values)
        with pytest.raises(ZeroDivisionError):
            (inverse(0) & inverse(1)) >> pool
        with pytest.raises(ZeroDivisionError):
            ((inverse(0) & inverse(1)) > pool).result()

    def test_an_error_stops_the_calls_beside_it(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        @sky.compute
        def fail() -> None:
            until((tmp_path / "never.began").exists)
            raise ValueError("early")

        started = time.monotonic()
        with pytest.raises(ValueError, match="early"):
            (later(tmp_path / "never", 1) & fail()) >> pool
        assert time.monotonic() - started < 40  # the call beside it would wait for a minute
        assert double(1) >> pool == 2


class TestStandardFutures:
    def test_wait_and_as_completed_take_futures(self, pool: sky.ComputePool) -> None:
        futures = [double(i) > pool for i in range(6)]
        assert sorted(f.result() for f in concurrent.futures.as_completed(futures)) == [0, 2, 4, 6, 8, 10]
        done, waiting = concurrent.futures.wait([double(i) > pool for i in range(6)])
        assert len(done) == 6
        assert not waiting

    def test_result_waits_no_longer_than_its_timeout(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        future = later(tmp_path / "go", 1) > pool
        with pytest.raises(TimeoutError):
            future.result(timeout=0.01)
        (tmp_path / "go").touch()
        assert future.result(timeout=60) == 1
        assert future.exception() is None
        assert future.done()

    def test_callbacks_are_called_once(self, pool: sky.ComputePool) -> None:
        called: list[int] = []
        future = double(1) > pool
        future.add_done_callback(lambda f: called.append(f.result()))
        until(lambda: called)
        assert called == [2]

    def test_a_callback_may_send_calls(self, pool: sky.ComputePool) -> None:
        second: list[concurrent.futures.Future[int]] = []
        first = double(1) > pool
        first.add_done_callback(lambda f: second.append(double(f.result()) > pool))
        until(lambda: second)
        assert second[0].result(timeout=60) == 4


class TestSharing:
    def test_threads_share_a_pool(self, pool: sky.ComputePool) -> None:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            sums = list(threads.map(lambda n: sum(pool.map(double, range(n))), range(30)))
        assert sums == [n * (n - 1) for n in range(30)]

    def test_two_pools_work_in_one_process(self, pool: sky.ComputePool) -> None:
        with sky.ComputePool(sky.Local(), logs=False) as other:
            here, there = sky.compute(os.getpid)() > pool, sky.compute(os.getpid)() > other
            assert here.result() != there.result()
        assert double(1) >> pool == 2

    def test_one_thread_can_make_many_calls(self, pool: sky.ComputePool) -> None:
        futures = [double(i) > pool for i in range(2000)]
        assert [f.result() for f in futures] == [2 * i for i in range(2000)]


class TestLife:
    def test_leaving_the_block_waits_for_open_calls(self, tmp_path: Path) -> None:
        with sky.ComputePool(sky.Local(), logs=False) as pool:
            future = later(tmp_path / "go", 5) > pool
            threading.Timer(0.2, (tmp_path / "go").touch).start()
        assert future.result(timeout=0) == 5
        with pytest.raises(PoolClosed):
            double(1) >> pool

    def test_leaving_the_block_by_an_error_stops_open_calls(self, tmp_path: Path) -> None:
        with pytest.raises(KeyError), sky.ComputePool(sky.Local(), logs=False) as pool:
            future = later(tmp_path / "go", 5) > pool
            raise KeyError("mine")
        with pytest.raises(PoolClosed, match="before the call ended"):
            future.result(timeout=0)

    def test_start_and_close_replace_the_block(self) -> None:
        pool = sky.ComputePool(sky.Local(), logs=False)
        assert not pool.is_active
        assert pool.start() is pool
        assert pool.is_active
        with pytest.raises(UsageError, match="is open already"):
            pool.start()
        assert double(3) >> pool == 6
        pool.close()
        pool.close()
        assert not pool.is_active

    def test_a_pool_that_ends_while_its_block_is_left_is_closed_once(self) -> None:
        class EndedMeanwhile(sky.ComputePool):
            @property
            def is_active(self) -> bool:
                """End the pool from another thread when `close` asks, as `skyward down` does."""
                was_active = super().is_active
                if was_active and threading.current_thread() is threading.main_thread():
                    other = threading.Thread(target=self.close, kwargs={"cancel": True})
                    other.start()
                    other.join(60)
                return was_active

        told: list[sky.events.Event] = []
        pool = EndedMeanwhile(sky.Local(), logs=False, on_event=told.append).start()
        pool.close()
        assert not pool.is_active
        assert sum(isinstance(event, sky.events.PoolClosed) for event in told) == 1

    def test_a_closed_pool_opens_again(self) -> None:
        pool = sky.ComputePool(sky.Local(), logs=False)
        for _ in range(2):
            with pool:
                assert double(3) >> pool == 6

    def test_sizes_are_reported(self, pool: sky.ComputePool) -> None:
        assert (pool.nodes, pool.concurrency, pool.total_slots) == (2, 2, 4)
        assert "nodes=2 concurrency=2 open" in repr(pool)

    def test_more_than_the_machine_has_is_refused_with_both_numbers(self) -> None:
        with pytest.raises(NoCapacity, match=r"vcpus=9999 exceeds the \d+ cores of this machine"):
            sky.ComputePool(sky.Local(), vcpus=9999).start()

    def test_a_program_that_closes_no_pool_hears_of_it_and_leaves_nothing_behind(self) -> None:
        script = """
import skyward as sky

closed = sky.ComputePool(sky.Local(), logs=False, name="closed").start()
closed.close()
pool = sky.ComputePool(sky.Local(), logs=False, name="open").start()
print(*pool.agent_pids().values())
"""
        ended = subprocess.run(
            [sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=60, check=True
        )
        assert "ResourceWarning: open: was never closed" in ended.stderr
        assert "closed: was" not in ended.stderr
        until(lambda: not os.path.exists(f"/proc/{ended.stdout.strip()}"))


class TestOptions:
    def test_the_default_timeout_applies(self) -> None:
        with sky.ComputePool(sky.Local(), default_compute_timeout=0.2, cancel_grace_s=0.2, logs=False) as pool:
            with pytest.raises(sky.errors.TaskTimeout, match=r"timeout_s=0\.2"):
                sky.compute(time.sleep)(30) >> pool
            assert double.with_options(timeout_s=60)(1) >> pool == 2

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"nodes": 0}, "nodes=0: must be a whole number >= 1; set nodes=1 or more"),
            ({"nodes": 1.5}, "nodes=1.5: "),
            ({"nodes": True}, "nodes=True: "),
            ({"concurrency": -1}, "concurrency=-1: .*set concurrency=1"),
            ({"executor": "fork"}, "executor='fork': not supported; use one of 'process', 'thread'"),
            ({"architecture": "mips"}, "architecture='mips': not supported; use one of None, 'x86_64', 'arm64'"),
            ({"max_inflight": 0}, "max_inflight=0: "),
            ({"default_timeout_s": 0}, "default_timeout_s=0: must be a number of seconds > 0; pass"),
            ({"default_timeout_s": float("inf")}, "default_timeout_s=inf: "),
            ({"provision_timeout_s": -3}, "provision_timeout_s=-3: "),
            ({"cancel_grace_s": -1}, "cancel_grace_s=-1: must be a number of seconds from 0 to 6500"),
            ({"cancel_grace_s": 7200}, "cancel_grace_s=7200: must be a number of seconds from 0 to 6500"),
            ({"cancel_grace_s": "x"}, "cancel_grace_s='x': "),
            ({"allocation": "free"}, "free"),
            ({"initializer": 3}, "initializer=3: not a function"),
            ({"provider": "local"}, "provider='local': not a provider; pass an instance, such as sky.Local"),
            ({"provider": sky.Local}, r"provider=<class .*Local'>: not a provider; .* sky.Local\(\)"),
            ({"logs": "yes"}, "logs='yes': "),
            ({"image": "ubuntu"}, "image='ubuntu': "),
            ({"initargs": 3}, "initargs=3: "),
            ({"vcpus": 0}, "vcpus=0: "),
            ({"memory_gib": -1}, "memory_gib=-1: "),
            ({"max_hourly_cost": -1}, "max_hourly_cost=-1: "),
            ({"accelerator": 3}, "accelerator=3: "),
            ({"ttl": 600}, "ttl: not an option of ComputePool; leave it out: leases replace it. Nodes end with"),
            ({"memory_gb": 1, "memory_gib": 1}, "memory_gb: given twice"),
            ({"nodez": 2}, r"nodez: not an option of ComputePool; did you mean nodes=\?"),
            ({"colour": 2}, r"colour: not an option of ComputePool; see help\(sky.ComputePool\)"),
        ],
    )
    def test_a_wrong_option_is_refused_by_name_and_value(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            sky.ComputePool(**{"provider": sky.Local(), **options})

    def test_the_references_spellings_are_accepted(self) -> None:
        pool = sky.ComputePool(sky.Local(), memory_gb=0.5, logging=False, default_compute_timeout=9, nodes=2)
        assert (pool.spec.memory_gib, pool.nodes) == (0.5, 2)

    def test_options_that_an_image_cannot_have_here_are_refused(self) -> None:
        pool = sky.ComputePool(sky.Local(), image=sky.Image(pip=["rich"]), logs=False)
        with pytest.warns(UserWarning, match="pip has no effect with Local"):
            pool.start()
        pool.close()

    def test_a_file_that_an_image_includes_must_exist_here_too(self) -> None:
        with pytest.raises(UsageError, match=r"Image.includes='nowhere': does not exist; correct the path") as refused:
            sky.ComputePool(sky.Local(), image=sky.Image(includes=["nowhere"]), logs=False).start()
        assert (refused.value.field, refused.value.value) == ("includes", "nowhere")


@pytest.fixture
def appended(tmp_path: Path) -> Path:
    return tmp_path / "ran"


class TestRetryOn:
    def test_a_failing_call_is_not_run_again(self, pool: sky.ComputePool, appended: Path) -> None:
        @sky.compute(retries=3)
        def fail() -> None:
            with appended.open("a") as file:
                file.write("ran\n")
            raise OSError("down")

        with pytest.raises(OSError, match="down") as failed:
            fail() >> pool
        assert len(lines_of(appended)) == 1
        hint = "retries=3 is for lost processes and nodes; add retry_on=OSError to repeat after this too"
        assert hint in failed.value.__notes__

    def test_retry_on_repeats_the_call_for_the_types_it_names(self, pool: sky.ComputePool, appended: Path) -> None:
        @sky.compute(retries=3, retry_on=(OSError,))
        def fail_twice(kind: type[Exception]) -> int:
            with appended.open("a") as file:
                file.write("ran\n")
            if len(lines_of(appended)) < 3:
                raise kind("down")
            return 7

        assert fail_twice(ConnectionError) >> pool == 7
        appended.unlink()
        with pytest.raises(KeyError):
            fail_twice(KeyError) >> pool
        assert len(lines_of(appended)) == 1

    def test_a_pause_ends_with_its_pool_or_its_future(self, appended: Path) -> None:
        @sky.compute(retries=3, retry_on=OSError, retry_delay_s=3600)
        def fail(_: int = 0) -> None:
            with appended.open("a") as file:
                file.write("ran\n")
            raise OSError("down")

        with sky.ComputePool(sky.Local(), nodes=1) as pool:
            cancelled, closed = fail() > pool, fail() > pool
            until(lambda: appended.exists() and len(lines_of(appended)) == 2)
            assert cancelled.cancel()
            with concurrent.futures.ThreadPoolExecutor(1) as threads:
                mapped = threads.submit(pool.map, fail, [1])
                until(lambda: len(lines_of(appended)) == 3)
                pool.close(cancel=True)
                for future in (closed, mapped):
                    with pytest.raises(PoolClosed):
                        future.result(60)
        assert len(lines_of(appended)) == 3

    def test_each_call_of_a_map_waits_for_its_retry(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        @sky.compute(retries=2, retry_on=OSError, retry_delay_s=0.01)
        def fail_once(number: int) -> int:
            mark = tmp_path / str(number)
            if number % 3 == 0 and not mark.exists():
                mark.touch()
                raise OSError("busy")
            return number

        assert pool.map(fail_once, range(20)) == list(range(20))
        assert sorted(int(path.name) for path in tmp_path.iterdir()) == list(range(0, 20, 3))

    def test_retries_are_limited(self, pool: sky.ComputePool, appended: Path) -> None:
        @sky.compute(retries=2, retry_on=OSError)
        def fail() -> None:
            with appended.open("a") as file:
                file.write("ran\n")
            raise OSError("down")

        with pytest.raises(OSError, match="down"):
            fail() >> pool
        assert len(lines_of(appended)) == 3
