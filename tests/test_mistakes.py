"""What people write by mistake, and what the error must tell them: one table for each place where they write it."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import skyward as sky
from skyward.errors import ArgumentNotPicklable, NotRun, ResultNotPicklable, UsageError, WrongArguments

untyped: Any = sky  # a checker finds most of these mistakes by itself


class Mistake(NamedTuple):
    """`write` is called with a pool of two nodes. Every one of `says` is in the message."""

    what: str
    write: Callable[[Any], object]
    kind: type[BaseException]
    says: tuple[str, ...]


def _area(width: Any, height: Any = 1) -> Any:
    return width * height


def plain(width: Any, height: Any = 1) -> Any:
    return width * height


@sky.compute
def passed(value: Any) -> Any:
    return value


@sky.compute
def returns_call() -> Any:
    return [area(2, 3)]


@sky.compute
def returns_generator() -> Any:
    return (item for item in "abc")


def _decorated(function: Any) -> Any:
    @functools.wraps(function)
    def with_height(width: Any) -> Any:
        return function(width, 7)

    return with_height


area: Any = sky.compute(_area)
quiet_area: Any = sky.compute(sky.silent(_area))
USES: list[tuple[str, Callable[[Any], object]]] = [
    ("`+`", lambda call: call + 1),
    ("`+`", lambda call: 1 + call),
    ("`+`", lambda call: sum([call, call])),
    ("`*`", lambda call: 2 * call),
    ("`-`", lambda call: -call),
    ("`==`", lambda call: call == 12),
    ("`==`", lambda call: call != 12),
    ("`<`", lambda call: call < 12),
    ("`<`", lambda call: min(12, call)),
    ("`[]`", lambda call: call[0]),
    ("`in`", lambda call: 1 in call),
    ("`.shape`", lambda call: call.shape),
    ("`.result`", lambda call: call.result()),
    ("`len()`", len),
    ("`iter()`", lambda call: [item for item in call]),  # noqa: C416  # as it is written
    ("`float()`", float),
    ("`int()`", int),
    ("`hash()`", lambda call: {call: 1}),
    ("`format '.2f'`", lambda call: f"{call:.2f}"),
    ("`if`", lambda call: 1 if call else 2),
    ("`with`", lambda call: call.__enter__()),
]


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(nodes=2, logs=False)


@pytest.mark.parametrize(("use", "write"), USES, ids=[use for use, _ in USES])
def test_a_call_that_has_not_run_says_so_whatever_is_done_with_it(use: str, write: Callable[[Any], object]) -> None:
    with pytest.raises(NotRun) as raised:
        write(area(3, 4))
    assert str(raised.value).startswith(f"{use}: _area(3, 4) has not run")
    assert "(_area(3, 4) >> pool)" in str(raised.value)


def test_a_call_that_is_awaited_says_what_can_be() -> None:
    async def main() -> None:
        await area(3, 4)

    with pytest.raises(NotRun, match=r"`await`: .* write: await pool\.run_async\(_area\(3, 4\)\)"):
        asyncio.run(main())


def test_calls_that_have_not_run_look_like_what_they_are() -> None:
    both = area(3, 4) & area(1)
    assert f"{area(3, height=4)}" == "<_area(3, height=4), not run: send it with `>> pool`>"
    assert repr(both) == "<(_area(3, 4) & _area(1)), 2 calls that have not run: send them with `>> pool`>"
    assert len(both) == len(list(both)) == 2
    assert repr(area(area(1), range(10**9)).as_written) == repr("_area(_area(1), range(0, 1000000000))")
    with pytest.raises(NotRun, match="`if`"):
        bool(both)
    with pytest.raises(NotRun, match="`@`"):
        _ = both @ untyped


def test_libraries_that_try_what_a_call_can_do_get_the_answer_that_they_expect() -> None:
    call = area(3, 4)
    assert not hasattr(call, "shape")
    assert call != None  # noqa: E711  # as libraries ask
    assert copy.copy(call) == copy.deepcopy(call) == call
    with pytest.raises(TypeError):
        iter(call)


SENT = [
    Mistake("a call as an argument", lambda p: passed(area(1)) >> p, ArgumentNotPicklable, ("argument 1",)),
    Mistake("in a dict in a list", lambda p: passed([{"a": (area(1),)}]) >> p, ArgumentNotPicklable, ("a list",)),
    Mistake("by name", lambda p: passed(value=area(1)) >> p, ArgumentNotPicklable, ("argument 'value'",)),
    Mistake("to all nodes", lambda p: passed(area(1)) @ p, ArgumentNotPicklable, ("argument 1",)),
    Mistake("in a map", lambda p: p.map(passed, [area(1)]), ArgumentNotPicklable, ("item between 0 and 0",)),
    Mistake("in a future", lambda p: passed(area(1)) > p, ArgumentNotPicklable, ("argument 1",)),
    Mistake("as a value", lambda p: returns_call() >> p, ResultNotPicklable, ("returned a list", ".local(...)")),
    Mistake("as a value of a map", lambda p: p.map(lambda x: area(x, 2), [1, 2]), ResultNotPicklable, (".local(...)",)),
]
"""Each says what to write instead, too."""


@pytest.mark.parametrize("mistake", SENT, ids=lambda mistake: mistake.what)
def test_a_call_cannot_travel_as_a_value(pool: sky.ComputePool, mistake: Mistake) -> None:
    _expect(pool, mistake._replace(says=(*mistake.says, "has not run", "value = _area(", " >> pool")))


def test_a_call_is_refused_by_pickle_itself() -> None:
    with pytest.raises(NotRun, match="has no value to pass on"):
        pickle.dumps({"calls": [area(1)]})


ARGUMENTS = [
    Mistake("one too few", lambda _: area(), WrongArguments, ("_area(): missing", "'width'", "_area(width, height=1)")),
    Mistake("one too many", lambda _: area(1, 2, 3), WrongArguments, ("too many positional arguments",)),
    Mistake("another name", lambda _: area(1, hieght=2), WrongArguments, ("'hieght'", "did you mean height=?")),
    Mistake("twice", lambda _: area(1, width=2), WrongArguments, ("multiple values for argument 'width'",)),
    Mistake("below our decorators", lambda _: quiet_area(), WrongArguments, ("missing", "'width'")),
    Mistake("to submit", lambda p: p.submit(plain), WrongArguments, ("plain(): missing", "'width'")),
    Mistake("a generator", lambda p: passed(x for x in "ab") >> p, ArgumentNotPicklable, ("Iterator[...]",)),
    Mistake("returned", lambda p: returns_generator() >> p, ResultNotPicklable, ("a generator", "yield")),
    Mistake("no call", lambda p: p.submit(3), UsageError, ("3 is neither a function nor a call",)),
    Mistake("a group", lambda p: p.run(area(1) & area(2)), UsageError, ("run_group()",)),
    Mistake("call and arguments", lambda p: p.run(area(1), 2), UsageError, ("its arguments are in it already",)),
]


@pytest.mark.parametrize("mistake", ARGUMENTS, ids=lambda mistake: mistake.what)
def test_wrong_arguments_are_refused_when_the_call_is_made(pool: sky.ComputePool, mistake: Mistake) -> None:
    _expect(pool, mistake)


def test_arguments_that_python_would_take_are_never_refused() -> None:
    """What a user's decorator passes on is not known, and what is not written in Python has no exact signature."""

    @sky.compute
    def anything(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs

    assert sky.compute(_decorated(_area))(3).args == (3,)
    assert quiet_area(3, height=4).kwargs == {"height": 4}
    for count in range(200):
        assert anything(*range(count), **{f"a{count}": 1}).kwargs == {f"a{count}": 1}
    for function in (min, dict, str.upper, functools.partial(_area, 3), "".join):
        assert sky.compute(function)(1, 2, 3).args == (1, 2, 3)


def test_a_target_takes_a_function_and_its_arguments_as_an_executor_does(pool: sky.ComputePool) -> None:
    assert pool.submit(plain, 3, height=4).result() == 12
    assert pool.run(plain, 3) == pool.run(area, 3) == pool.run(area(3)) == 3
    assert pool.broadcast(plain, 3, 4) == [12, 12]
    assert pool.node(1).submit(abs, -3).result() == 3
    assert asyncio.run(pool.run_async(plain, 3, height=4)) == 12

    def counted(limit: int) -> Iterator[int]:
        yield from range(limit)

    assert list(pool.run(counted, 3)) == [0, 1, 2]

    @sky.compute
    def inside(target: Any) -> list[Any]:
        return [target.run(plain, 3, height=4), target.submit(plain, 3).result(), target.broadcast(plain, 2)]

    assert inside(pool.node(1)) >> pool.node(0) == [12, 3, [2]]


def _expect(pool: sky.ComputePool, mistake: Mistake) -> None:
    with pytest.raises(mistake.kind) as raised:
        mistake.write(pool)
    for words in mistake.says:
        assert words in str(raised.value)
