"""Dictionaries, lists, sets and counters of the store behave as Python's own, in the one order of all requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.shared.messages import OK, REFUSED, StoreRequest, pack_message, unpack_message
from skyward.shared.store import Store
from skyward.shared.thing import ENTRY_BYTES

KEYS: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.text(max_size=2) | st.binary(max_size=2),
    lambda parts: st.tuples(parts, parts),
    max_leaves=3,
)
VALUES = st.binary(max_size=3)
INDEXES = st.integers(-4, 4)


class Client:
    """Sends requests as a task does, each of them twice, and returns their answers."""

    def __init__(self, store: Store, session: int = 1, owner: int = 1) -> None:
        self.store, self.session, self._number = store, session, 0
        store.open(session, owner)

    def ask(self, kind: str, verb: str, *arguments: Any, options: tuple[Any, ...] = (), name: str = "x") -> Any:
        status, value = self.answer(kind, verb, *arguments, options=options, name=name)
        if status == REFUSED:
            raise {"IndexError": IndexError}.get(value[0], AssertionError)(value[1])
        assert status == OK
        return value

    def answer(self, kind: str, verb: str, *arguments: Any, options: tuple[Any, ...] = (), name: str = "x") -> Any:
        self._number += 1
        message = pack_message(*StoreRequest(kind, name, verb, arguments, options).fields())
        self.store.request(self.session, self._number, unpack_message(message))
        first, self.store.answers = self.store.answers, []
        self.store.request(self.session, self._number, unpack_message(message))  # sent again: applied once
        again, self.store.answers = self.store.answers, []
        assert first == again
        (answer,) = first
        return unpack_message(pack_message(answer.status, answer.value))


def tried(action: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return action(*arguments)
    except (IndexError, KeyError) as error:
        return type(error)


DICT_STEPS = st.one_of(
    st.tuples(st.sampled_from(["set", "setdefault"]), KEYS, VALUES),
    st.tuples(st.sampled_from(["get", "pop", "delete", "contains"]), KEYS),
    st.tuples(st.sampled_from(["keys", "items", "count", "clear"])),
    st.tuples(st.just("update"), st.lists(st.tuples(KEYS, VALUES), max_size=3)),
    st.tuples(st.just("compare_and_set"), KEYS, VALUES, VALUES),
)


def compare_and_set(model: dict[Any, bytes], key: Any, expected: bytes, value: bytes) -> bool:
    is_equal = model.get(key) == expected
    if is_equal:
        model[key] = value
    return is_equal


ON_DICT: dict[str, Callable[..., Any]] = {
    "set": lambda model, key, value: model.update({key: value}),
    "get": lambda model, key: model.get(key),
    "setdefault": lambda model, key, value: model.setdefault(key, value),
    "pop": lambda model, key: model.pop(key, None),
    "delete": lambda model, key: model.pop(key, None) is not None,
    "contains": lambda model, key: key in model,
    "keys": list,
    "items": lambda model: list(model.items()),
    "count": len,
    "clear": lambda model: model.clear(),
    "update": lambda model, pairs: model.update(pairs),
    "compare_and_set": compare_and_set,
}


@settings(max_examples=60, deadline=None)
@given(st.lists(DICT_STEPS, max_size=25))
def test_a_dictionary_is_one(steps: list[tuple[Any, ...]]) -> None:
    store, model = Store(), dict[Any, bytes]()
    client = Client(store)
    for verb, *arguments in steps:
        found = client.ask("dict", verb, *arguments)
        assert (found[0] if verb == "compare_and_set" else found) == ON_DICT[verb](model, *arguments)
    assert client.ask("dict", "items") == list(model.items())
    client.ask("dict", "clear")
    assert store.is_empty
    assert store.used_bytes == 0


LIST_STEPS = st.one_of(
    st.tuples(st.just("extend"), st.lists(VALUES, max_size=3)),
    st.tuples(st.sampled_from(["insert", "set"]), INDEXES, VALUES),
    st.tuples(st.sampled_from(["get", "pop"]), INDEXES),
    st.tuples(st.just("slice"), st.none() | INDEXES, st.none() | INDEXES, st.none() | st.sampled_from([-2, -1, 1, 2])),
    st.tuples(st.sampled_from(["count", "clear"])),
)


def extend(model: list[bytes], values: list[bytes]) -> int:
    model.extend(values)
    return len(model)


ON_LIST: dict[str, Callable[..., Any]] = {
    "extend": extend,
    "insert": lambda model, index, value: model.insert(index, value),
    "set": lambda model, index, value: model.__setitem__(index, value),
    "get": lambda model, index: model[index],
    "pop": lambda model, index: model.pop(index),
    "slice": lambda model, *ends: model[slice(*ends)],
    "count": len,
    "clear": lambda model: model.clear(),
}


@settings(max_examples=60, deadline=None)
@given(st.lists(LIST_STEPS, max_size=25))
def test_a_list_is_one(steps: list[tuple[Any, ...]]) -> None:
    store, model = Store(), list[bytes]()
    client = Client(store)
    for verb, *arguments in steps:
        assert tried(client.ask, "list", verb, *arguments) == tried(ON_LIST[verb], model, *arguments)
    assert client.ask("list", "slice", None, None, None) == model
    client.ask("list", "clear")
    assert store.is_empty
    assert store.used_bytes == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["update", "discard", "contains"]), st.lists(KEYS, min_size=1, max_size=3))))
def test_a_set_is_one(steps: list[tuple[str, list[Any]]]) -> None:
    store, model = Store(), set[Any]()
    client = Client(store)
    for verb, members in steps:
        if verb == "update":
            assert client.ask("set", verb, members) == len(set(members) - model)
            model |= set(members)
        else:
            assert client.ask("set", verb, members[0]) == (members[0] in model)
            if verb == "discard":
                model.discard(members[0])
    assert set(client.ask("set", "members")) == model
    client.ask("set", "clear")
    assert store.is_empty
    assert store.used_bytes == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "swap", "compare_and_set"]), st.integers(), st.integers())))
def test_a_counter_counts(steps: list[tuple[str, int, int]]) -> None:
    client, value = Client(Store()), 0
    for verb, first, second in steps:
        if verb == "add":
            value += first
            assert client.ask("counter", verb, first) == value
        elif verb == "swap":
            assert client.ask("counter", verb, first) == value  # the reset and the value before it are one operation
            value = first
        else:
            assert client.ask("counter", verb, first, second) == (value == first)
            value = second if value == first else value
    assert client.ask("counter", "get") == value


def test_equal_keys_take_equal_memory() -> None:
    store = Store()
    client = Client(store)
    for first, second in ((1, 1.0), (True, 1), (2.0**70, 2**70), ((0.0, "a"), (False, "a")), (0.5, 0.5), (None, None)):
        client.ask("dict", "set", first, b"")
        client.ask("set", "update", [first])
        assert client.ask("dict", "delete", second)
        assert client.ask("set", "discard", second)
        assert store.used_bytes == 0


def test_a_version_never_comes_back() -> None:
    """A key that was removed and set again is another one for `change`."""
    client = Client(Store())
    client.ask("dict", "set", "k", b"1")
    _, version = client.ask("dict", "read", "k")
    client.ask("dict", "pop", "k")
    client.ask("dict", "set", "k", b"1")
    assert not client.ask("dict", "replace", "k", version, b"2")
    assert client.ask("dict", "get", "k") == b"1"


def test_memory_is_bounded_and_what_exceeds_it_changes_nothing() -> None:
    store = Store(limit_bytes=4 * ENTRY_BYTES)
    client = Client(store)
    client.ask("dict", "set", "k", b"1")
    for kind, verb, arguments, options in (
        ("dict", "set", ("k", bytes(4 * ENTRY_BYTES)), ()),
        ("dict", "update", ([("k", b"2"), ("other", bytes(4 * ENTRY_BYTES))],), ()),
        ("list", "extend", ([b"1", b"2", b"3", b"4"],), ()),
        ("set", "update", ([1, 2, 3, 4],), ()),
        ("queue", "put", (bytes(4 * ENTRY_BYTES),), (0,)),
    ):
        used = store.used_bytes
        status, (name, message) = client.answer(kind, verb, *arguments, options=options)
        assert (status, name) == (REFUSED, "UsageError")
        assert f"exceed the limit of {4 * ENTRY_BYTES} ({used} in use); remove entries" in message
        assert store.used_bytes == used
    assert client.ask("dict", "items") == [("k", b"1")]
    assert client.answer("counter", "add", 1 << 5000)[1][0] == "UsageError"


def test_a_request_that_is_no_request_is_refused_in_words() -> None:
    client = Client(Store())
    for kind, verb in (("heap", "get"), ("dict", "explode"), ("counter", "get")):
        arguments = ("unexpected",) if kind == "counter" else ()
        status, (name, message) = client.answer(kind, verb, *arguments)
        assert (status, name) == (REFUSED, "InternalError")
        assert "report this bug" in message
    assert client.store.is_empty
