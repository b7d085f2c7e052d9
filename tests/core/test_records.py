"""Data classes of `core.records` are those of the standard decorator."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from skyward.core import records

Decorator = Callable[..., Any]


def made(dataclass: Decorator, **options: Any) -> tuple[type, type]:
    """Make a class and one below it."""

    class Base:
        shared: ClassVar[list[int]] = []
        a: int
        b: str = "b"
        c: list[int] = field(default_factory=list, compare=False)
        d: int = field(default=4, repr=False, init=False)

        @property
        def doubled(self) -> int:
            return 2 * self.a

    base = dataclass(**options)(Base)

    class Below(base):  # type: ignore[misc,valid-type]
        e: float = field(default=0.5, kw_only=True)

        def __post_init__(self) -> None:
            object.__setattr__(self, "d", 2 * self.a)

    return base, dataclass(**options)(Below)


OPTIONS = [
    {},
    {"frozen": True},
    {"slots": True},
    {"frozen": True, "slots": True},
    {"eq": False},
    {"repr": False},
    {"frozen": True, "kw_only": True},
    {"frozen": True, "eq": False},
]


def outcome(act: Callable[[], object]) -> object:
    """Return what an act returns, or the type and text of what it raises."""
    try:
        return act()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_they_do_what_standard_ones_do(options: dict[str, Any]) -> None:
    def seen(dataclass: Decorator) -> list[object]:
        base, below = made(dataclass, **options)
        first, same, other = (below(a=number, b="x") for number in (1, 1, 2))
        return [
            [str(inspect.signature(cls)) for cls in (base, below)],
            [f.name for f in dataclasses.fields(below)],
            getattr(below, "__match_args__"),  # noqa: B009  # no attribute of `type` for mypy
            (first == same, first == other, first == base(a=1, b="x")),
            (base(a=1) == base(a=1, c=[3]), base(a=1) == 1),
            repr(first) if options.get("repr", True) else "",
            (base.__hash__ is None, below.__hash__ is None),
            outcome(lambda: hash(first) == hash(same)),
            outcome(lambda: first == dataclasses.replace(first, a=1)),
            outcome(lambda: dataclasses.replace(first, d=1)),
            dataclasses.asdict(first),
            dataclasses.astuple(copy.deepcopy(first)),
            (first.d, first.doubled, base(a=3).d),
            outcome(lambda: setattr(first, "a", 3)),
            outcome(lambda: setattr(first, "unknown", 3)),
            outcome(lambda: delattr(first, "b")),
            outcome(below),
            outcome(lambda: below(a=1, unknown=2)),
            outcome(lambda: base(1, "b", [3], 4)),
            base(a=1).c is not base(a=1).c,
            hasattr(first, "__dict__"),
        ]

    assert seen(records.dataclass) == seen(dataclasses.dataclass)


@records.dataclass(frozen=True, slots=True)
class Sent:
    name: str
    numbers: tuple[int, ...] = ()


@records.dataclass(frozen=True)
class Known:  # noqa: PLW1641  # the decorator makes its hash
    name: str
    length: int = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Known) and other.name == self.name

    def __repr__(self) -> str:
        return f"<{self.name}>"


def test_values_with_slots_are_pickled() -> None:
    value = Sent("a", (1, 2))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(value, protocol)) == value


def test_methods_of_the_class_itself_stay() -> None:
    assert Known("a", 1) == Known("a", 2)
    assert repr(Known("a")) == "<a>"
    assert hash(Known("a", 1)) == hash(("a", 1))


def test_classes_of_users_below_a_frozen_one_may_be_standard_ones_or_none() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Standard(Known):
        more: int = 2

    class Plain(Known):
        pass

    assert dataclasses.astuple(Standard(name="a", more=3)) == ("a", 0, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Standard(name="a").more = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        dataclasses.dataclass(type("Thawed", (Known,), {}))
    plain = Plain("a")
    plain.unknown = 1  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'name'"):
        plain.name = "b"  # type: ignore[misc]


def test_class_without_documentation_has_none() -> None:
    assert Sent.__doc__ is None
