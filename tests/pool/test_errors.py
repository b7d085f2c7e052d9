"""Errors of a failing call: the user's exception unchanged, everything else described. The pool goes on."""

from __future__ import annotations

import builtins
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import errors
from skyward.errors import (
    ArgumentNotPicklable,
    InteractiveInput,
    PayloadNotLoadable,
    RemoteError,
    ResultNotPicklable,
    SlotLost,
    TaskExited,
    TaskTimeout,
)
from tests.waiting import until


@pytest.fixture(scope="module")
def shared(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=1, concurrency=2, logs=False, cancel_grace_s=4)


@pytest.fixture
def pool(shared: sky.ComputePool) -> Iterator[sky.ComputePool]:
    """Pool whose next call must work after each test."""
    yield shared
    assert sky.compute(abs)(-5) >> shared == 5


class Refused(ValueError):
    """An exception whose constructor does not take the contents of Exception.args."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"refused with {code}")
        self.code = code
        self.hint = hint


class WithLock(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def raised_by(pool: sky.ComputePool, function: Callable[[], Any]) -> BaseException:
    future = sky.compute(function)() > pool
    error = future.exception(timeout=60)
    assert error is not None
    return error


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class TestTheUsersOwn:
    def test_an_exception_arrives_unchanged_with_attributes(self, pool: sky.ComputePool) -> None:
        def fail() -> None:
            raise Refused(7, hint="ask again")

        with pytest.raises(Refused, match="refused with 7") as caught:
            sky.compute(fail)() >> pool
        assert (caught.value.code, caught.value.hint) == (7, "ask again")

    def test_an_exception_class_of_this_function_is_the_same_class(self, pool: sky.ComputePool) -> None:
        class Local(Exception):
            pass

        def fail() -> None:
            raise Local(1)

        with pytest.raises(Local):
            sky.compute(fail)() >> pool

    def test_cause_context_and_notes_arrive(self, pool: sky.ComputePool) -> None:
        def fail() -> None:
            try:
                dict[str, int]()["missing"]
            except KeyError as error:
                outer = ValueError("outer")
                outer.add_note("look at the map")
                raise outer from error

        error = raised_by(pool, fail)
        assert type(error.__cause__) is KeyError
        assert error.__cause__.args == ("missing",)
        assert error.__notes__[0] == "look at the map"

        def fail_in_handler() -> None:
            try:
                dict[str, int]()["missing"]
            except KeyError:
                raise ValueError("while handling")  # noqa: B904

        assert type(raised_by(pool, fail_in_handler).__context__) is KeyError

    def test_built_in_exceptions_keep_their_fields(self, pool: sky.ComputePool) -> None:
        def no_file() -> None:
            open("/nowhere/at/all")  # noqa: SIM115

        def no_name() -> None:
            undefined_name  # type: ignore[name-defined]  # noqa: B018, F821

        def no_unicode() -> None:
            b"\xff".decode("ascii")

        def group() -> None:
            raise ExceptionGroup("two", [ValueError(1), KeyError("k")])

        error = raised_by(pool, no_file)
        assert isinstance(error, FileNotFoundError)
        assert (error.errno, error.filename) == (2, "/nowhere/at/all")
        assert isinstance(raised_by(pool, no_name), NameError)
        decode = raised_by(pool, no_unicode)
        assert isinstance(decode, UnicodeDecodeError)
        assert (decode.encoding, decode.start) == ("ascii", 0)
        grouped = raised_by(pool, group)
        assert isinstance(grouped, ExceptionGroup)
        assert [type(e) for e in grouped.exceptions] == [ValueError, KeyError]

    def test_the_traceback_shows_the_users_lines_and_none_of_skywards(self, pool: sky.ComputePool) -> None:
        def deeper(x: int) -> float:
            return 1 / x  # the line that fails

        def fail() -> float:
            return deeper(0)  # the line that calls it

        text = text_of(raised_by(pool, fail))
        assert "the line that fails" in text
        assert "the line that calls it" in text
        assert "node 0" in text
        assert "'fail'" in text
        remote = text[text.index("Remote traceback") :]
        assert os.path.dirname(sky.__file__) not in remote

    def test_the_last_output_is_attached(self, pool: sky.ComputePool) -> None:
        def fail() -> None:
            for i in range(50):
                print("step", i)
            raise ValueError("died")

        text = text_of(raised_by(pool, fail))
        assert "step 49" in text
        assert "step 0\n" not in text

    def test_each_call_gets_a_fresh_exception(self, pool: sky.ComputePool) -> None:
        def fail() -> None:
            raise ValueError("again")

        first, second = raised_by(pool, fail), raised_by(pool, fail)
        assert first is not second
        assert len(first.__notes__) == len(second.__notes__)

    def test_raising_it_twice_does_not_grow_its_traceback(self, pool: sky.ComputePool) -> None:
        def fail() -> None:
            raise ValueError("again")

        future = sky.compute(fail)() > pool
        for _ in range(2):
            with pytest.raises(ValueError, match="again") as caught:
                future.result(timeout=60)
            assert len(caught.value.__notes__) == 1

    def test_a_returned_exception_is_a_value(self, pool: sky.ComputePool) -> None:
        def give() -> Exception:
            return ValueError("just a value")

        value = sky.compute(give)() >> pool
        assert isinstance(value, ValueError)
        assert isinstance((sky.compute(give)() @ pool)[0], ValueError)

    def test_very_deep_recursion_is_reported(self, pool: sky.ComputePool) -> None:
        def deep(n: int) -> int:
            return deep(n + 1) + 1

        error = raised_by(pool, lambda: deep(0))
        assert isinstance(error, RecursionError)
        assert len(text_of(error)) < 20_000

    def test_a_memory_error_is_reported(self, pool: sky.ComputePool) -> None:
        assert isinstance(raised_by(pool, lambda: bytearray(1 << 60)), MemoryError)

    def test_stop_iteration_is_an_ordinary_error(self, pool: sky.ComputePool) -> None:
        assert isinstance(raised_by(pool, lambda: next(iter(()))), StopIteration)

    def test_base_exceptions_arrive_too(self, pool: sky.ComputePool) -> None:
        def fail() -> None:
            raise GeneratorExit("odd")

        assert isinstance(raised_by(pool, fail), GeneratorExit)

    def test_a_keyboard_interrupt_of_the_call_arrives(self, pool: sky.ComputePool) -> None:
        def fail() -> None:
            raise KeyboardInterrupt("mine")

        assert isinstance(raised_by(pool, fail), KeyboardInterrupt)


class TestWhatCannotTravel:
    def test_an_exception_with_a_lock_is_described(self, pool: sky.ComputePool) -> None:
        def fail() -> None:
            raise WithLock("stuck")

        error = raised_by(pool, fail)
        assert isinstance(error, RemoteError)
        assert error.exception_type.endswith("WithLock")
        assert error.exception_message == "stuck"
        assert "lock" in str(error)
        assert "raise WithLock" in text_of(error)
        assert (error.node, error.task) == (0, "fail")

    def test_an_exception_of_a_class_that_is_unknown_here_is_described(
        self, pool: sky.ComputePool, tmp_path: Path
    ) -> None:
        (tmp_path / "only_there.py").write_text("class Odd(Exception):\n    pass\n")

        def fail(folder: str) -> None:
            sys.path.insert(0, folder)
            try:
                import only_there  # type: ignore[import-not-found]
            finally:
                sys.path.remove(folder)
            raise only_there.Odd("who am I")

        error = (sky.compute(fail)(str(tmp_path)) > pool).exception(timeout=60)
        assert isinstance(error, RemoteError)
        assert error.exception_type == "only_there.Odd"
        assert "who am I" in str(error)
        assert "No module named 'only_there'" in str(error)

    def test_an_exception_whose_str_raises_is_described(self, pool: sky.ComputePool) -> None:
        def fail() -> None:
            raise Unspeakable

        error = raised_by(pool, fail)
        assert isinstance(error, Unspeakable)

    def test_an_exception_whose_pickling_is_broken_is_described(self, pool: sky.ComputePool) -> None:
        class Broken(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("I do not travel")

        def fail() -> None:
            raise Broken("hello")

        error = raised_by(pool, fail)
        assert isinstance(error, RemoteError)
        assert "I do not travel" in str(error)

    def test_a_result_that_cannot_be_pickled_is_reported(self, pool: sky.ComputePool) -> None:
        error = raised_by(pool, threading.Lock)
        assert isinstance(error, ResultNotPicklable)
        assert "the function returned a lock that cannot be pickled" in str(error)
        assert "return plain data" in str(error)

    def test_a_yielded_item_that_cannot_be_pickled_is_reported(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def locks() -> Iterator[Any]:
            yield 1
            yield threading.Lock()

        items = locks() >> pool
        assert next(items) == 1
        with pytest.raises(ResultNotPicklable, match="lock"):
            next(items)

    def test_an_argument_that_cannot_be_pickled_is_named(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def use(a: int, b: Any, c: Any = None) -> None: ...

        with pytest.raises(ArgumentNotPicklable, match=r"use\(\): argument 2 \(a lock\) cannot be sent") as caught:
            use(1, threading.Lock()) >> pool
        assert caught.value.argument == "argument 2 (a lock)"
        with pytest.raises(ArgumentNotPicklable, match=r"argument 'c' \(a lock\)"):
            use(1, 2, c=threading.Lock()) > pool  # noqa: B015
        with pytest.raises(ArgumentNotPicklable, match="argument 1"):
            sky.compute(len)(x for x in "abc") >> pool  # type: ignore[call-overload]
        with pytest.raises(ArgumentNotPicklable, match=r"argument 1 \(a Future\).*send its value: \.result\(\)"):
            sky.compute(str)(sky.compute(str)(1) > pool) >> pool

    def test_a_function_that_cannot_be_pickled_is_named(self, pool: sky.ComputePool) -> None:
        lock = threading.Lock()

        def use() -> bool:
            return lock.locked()

        with pytest.raises(
            ArgumentNotPicklable, match="the function 'use' cannot be sent: .*'lock' from outside.*make it"
        ):
            sky.compute(use)() >> pool

    def test_an_argument_that_cannot_be_unpickled_on_the_node_is_reported(self, pool: sky.ComputePool) -> None:
        error = (sky.compute(str)(OnlyHere()) > pool).exception(timeout=60)
        assert isinstance(error, PayloadNotLoadable)
        assert "an argument cannot be loaded on the node" in str(error)
        assert "only on the client" in str(error)

    def test_a_missing_module_is_reported(self, pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch) -> None:
        import types

        module = types.ModuleType("not_on_the_node")
        exec("def f():\n    return 1\n", module.__dict__)
        monkeypatch.setitem(sys.modules, "not_on_the_node", module)
        error = (sky.compute(module.f)() > pool).exception(timeout=60)
        assert isinstance(error, PayloadNotLoadable)
        assert "the module 'not_on_the_node' is not installed there; add it to Image(pip=" in str(error)


class OnlyThere:
    """Object whose unpickling raises an error everywhere except in the process that pickled it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _only_there, (os.getpid(), self.error)


def _only_there(pid: int, error: Exception) -> str:
    if os.getpid() != pid:
        raise error
    return "there"


class TestResultsThatDoNotUnpickleHere:
    @pytest.mark.parametrize(
        ("error", "remedy"),
        [
            (ValueError("not here"), "ValueError: not here; return plain data or arrays"),
            (ModuleNotFoundError("no rows", name="rows"), "install 'rows' on this machine, or return plain data"),
            (AttributeError("no Row"), "install the node's version of that module on this machine, or return plain"),
        ],
    )
    def test_a_value_and_a_future(self, pool: sky.ComputePool, error: Exception, remedy: str) -> None:
        with pytest.raises(ResultNotPicklable, match=remedy) as raised:
            sky.compute(OnlyThere)(error) >> pool
        assert type(raised.value.__cause__) is type(error)
        assert isinstance((sky.compute(OnlyThere)(error) > pool).exception(60), ResultNotPicklable)
        with pytest.raises(ResultNotPicklable, match=remedy):
            sky.compute(OnlyThere)(error) @ pool

    def test_a_yielded_item(self, pool: sky.ComputePool) -> None:
        @sky.compute
        def values() -> Iterator[Any]:
            yield 1
            yield OnlyThere(ValueError("not here"))

        items = values() >> pool
        assert next(items) == 1
        with pytest.raises(ResultNotPicklable, match="not here"):
            next(items)

    def test_a_map(self, pool: sky.ComputePool) -> None:
        with pytest.raises(ResultNotPicklable, match="not here"):
            pool.map(OnlyThere, [ValueError("not here")] * 3)

    def test_the_memory_of_this_machine_is_no_fault_of_the_value(self, pool: sky.ComputePool) -> None:
        with pytest.raises(MemoryError, match="full"):
            sky.compute(OnlyThere)(MemoryError("full")) >> pool


class OnlyHere:
    def __reduce__(self) -> Any:
        return _only_here, (os.getpid(),)


def _only_here(pid: int) -> str:
    if os.getpid() != pid:
        raise RuntimeError("only on the client")
    return "here"


class TestEndsOfTheProcess:
    @pytest.mark.parametrize("code", [0, 3, "bye", None])
    def test_sys_exit_fails_the_call(self, pool: sky.ComputePool, code: Any) -> None:
        error = raised_by(pool, lambda: sys.exit(code))
        assert isinstance(error, TaskExited)
        assert error.code == code
        assert f"called sys.exit({code!r})" in str(error)

    def test_os_exit_loses_the_slot(self, pool: sky.ComputePool) -> None:
        error = raised_by(pool, lambda: os._exit(3))
        assert isinstance(error, SlotLost)
        assert (error.exit_code, error.signal, error.node, error.started) == (3, None, 0, True)
        assert "exited with code 3 (os._exit" in str(error)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
    def test_a_signal_loses_the_slot(self, pool: sky.ComputePool, number: signal.Signals) -> None:
        error = raised_by(pool, lambda: os.kill(os.getpid(), number))
        assert isinstance(error, SlotLost)
        assert error.signal == number
        assert number.name in str(error)
        assert "'<lambda>' on node 0" in str(error)

    def test_other_calls_of_the_node_go_on(self, pool: sky.ComputePool) -> None:
        dying = [sky.compute(lambda: os._exit(1))() > pool for _ in range(3)]
        living = [sky.compute(abs)(-i) > pool for i in range(20)]
        assert [f.result(timeout=60) for f in living] == list(range(20))
        assert all(isinstance(f.exception(timeout=60), SlotLost) for f in dying)

    def test_the_error_shows_the_output_before_the_death(self, pool: sky.ComputePool) -> None:
        def die() -> None:
            print("the last words", flush=True)
            os._exit(1)

        assert "the last words" in text_of(raised_by(pool, die))


class TestTerminal:
    @pytest.mark.parametrize("ask", [lambda: input("name? "), lambda: builtins.input(), lambda: sys.stdin.readline()])  # noqa: PLW0108
    def test_input_fails(self, pool: sky.ComputePool, ask: Callable[[], Any]) -> None:
        error = raised_by(pool, ask)
        assert isinstance(error, InteractiveInput)
        assert "a task has no terminal" in str(error)

    def test_breakpoint_fails(self, pool: sky.ComputePool) -> None:
        def stop() -> None:
            breakpoint()

        with pytest.raises(InteractiveInput, match=r"debug with the function's .local"):
            sky.compute(stop)() >> pool


class TestTracebacks:
    """Tracebacks as a user reads them: their own line, then the traceback of the node."""

    @pytest.mark.parametrize("how", [">>", "@", "&", "future", "map", "imap", "stream"])
    def test_an_error_of_a_call_shows_no_frames_of_skyward(self, pool: sky.ComputePool, how: str) -> None:
        @sky.compute
        def divide(a: int, b: int) -> float:
            return a / b

        @sky.compute
        def divide_each(b: int) -> Iterator[float]:
            yield 1 / b

        ways: dict[str, Callable[[], object]] = {
            ">>": lambda: divide(1, 0) >> pool,
            "@": lambda: divide(1, 0) @ pool,
            "&": lambda: (divide(1, 0) & divide(1, 1)) >> pool,
            "future": lambda: (divide(1, 0) > pool).result(),  # noqa: PLW0108  # as a user writes it
            "map": lambda: pool.map(divide, [1, 2], [0, 1]),
            "imap": lambda: list(pool.imap(divide, [1, 2], [0, 1])),
            "stream": lambda: list(divide_each(0) >> pool),
        }
        with pytest.raises(ZeroDivisionError) as caught:
            ways[how]()
        files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
        assert files == {__file__}
        assert any("in divide" in note for note in caught.value.__notes__)

    def test_an_error_of_an_iterator_that_is_an_argument_shows_where_it_was_raised(self, pool: sky.ComputePool) -> None:
        def broken() -> Iterator[int]:
            yield 1
            raise KeyError("a line of the user's")

        with pytest.raises(KeyError) as caught:
            pool.map(abs, broken())
        assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "broken"


class TestTimeouts:
    @pytest.fixture(autouse=True)
    def _warm(self, pool: sky.ComputePool) -> None:
        """Make a first call, because a slot's first call spends its time on imports when the machine is busy."""
        assert sky.compute(abs)(-1) @ pool

    def test_a_call_that_takes_too_long_is_stopped(self, pool: sky.ComputePool, tmp_path: Path) -> None:
        def forever() -> None:
            try:
                threading.Event().wait()
            finally:
                (tmp_path / "stopped").touch()

        with pytest.raises(TaskTimeout, match=r"'forever': ran longer than its timeout_s=2 and was") as caught:
            sky.compute(timeout_s=2)(forever)() >> pool
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.timeout_s == 2
        assert sky.compute(abs)(-1) >> pool == 1
        until((tmp_path / "stopped").exists)

    def test_a_call_that_times_out_shows_its_position_and_its_output(self, pool: sky.ComputePool) -> None:
        def wait_for_the_lock() -> None:
            print("asking for the lock")
            threading.Lock().acquire(timeout=60) and threading.Event().wait(60)

        with pytest.raises(TaskTimeout) as caught:
            sky.compute(timeout_s=2)(wait_for_the_lock)() >> pool
        stack, output = caught.value.__notes__
        assert "in wait_for_the_lock\n    threading.Lock().acquire" in stack
        assert "/skyward/" not in stack
        assert output == "Last output of the task:\nasking for the lock"

    def test_a_call_that_is_stuck_in_c_shows_its_position(self, pool: sky.ComputePool) -> None:
        def compute_for_ever() -> int:
            return sum(range(10**12))  # no signal handler of Python's runs meanwhile

        with pytest.raises(TaskTimeout) as caught:
            sky.compute(timeout_s=2)(compute_for_ever)() >> pool
        (stack,) = caught.value.__notes__
        assert "return sum(range(10**12))" in stack

    def test_time_in_the_queue_does_not_count(self, sky_pools: Callable[..., sky.ComputePool], tmp_path: Path) -> None:
        pool = sky_pools(nodes=1, concurrency=1, logs=False)
        for i in range(30):  # short calls: the pool sends some in advance now
            assert sky.compute(abs)(-i) >> pool == i
        nap = sky.compute(until)((tmp_path / "go").exists) > pool
        quick = [sky.compute(timeout_s=2)(abs)(-i) > pool for i in range(20)]
        time.sleep(2.1)  # longer than their limit, and none has begun
        assert not any(f.done() for f in quick)
        (tmp_path / "go").touch()
        assert [f.result(timeout=60) for f in quick] == list(range(20))
        assert nap.result() is None

    def test_a_timeout_of_a_year_works(self, pool: sky.ComputePool) -> None:
        assert sky.compute(timeout_s=365 * 86400)(abs)(-1) >> pool == 1


class TestTheTree:
    @pytest.mark.parametrize("name", errors.__all__)
    def test_every_error_can_be_pickled_with_its_fields(self, name: str) -> None:
        error = getattr(errors, name)("what happened", node=3, extra="field")
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == "what happened"
        assert (copy.node, copy.extra) == (3, "field")

    def test_an_error_of_skyward_raised_by_a_task_arrives_unchanged(self, pool: sky.ComputePool) -> None:
        def fail() -> None:
            raise errors.NoCapacity("none left", tried=("here",))

        with pytest.raises(errors.NoCapacity, match="none left") as caught:
            sky.compute(fail)() >> pool
        assert caught.value.tried == ("here",)
