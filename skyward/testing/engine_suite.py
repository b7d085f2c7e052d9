"""Conformance suite of engines, as tests to inherit. See `EngineSuite`."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from ..calls.actor import actor
from ..calls.compute import compute, gather
from ..errors import ActorLost, ArgumentNotPicklable, ResultNotPicklable, SlotLost, TaskExited, UsageError
from ..node.slot.channels import channel
from ..node.slot.runtime import instance_info
from ..node.slot.shared.names import barrier, counter, lock, queue
from ..pool.pool import ComputePool

_LIMIT_S = 60.0


def appear(path: Path) -> None:
    """Create an empty file, by which a call reports how far it is."""
    path.touch()


def wait_for(path: Path) -> None:
    """Wait until the file exists. Raise TimeoutError after a minute."""
    deadline = time.monotonic() + _LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(str(path))
        time.sleep(0.005)


class _SeenDecoding(Exception):
    """Error that calls a function of this process when it is decoded here."""

    on_decoded: Callable[[], object] = staticmethod(lambda: None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _decoded, ()


def _decoded() -> _SeenDecoding:
    _SeenDecoding.on_decoded()
    return _SeenDecoding()


def _fail_seen() -> None:
    raise _SeenDecoding


class _Tally:
    """Actor of the tests."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def count_down(self, count: int) -> Iterator[int]:
        yield from reversed(range(count))

    def wait(self, began: Path, there: Path) -> None:
        appear(began)
        wait_for(there)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class EngineSuite:
    """Conformance of a pool, independent of its nodes and channels.

    Inherit it in a test class, and define the fixture `pool`: an open pool of at least 2 nodes with at least 2 slots
    each. The tests share it (scope "module" or wider), and nobody else uses it meanwhile. Calls and this process must
    see the same folder `shared`. By default that is pytest's `tmp_path`, which suits nodes on this machine.

    Example:
        @pytest.fixture(scope="module")
        def pool():
            with sky.ComputePool(Mine(), nodes=2, concurrency=2) as pool:
                yield pool

        class TestMine(EngineSuite):
            pass
    """

    @pytest.fixture
    def shared(self, tmp_path: Path) -> Path:
        """Return a folder that calls and tests see."""
        return tmp_path

    # Calls ----------------------------------------------------------------------------------------------------------

    def test_the_pool_is_large_enough_for_this_suite(self, pool: ComputePool) -> None:
        assert pool.nodes >= 2
        assert pool.concurrency >= 2
        assert pool.total_slots == pool.nodes * pool.concurrency

    def test_a_value_comes_back(self, pool: ComputePool) -> None:
        call = compute(divmod)
        assert call(7, 3) >> pool == (2, 1)
        assert (call(7, 3) > pool).result(_LIMIT_S) == (2, 1)

    def test_a_broadcast_runs_once_on_each_node_in_order(self, pool: ComputePool) -> None:
        def where() -> tuple[int, int]:
            info = instance_info()
            assert info is not None
            return info.node, info.total_nodes

        assert compute(where)() @ pool == [(node, pool.nodes) for node in range(pool.nodes)]

    def test_calls_run_at_once_on_all_slots(self, pool: ComputePool, shared: Path) -> None:
        slots = pool.total_slots

        def meet(me: int) -> int:
            appear(shared / str(me))
            for other in range(slots):
                wait_for(shared / str(other))
            return me

        assert gather(*(compute(meet)(i) for i in range(slots))) >> pool == tuple(range(slots))

    def test_more_calls_than_slots(self, pool: ComputePool) -> None:
        futures = [compute(abs)(-i) > pool for i in range(500)]
        assert [f.result(_LIMIT_S) for f in futures] == list(range(500))

    def test_large_arguments_and_results(self, pool: ComputePool) -> None:
        data = bytes(range(256)) * 20_000

        def reverse(block: bytes) -> bytes:
            return block[::-1]

        assert compute(reverse)(data) @ pool == [data[::-1]] * pool.nodes

    def test_a_function_and_its_globals_by_value(self, pool: ComputePool) -> None:
        factor = 3
        assert pool.map(lambda x: factor * x, range(5)) == [0, 3, 6, 9, 12]

    # Values that stay, and graphs -----------------------------------------------------------------------------------

    def test_a_kept_value_arrives_as_an_argument_on_every_node(self, pool: ComputePool) -> None:
        def block(size: int) -> bytes:
            return b"x" * size

        kept = compute(block)(2_000_000).keep() >> pool
        assert compute(len)(kept) @ pool == [2_000_000] * pool.nodes
        assert kept.get() == block(2_000_000)
        assert set(kept.nodes) == set(range(pool.nodes))
        kept.drop()
        assert compute(len)(pool.put(b"y" * 2_000_000, nodes=[1])) >> pool.node(0) == 2_000_000

    def test_a_call_may_write_to_a_kept_value_and_the_next_one_gets_it_unchanged(self, pool: ComputePool) -> None:
        def spoil(data: bytearray) -> tuple[int, int]:
            before = data[0], data[-1]
            data[0] = data[-1] = 7
            return before

        with pool.put(bytearray(2_000_000)) as zeros:
            assert [compute(spoil)(zeros) @ pool for _ in range(4)] == [[(0, 0)] * pool.nodes] * 4

    def test_a_done_callback_may_put_a_value_and_send_it_to_a_call(self, pool: ComputePool) -> None:
        told: list[Any] = []
        has_told = threading.Event()

        def send(_: object) -> None:
            try:
                told.append(compute(len)(pool.put(b"c" * 2_000_000)) > pool)
            except UsageError as error:
                told.append(error)
            has_told.set()

        (compute(abs)(-1) > pool).add_done_callback(send)
        assert has_told.wait(_LIMIT_S)
        assert told[0].result(_LIMIT_S) == 2_000_000

    def test_a_reference_in_a_container_brings_its_value(self, pool: ComputePool) -> None:
        def total(refs: list[Any]) -> int:
            return sum(len(ref.get()) for ref in refs)

        assert compute(total)([pool.put(b"z" * 2_000_000), pool.put("ab")]) >> pool == 2_000_002

    def test_calls_as_arguments_run_once_and_first(self, pool: ComputePool, shared: Path) -> None:
        def note(path: Path) -> bytes:
            with path.open("a") as file:
                file.write("ran\n")
            return b"x" * 2_000_000

        def size(one: bytes, more: Any) -> int:
            return len(one) + sum(map(len, more))

        call = compute(note)(shared / "lines")
        assert compute(size)(call, [call]) @ pool == [4_000_000] * pool.nodes
        assert (shared / "lines").read_text() == "ran\n"

    def test_a_failure_in_a_graph_arrives_as_itself(self, pool: ComputePool) -> None:
        def fail(value: Any) -> int:
            raise LookupError(value)

        def same(value: int) -> int:
            return value

        with pytest.raises(LookupError) as caught:
            compute(same)(compute(fail)(compute(same)(1))) >> pool
        assert any("same <- fail" in note for note in caught.value.__notes__)

    def test_a_task_keeps_puts_and_returns_values(self, pool: ComputePool) -> None:
        def block(letter: bytes) -> bytes:
            return letter * 2_000_000

        there = pool.node(1)

        def pipeline() -> list[Any]:
            kept, put = compute(block)(b"k").keep() >> there, pool.put(b"p" * 2_000_000)
            sizes = [len(ref.get()) for ref in (kept, put)]
            sizes += compute(len)(kept) @ pool
            return [sizes, kept, put, pool.put("small")]

        sizes, *refs = compute(pipeline)() >> pool.node(0)
        assert sizes == [2_000_000] * (2 + pool.nodes)
        assert [ref.get()[:1] for ref in refs] == [b"k", b"p", "s"]
        assert compute(len)(refs[0]) @ pool == [2_000_000] * pool.nodes

    def test_a_task_runs_a_graph_once_for_each_send(self, pool: ComputePool, shared: Path) -> None:
        def note(path: Path) -> bytes:
            with path.open("a") as file:
                file.write("ran\n")
            return b"x" * 2_000_000

        def size(one: bytes, more: Any) -> int:
            return len(one) + sum(map(len, more))

        lines = shared / "lines of a task"

        def outer() -> list[int]:
            call = compute(note)(lines)
            return compute(size)(call, [call]) @ pool

        assert compute(outer)() >> pool == [4_000_000] * pool.nodes
        assert lines.read_text() == "ran\n"

    # Errors ---------------------------------------------------------------------------------------------------------

    def test_the_users_exception_arrives_as_itself(self, pool: ComputePool) -> None:
        class Refused(Exception):
            def __init__(self, code: int, *, hint: str) -> None:
                super().__init__(hint)
                self.code = code

        def fail() -> None:
            raise Refused(7, hint="ask again")

        with pytest.raises(Refused, match="ask again") as caught:
            compute(fail)() >> pool
        assert caught.value.code == 7
        assert any('raise Refused(7, hint="ask again")' in note for note in caught.value.__notes__)

    def test_what_cannot_travel_is_told_in_words(self, pool: ComputePool) -> None:
        with pytest.raises(ArgumentNotPicklable, match="argument 1"):
            compute(id)(threading.Lock()) >> pool
        with pytest.raises(ResultNotPicklable, match="lock"):
            compute(threading.Lock)() >> pool

    def test_sys_exit_ends_the_call_and_not_the_pool(self, pool: ComputePool) -> None:
        def leave() -> None:
            raise SystemExit(3)

        with pytest.raises(TaskExited) as caught:
            compute(leave)() >> pool
        assert caught.value.code == 3
        assert compute(abs)(-1) >> pool == 1

    def test_one_failure_of_a_broadcast_fails_it(self, pool: ComputePool) -> None:
        def fail_on_last(last: int) -> None:
            info = instance_info()
            assert info is not None
            if info.node == last:
                raise ValueError("the last one")

        with pytest.raises(ValueError, match="the last one"):
            compute(fail_on_last)(pool.nodes - 1) @ pool

    # Streams and maps -----------------------------------------------------------------------------------------------

    def test_a_generator_streams(self, pool: ComputePool) -> None:
        def count(n: int) -> Iterator[int]:
            yield from range(n)

        assert list(compute(count)(300) >> pool) == list(range(300))

    def test_a_generator_that_is_left_early_is_closed(self, pool: ComputePool, shared: Path) -> None:
        def endless() -> Iterator[int]:
            try:
                yield from itertools.count()
            finally:
                appear(shared / "closed")

        items: Any = compute(endless)() >> pool
        assert next(items) == 0
        items.close()
        wait_for(shared / "closed")

    def test_an_iterator_streams_in(self, pool: ComputePool) -> None:
        def total(items: Iterator[int]) -> int:
            return sum(items)

        assert compute(total)(iter(range(300))) >> pool == sum(range(300))

    def test_a_map_keeps_its_order(self, pool: ComputePool) -> None:
        assert pool.map(abs, range(-2000, 0)) == list(range(2000, 0, -1))
        assert pool.map(abs, []) == []

    def test_an_error_in_a_map_is_its_own(self, pool: ComputePool) -> None:
        with pytest.raises(ZeroDivisionError):
            pool.map(lambda x: 1 / x, [1, 0, 2])
        values: list[Any] = pool.map(lambda x: 1 / x, [1, 0, 2], return_exceptions=True)
        assert [type(v) for v in values] == [float, ZeroDivisionError, float]

    # Channels -------------------------------------------------------------------------------------------------------

    def test_a_task_and_the_program_exchange_messages(self, pool: ComputePool) -> None:
        def echo() -> int:
            with channel("suite-echo") as there:
                count = 0
                for message in there:
                    there.send(message[::-1])
                    count += 1
            return count

        future = compute(echo)() > pool
        with pool.channel("suite-echo", _LIMIT_S) as here:
            for size in (0, 1, 1000, 5 << 20):
                here.send(bytes(range(256)) * (size // 256) + b"ab")
                assert here.receive(_LIMIT_S) == b"ba" + bytes(reversed(range(256))) * (size // 256)
            assert here.flush(_LIMIT_S)
        assert future.result(_LIMIT_S) == 4

    def test_each_task_has_its_own_channel_of_a_name(self, pool: ComputePool) -> None:
        def tell() -> int:
            info = instance_info()
            assert info is not None
            channel("suite-tell").send(b"node %d" % info.node)
            assert channel("suite-tell").receive(_LIMIT_S) == b"read"
            return info.node

        calls = [compute(tell)() > pool.node(node) for node in range(pool.nodes)]
        for _ in calls:
            opened = pool.channel("suite-tell", _LIMIT_S)
            assert opened.receive(_LIMIT_S) == b"node %d" % opened.node
            opened.send(b"read")
        assert [call.result(_LIMIT_S) for call in calls] == list(range(pool.nodes))

    def test_messages_of_an_ended_task_are_received_to_the_last(self, pool: ComputePool) -> None:
        def burst() -> None:
            there = channel("suite-burst")
            for number in range(1000):
                there.send(b"%d" % number)

        assert compute(burst)() >> pool is None
        assert [int(message) for message in pool.channel("suite-burst", _LIMIT_S)] == list(range(1000))

    def test_a_sender_waits_for_its_receiver(self, pool: ComputePool) -> None:
        def fill() -> int:
            there = channel("suite-fill")
            sent = 0
            try:
                while True:
                    there.send(bytes(100_000), timeout_s=0.3)
                    sent += 1
            except TimeoutError:
                there.close()
                return sent

        future = compute(fill)() > pool
        opened = pool.channel("suite-fill", _LIMIT_S)
        sent = future.result(_LIMIT_S)
        assert 1 <= sent <= 20
        assert [len(message) for message in opened] == [100_000] * sent

    # Shared state -----------------------------------------------------------------------------------------------------

    def test_all_nodes_and_the_program_count_together(self, pool: ComputePool) -> None:
        def count(times: int) -> list[int]:
            return [counter("suite-count").increment() for _ in range(times)]

        numbers = [number for part in compute(count)(50) @ pool for number in part]
        assert sorted(numbers) == list(range(1, 50 * pool.nodes + 1))
        assert pool.counter("suite-count").reset() == 50 * pool.nodes

    def test_a_lease_ends_with_its_call(self, pool: ComputePool) -> None:
        def keep() -> int:
            return lock("suite-lock").acquire(_LIMIT_S)

        fences = [compute(keep)() >> pool for _ in range(3)]
        with pool.lock("suite-lock") as fence:
            assert [*fences, fence] == sorted({*fences, fence})

    def test_a_lease_ends_with_the_process_of_its_call(self, pool: ComputePool) -> None:
        def die_with_it() -> None:
            lock("suite-dying").acquire(_LIMIT_S)
            os.kill(os.getpid(), signal.SIGKILL)

        with pytest.raises(SlotLost):
            compute(die_with_it)() >> pool
        assert pool.lock("suite-dying").acquire(_LIMIT_S) > 1
        pool.lock("suite-dying").release()

    def test_compare_and_set_has_one_winner(self, pool: ComputePool) -> None:
        def claim() -> bool:
            return counter("suite-claims").compare_and_set(0, 1)

        assert sum(compute(claim)() @ pool) == 1
        assert not pool.counter("suite-claims").compare_and_set(0, 2)

    def test_a_task_takes_what_the_program_puts(self, pool: ComputePool) -> None:
        future = compute(lambda: [queue[Any]("suite-queue").get(_LIMIT_S) for _ in range(3)])() > pool
        for value in (None, "text", bytes(300_000)):
            pool.queue("suite-queue").put(value)
        assert future.result(_LIMIT_S) == [None, "text", bytes(300_000)]

    def test_calls_on_all_nodes_meet(self, pool: ComputePool) -> None:
        parties = pool.nodes + 1
        future = compute(lambda: barrier("suite-barrier", parties).wait(_LIMIT_S))
        calls = [future() > pool.node(node) for node in range(pool.nodes)]
        places = {pool.barrier("suite-barrier", parties).wait(_LIMIT_S), *(call.result(_LIMIT_S) for call in calls)}
        assert places == set(range(parties))

    # Actors ---------------------------------------------------------------------------------------------------------

    def test_calls_of_an_actor_run_in_order_on_one_object(self, pool: ComputePool) -> None:
        with actor(_Tally)(10) >> pool as tally:
            futures = [tally.add(1) > pool for _ in range(200)]
            assert [future.result(_LIMIT_S) for future in futures] == list(range(11, 211))
            assert list(tally.count_down(3) >> pool) == [2, 1, 0]
            with pytest.raises(TypeError):
                tally.add("text") >> pool
            assert tally.add(1) >> pool == 211

    def test_an_actor_that_dies_fails_its_call_and_restarts(self, pool: ComputePool) -> None:
        tally: Any = actor(_Tally).with_options(max_restarts=1)(10) >> pool
        try:
            first, death, last = tally.add(1) > pool, tally.die() > pool, tally.add(5) > pool
            assert first.result(_LIMIT_S) == 11
            with pytest.raises(ActorLost):
                death.result(_LIMIT_S)
            assert last.result(_LIMIT_S) == 15
            with pytest.raises(ActorLost):
                tally.die() >> pool
        finally:
            tally.close()

    def test_tasks_call_an_actor_through_its_handle(self, pool: ComputePool) -> None:
        def send(tally: Any, there: Any) -> list[int]:
            futures = [tally.add(1) > there for _ in range(50)]
            return [future.result(_LIMIT_S) for future in futures]

        with actor(_Tally).with_options(name="suite-tally")(10) >> pool as tally:
            numbers = [number for part in compute(send)(tally, pool) @ pool for number in part]
            assert sorted(numbers) == list(range(11, 11 + 50 * pool.nodes))
            assert all(part == sorted(part) for part in (numbers[:50], numbers[50:100]))
            found = compute(lambda: pool.actor("suite-tally").add(0) >> pool)() >> pool
            assert found == 10 + 50 * pool.nodes
            with pytest.raises(TypeError):
                compute(lambda: tally.add("text") >> pool)() >> pool

    def test_a_task_learns_that_its_actor_died(self, pool: ComputePool) -> None:
        tally: Any = actor(_Tally)(10) >> pool
        with pytest.raises(ActorLost):
            compute(lambda: tally.die() >> pool)() >> pool
        with pytest.raises(ActorLost):
            tally.add(1) >> pool

    def test_the_calls_of_a_cancelled_task_to_an_actor_are_cancelled(self, pool: ComputePool, shared: Path) -> None:
        def ask_late(tally: Any) -> None:
            futures = [tally.wait(shared / "began", shared / "go") > pool, tally.add(100) > pool]
            futures[0].result()

        with actor(_Tally)(10) >> pool as tally:
            future = compute(ask_late)(tally) > pool
            wait_for(shared / "began")
            assert future.cancel()
            # Nobody lets the first call go on, so only its cancel ends it. The second may begin before its own comes.
            assert (tally.add(1) >> pool) in (11, 111)

    # Resources ------------------------------------------------------------------------------------------------------

    def test_a_gang_runs_on_any_two_nodes(self, pool: ComputePool) -> None:
        def where() -> int:
            info = instance_info()
            assert info is not None
            return info.node

        for nodes in (compute(where)() @ pool.any(2), compute(where).with_options(nodes=2)() >> pool):
            assert len(set(nodes)) == 2
        (of_map,) = pool.map(compute(lambda _: where()).with_options(nodes=2), [0])
        assert len(set(of_map)) == 2

    def test_booked_processors_come_back_however_a_call_ends(self, pool: ComputePool, shared: Path) -> None:
        node = pool.node(0)

        def refuse_or_run(cpus: float) -> bool:
            try:
                return compute(bool).with_options(cpus=cpus)(1) >> node
            except UsageError:
                return False

        most = next(2.0**power for power in range(12, -10, -1) if refuse_or_run(2.0**power))  # over half of the node
        held = compute(wait_for).with_options(cpus=most)(shared / "go") > node
        failing = compute(divmod).with_options(cpus=most)(1, 0) > node
        cancelled = compute(appear).with_options(cpus=most)(shared / "ran") > node
        last = compute(abs).with_options(cpus=most)(-1) > node
        assert "CPU" in failing.why_waiting
        assert "CPU" in last.why_waiting
        other, told = compute(abs)(-1) > pool.node(1), SimpleQueue[str]()
        other.add_done_callback(lambda _: told.put(last.why_waiting))
        assert "CPU" in told.get(timeout=_LIMIT_S)
        assert cancelled.cancel()
        appear(shared / "go")
        with pytest.raises(ZeroDivisionError):
            failing.result(_LIMIT_S)
        assert last.result(_LIMIT_S) == 1
        held.result(_LIMIT_S)
        assert not (shared / "ran").exists()

    def test_calls_are_sent_while_wait_decodes_an_error(
        self, pool: ComputePool, shared: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def wait_its_turn() -> None:
            wait_for(shared / "go")

        failed = compute(_fail_seen)() > pool
        concurrent.futures.wait([failed], _LIMIT_S)
        held = [compute(wait_its_turn)() > pool for _ in range(pool.total_slots)]
        queued = compute(abs).with_timeout(_LIMIT_S)(-3) > pool  # sent once a slot is free
        sent: list[bool] = []

        def until_sent() -> None:
            appear(shared / "go")
            deadline = time.monotonic() + _LIMIT_S
            while not (queued.running() or queued.done()) and time.monotonic() < deadline:
                time.sleep(0.005)
            sent.append(queued.running() or queued.done())

        monkeypatch.setattr(_SeenDecoding, "on_decoded", until_sent)
        # It holds the locks of all these futures while it reads the error.
        both: list[concurrent.futures.Future[Any]] = [failed, queued]
        concurrent.futures.wait(both, _LIMIT_S, concurrent.futures.FIRST_EXCEPTION)
        assert sent == [True]
        assert queued.result(_LIMIT_S) == 3
        assert concurrent.futures.wait(held, _LIMIT_S).not_done == set()

    # Cancelling -----------------------------------------------------------------------------------------------------

    def test_a_queued_call_that_is_cancelled_never_runs(self, pool: ComputePool, shared: Path) -> None:
        def wait_its_turn(me: int) -> None:
            appear(shared / f"began-{me}")
            wait_for(shared / "go")

        running = [compute(wait_its_turn)(i) > pool for i in range(pool.total_slots)]
        for i in range(pool.total_slots):
            wait_for(shared / f"began-{i}")
        # A call with a time limit is sent only when a slot is free. Otherwise the slot could start it over a link
        # before the cancel arrives.
        queued = compute(appear).with_timeout(_LIMIT_S)(shared / "ran") > pool
        assert queued.cancel()
        assert queued.cancelled()
        appear(shared / "go")
        concurrent.futures.wait(running, _LIMIT_S)
        assert compute(abs)(-1) @ pool == [1] * pool.nodes
        assert not (shared / "ran").exists()

    def test_threads_share_the_pool(self, pool: ComputePool) -> None:
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            sums = list(threads.map(lambda n: sum(pool.map(abs, range(-n, 0))), range(20)))
        assert sums == [n * (n + 1) // 2 for n in range(20)]

    def test_it_is_a_standard_executor(self, pool: ComputePool) -> None:
        with pool.executor() as executor:
            assert executor.submit(pow, 2, 5).result(_LIMIT_S) == 32
            assert list(executor.map(abs, [-1, -2])) == [1, 2]
        with pytest.raises(RuntimeError, match="after shutdown"):
            executor.submit(abs, 1)

    def test_a_wrong_use_is_refused_before_anything_is_sent(self, pool: ComputePool) -> None:
        with pytest.raises(UsageError):
            pool.map(abs, [1], chunk=0)
        with pytest.raises(UsageError, match="is open already"):
            pool.start()
