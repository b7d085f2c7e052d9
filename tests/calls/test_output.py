"""Output decorators: which ranks they mute, when, and what they leave unchanged. The slot does the muting."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Literal, assert_type

import pytest

from skyward.calls import output
from skyward.calls.compute import compute
from skyward.calls.output import Stream, install_muter, silent, stderr, stdout
from skyward.errors import UsageError
from skyward.values.topology import InstanceInfo
from tests.doctests import run_examples


def instance(node: int) -> InstanceInfo:
    return InstanceInfo(
        node=node,
        worker=0,
        total_nodes=2,
        workers_per_node=1,
        accelerators=0,
        total_accelerators=0,
        head_addr="127.0.0.1",
        head_port=0,
        job_id="test",
        part=node,
        parts=2,
    )


@dataclass
class RecordingMuter:
    """Stand-in for a slot: it knows its place and notes which streams are muted now."""

    node: int | None
    muted_now: list[Stream] = field(default_factory=list)

    def info(self) -> InstanceInfo | None:
        return None if self.node is None else instance(self.node)

    @contextmanager
    def muted(self, stream: Stream) -> Iterator[None]:
        self.muted_now.append(stream)
        try:
            yield
        finally:
            self.muted_now.remove(stream)


@contextmanager
def slot(node: int | None) -> Iterator[RecordingMuter]:
    muter = RecordingMuter(node)
    before = install_muter(muter)
    try:
        yield muter
    finally:
        assert install_muter(before) is muter
        assert muter.muted_now == []


def muted_during(
    decorate: Callable[[Callable[[], list[Stream]]], Callable[[], list[Stream]]], node: int
) -> list[Stream]:
    with slot(node) as muter:
        return decorate(lambda: list(muter.muted_now))()


def test_examples_in_docstrings_run() -> None:
    run_examples(output)


# --- muted ranks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decorate", "on_head", "elsewhere"),
    [
        (stdout, [], ["stdout"]),
        (stdout(), [], ["stdout"]),
        (stdout(only="head"), [], ["stdout"]),
        (stderr, [], ["stderr"]),
        (stderr(only="head"), [], ["stderr"]),
        (stdout(only=lambda info: info.node == 1), ["stdout"], []),
        (silent, ["stdout", "stderr"], ["stdout", "stderr"]),
        (silent(), ["stdout", "stderr"], ["stdout", "stderr"]),
    ],
)
def test_the_right_streams_are_muted(decorate: Any, on_head: list[Stream], elsewhere: list[Stream]) -> None:
    assert muted_during(decorate, node=0) == on_head
    assert muted_during(decorate, node=1) == elsewhere


def test_decorators_stack() -> None:
    assert muted_during(lambda fn: stdout(stderr(fn)), node=1) == ["stdout", "stderr"]
    assert muted_during(lambda fn: stdout(only=lambda info: True)(silent(fn)), node=1) == ["stdout", "stderr"]


def test_nothing_is_muted_outside_a_pool(capsys: pytest.CaptureFixture[str]) -> None:
    @silent
    def speak() -> int:
        print("heard")
        return 7

    assert speak() == 7
    assert capsys.readouterr().out == "heard\n"


def test_nothing_is_muted_in_a_thread_that_runs_no_call() -> None:
    with slot(None) as muter:
        assert silent(lambda: list(muter.muted_now))() == []


def test_muting_ends_when_the_function_raises() -> None:
    @silent
    def fail() -> None:
        raise KeyError("mine")

    with slot(1), pytest.raises(KeyError, match="mine"):
        fail()


def test_a_predicate_that_raises_fails_the_call() -> None:
    def predicate(info: InstanceInfo) -> bool:
        raise LookupError("predicate")

    with slot(1), pytest.raises(LookupError, match="predicate"):
        stdout(only=predicate)(lambda: 1)()


def test_the_first_stream_is_restored_if_the_second_cannot_be_muted() -> None:
    class HalfMuter(RecordingMuter):
        @contextmanager
        def muted(self, stream: Stream) -> Iterator[None]:
            if stream == "stderr":
                raise OSError("no descriptor left")
            with super().muted(stream):
                yield

    muter = HalfMuter(1)
    before = install_muter(muter)
    try:
        with pytest.raises(OSError, match="no descriptor"):
            silent(lambda: 1)()
        assert muter.muted_now == []
    finally:
        install_muter(before)


# --- generators -------------------------------------------------------------------------------------------------


def test_a_generator_is_muted_only_while_its_own_code_runs() -> None:
    with slot(1) as muter:

        @stdout
        def steps() -> Generator[list[Stream], None, list[Stream]]:
            yield list(muter.muted_now)
            yield list(muter.muted_now)
            return list(muter.muted_now)

        running = steps()
        assert next(running) == ["stdout"]
        assert muter.muted_now == []
        assert next(running) == ["stdout"]
        with pytest.raises(StopIteration) as stop:
            next(running)
        assert stop.value.value == ["stdout"]


def test_a_generator_still_takes_values_and_exceptions_and_closes() -> None:
    with slot(1) as muter:
        seen: list[object] = []

        @silent
        def steps() -> Generator[int, str, None]:
            try:
                seen.append((yield 1))
                try:
                    yield 2
                except LookupError as error:
                    seen.append(str(error))
                yield 3
            finally:
                seen.append(list(muter.muted_now))

        running = steps()
        assert next(running) == 1
        assert running.send("sent") == 2
        assert running.throw(LookupError("thrown")) == 3
        running.close()
        assert seen == ["sent", "thrown", ["stdout", "stderr"]]


def test_an_exception_of_a_generator_is_raised_unchanged() -> None:
    @silent
    def steps() -> Iterator[int]:
        yield 1
        raise KeyError("late")

    with slot(1):
        running = steps()
        assert next(running) == 1
        with pytest.raises(KeyError, match="late"):
            next(running)


# --- properties of the function that are kept --------------------------------------------------------------------


def test_name_signature_type_and_kind_survive() -> None:
    def train(epochs: int, *, lr: float = 0.1) -> str:
        """Trains."""
        return f"{epochs} {lr}"

    def steps(n: int) -> Iterator[int]:
        yield from range(n)

    decorated = stdout(only="head")(silent(train))
    assert_type(stdout(steps)(2), Iterator[int])
    assert_type(decorated(3), str)
    assert decorated(3, lr=0.5) == "3 0.5"
    assert (decorated.__name__, decorated.__doc__) == ("train", "Trains.")
    assert inspect.signature(decorated) == inspect.signature(train)
    assert inspect.isgeneratorfunction(stdout(steps))
    assert not inspect.isgeneratorfunction(decorated)


def test_integrations_see_the_function_through_decorators_in_any_order() -> None:
    def integrated(fn: Callable[[], int]) -> Callable[[], int]:
        @wraps(fn)
        def inner() -> int:
            return fn()

        inner.__skyward_integrations__ = ("torch",)  # type: ignore[attr-defined]
        return inner

    def body() -> int:
        return 1

    for decorated in (stdout(integrated(body)), integrated(stdout(body)), silent(stdout()(integrated(body)))):
        assert decorated.__skyward_integrations__ == ("torch",)  # type: ignore[attr-defined]
        assert decorated() == 1


def test_a_function_of_main_uses_the_muter_of_the_process_it_runs_in(tmp_path: Path) -> None:
    # Functions of __main__ travel by value, so no state of the client may travel along.
    (tmp_path / "client.py").write_text(
        "import sys, cloudpickle\n"
        "from skyward.calls.output import silent, stdout\n"
        "@stdout(only=lambda info: False)\n"
        "@silent\n"
        "def f(): return 1\n"
        "@silent\n"
        "def g():\n    yield 1\n"
        "sys.stdout.buffer.write(cloudpickle.dumps((f, g)))\n"
    )
    (tmp_path / "node.py").write_text(
        "import sys, pickle\n"
        "from contextlib import nullcontext\n"
        "from skyward.calls.output import install_muter\n"
        "asked = []\n"
        "class M:\n"
        "    class info: is_head = False\n"
        "    def muted(self, stream): asked.append(stream); return nullcontext()\n"
        "install_muter(M())\n"
        "f, g = pickle.load(sys.stdin.buffer)\n"
        "f()\n"
        "print(asked); asked.clear()\n"
        "list(g())\n"
        "print(asked)\n"
    )
    sent = subprocess.run([sys.executable, str(tmp_path / "client.py")], capture_output=True, check=True).stdout
    done = subprocess.run([sys.executable, str(tmp_path / "node.py")], input=sent, capture_output=True, check=True)
    assert done.stdout.decode().splitlines() == [
        "['stdout', 'stdout', 'stderr']",
        "['stdout', 'stderr', 'stdout', 'stderr']",
    ]


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("only", ["tail", None, 0, bool])
def test_only_accepts_is_head_or_a_predicate(only: Any) -> None:
    with pytest.raises(UsageError, match='pass "head" or a function'):
        stdout(only=only)


def test_objects_that_cannot_be_muted_are_refused() -> None:
    async def later() -> None: ...

    head: Literal["head"] = "head"
    with pytest.raises(UsageError, match="async"):
        silent(later)
    with pytest.raises(UsageError, match="decorates functions"):
        stdout(head)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"below @sky\.compute"):
        stdout(compute(lambda: 1))
