"""A function is pickled once until its pickle would change."""

from __future__ import annotations

import math
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

import skyward as sky
from skyward.errors import ArgumentNotPicklable
from skyward.pool.packer import FunctionTable, Packer
from skyward.wire.blobs import Blob
from skyward.wire.payloads import decode
from skyward.wire.tasks import parse

pytestmark = pytest.mark.by_reference  # importable functions of this module travel as their names


def importable(x: int) -> int:
    return x + 1


@sky.compute
def decorated(x: int) -> int:
    return x + 2


def table() -> FunctionTable:
    return FunctionTable(Blob.snapshot)


def script(code: str) -> dict[str, Any]:
    """Return the names of a script. Functions in it travel by value."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(code, namespace)
    return namespace


def loaded(functions: FunctionTable, function: Callable[..., Any]) -> Callable[..., Any]:
    payload = functions.get(function).payload
    made: Callable[..., Any] = decode(parse(payload.body), payload.blobs)
    return made


@pytest.mark.parametrize("function", [importable, decorated, math.sqrt, len])
def test_an_importable_function_travels_as_its_name(function: Callable[..., Any]) -> None:
    functions = table()
    made = functions.get(function)
    assert functions.get(function) is made
    assert len(made.payload.body) < 200
    assert loaded(functions, function) is function


def test_a_script_function_is_pickled_once() -> None:
    functions = table()
    names = script("import math\nk = 2\ndef g(x): return x * k\ndef f(x): return g(x) + math.sqrt(4)")
    made = functions.get(names["f"])
    assert functions.get(names["f"]) is made
    assert loaded(functions, names["f"])(3) == 8


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a global": ("k = 1\ndef f(): return k", lambda n: n.update(k=2)),
    "a global of the same value and another type": ("k = 1\ndef f(): return k", lambda n: n.update(k=True)),
    "a global that was not there": ("def f(): return len('ab')", lambda n: n.update(len=lambda _: 9)),
    "a global that is gone": ("len = lambda _: 9\ndef f(): return len('ab')", lambda n: n.pop("len")),
    "a global of a function that it calls": ("k = 1\ndef g(): return k\ndef f(): return g()", lambda n: n.update(k=2)),
    "a function that it calls": ("def g(): return 1\ndef f(): return g()", lambda n: exec("def g(): return 2", n)),
    "a global in a nested function": ("k = 1\ndef f(): return (lambda: k)()", lambda n: n.update(k=2)),
    "a list in place": ("k = [1]\ndef f(): return k", lambda n: n["k"].append(2)),
    "a dictionary in place": ("k = {}\ndef f(): return k", lambda n: n["k"].update(a=1)),
    "an object in place": (
        "import types\nk = types.SimpleNamespace(a=1)\ndef f(): return k.a",
        lambda n: setattr(n["k"], "a", 2),
    ),
    "a list in a tuple": ("k = ([1],)\ndef f(): return k", lambda n: n["k"][0].append(2)),
    "its code": (
        "def g(): return 5\ndef f(): return 1",
        lambda n: setattr(n["f"], "__code__", n["g"].__code__),
    ),
    "its defaults": ("def f(a=1): return a", lambda n: setattr(n["f"], "__defaults__", (2,))),
    "its keyword defaults in place": ("def f(*, a=1): return a", lambda n: n["f"].__kwdefaults__.update(a=2)),
    "its attributes": ("def f(): return f.a\nf.a = 1", lambda n: setattr(n["f"], "a", 2)),
    "an attribute that it gets later": (
        "def f(): return getattr(f, 'a', 1)",
        lambda n: setattr(n["f"], "a", 2),
    ),
    "a class of the script": (
        "class C: a = 1\ndef f(): return C.a",
        lambda n: setattr(n["C"], "a", 2),
    ),
    "a closure": (
        (
            "def make(k):\n    def f(): return k\n    def change():\n        nonlocal k; k = 2\n"
            "    return f, change\nf, change = make(1)"
        ),
        lambda n: n["change"](),
    ),
    "a function behind the decorator": (
        "import skyward as sky\nk = 1\n@sky.compute\ndef f(): return k",
        lambda n: n.update(k=2),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_noticed(what: str) -> None:
    code, change = CHANGES[what]
    names = script(code)
    functions = table()

    def called() -> Any:
        function = loaded(functions, names["f"])
        return (function.fn if isinstance(function, sky.ComputeFunction) else function)()

    def directly() -> Any:
        function = names["f"]
        return (function.fn if isinstance(function, sky.ComputeFunction) else function)()

    before = called()
    assert before == directly()
    functions.get(names["f"])
    change(names)
    after = called()
    assert after == directly()
    assert type(after) is type(directly())
    assert (before, type(before)) != (after, type(after))


def test_an_emptied_closure_is_pickled_again() -> None:
    names = script(
        "def make():\n    k = 1\n    def f(): return k\n    def empty():\n        nonlocal k\n        del k\n"
        "    return f, empty\nf, empty = make()"
    )
    functions = table()
    assert loaded(functions, names["f"])() == 1
    names["empty"]()
    with pytest.raises(NameError):
        loaded(functions, names["f"])()


def test_functions_that_call_each_other_are_pickled_once() -> None:
    functions = table()
    names = script("def odd(n): return n and even(n - 1)\ndef even(n): return not n or odd(n - 1)")
    assert functions.get(names["odd"]) is functions.get(names["odd"])
    assert loaded(functions, names["odd"])(3)


def test_a_function_that_cannot_be_pickled_raises_the_error_of_its_pickling() -> None:
    names = script("import threading\nlock = threading.Lock()\ndef f(): return lock")
    with pytest.raises(TypeError, match="cannot pickle"):
        table().get(names["f"])
    with pytest.raises((TypeError, pickle.PicklingError)):
        cloudpickle.dumps(names["f"])


def test_callables_that_are_no_functions_travel_too() -> None:
    class Adder:
        def __call__(self, x: int) -> int:
            return x + 1

    functions = table()
    assert loaded(functions, Adder())(1) == 2
    assert loaded(functions, types.MethodType(lambda me, x: me + x, 3))(4) == 7


@pytest.mark.parametrize(
    "code",
    [
        "def f(): return lock",
        "def f(): return [lock for _ in range(3)]",
        "def f(n): return f(n - 1) or lock",
        "def f(given=lock): return given",
        "def used(): return lock\ndef f(): return used()",
        "def used(): return f() or lock\ndef f(): return used()",
        "@sky.compute\ndef used(): return lock\n@sky.compute\ndef f(): return used()",
        "def make():\n    inner = lock\n    def f(): return later, inner\n    return f\n    later = 1\nf = make()",
    ],
    ids=["global", "nested code", "recursive", "default", "a function's", "a circle's", "a call's", "an empty cell"],
)
def test_a_variable_that_cannot_be_pickled_is_named(code: str) -> None:
    names = script(f"import threading\nimport skyward as sky\nlock = threading.Lock()\n{code}")
    with pytest.raises(ArgumentNotPicklable, match=r"'(lock|given|inner)' from outside, which cannot be pickled"):
        Packer().function(names["f"], "f")


def test_an_object_with_a_fault_of_its_own_is_not_explained_by_its_class() -> None:
    class Model:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self) -> None: ...

    with pytest.raises(ArgumentNotPicklable, match="It uses something from outside"):
        Packer().function(Model(), "Model")
