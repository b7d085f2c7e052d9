"""The user's exception arrives unchanged, or as an error that names it."""

from __future__ import annotations

import pickle
import sqlite3
import sys
import types
from typing import Any

import pytest

from skyward.errors import RemoteError, SlotLost, TaskExited
from skyward.wire.failures import decode_failure, encode_failure


class Custom(ValueError):
    """An exception whose constructor takes other arguments than it keeps."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.detail = detail


class Refuses(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


class BadText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def travelled(error: BaseException, *, log_tail: str = "") -> BaseException:
    failure = pickle.loads(encode_failure(caught(error)))
    return decode_failure(failure, where="node 1, task 'f'", node=1, task="f", log_tail=log_tail)


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a", 1),
        KeyError("k"),
        OSError(2, "No such file", "x.txt"),
        FileNotFoundError(2, "No such file", "y.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"),
        StopIteration(3),
        ZeroDivisionError(),
        ImportError("m", name="mod"),
        AttributeError("a", name="n"),
        SyntaxError("s", ("f.py", 1, 2, "text")),
        KeyboardInterrupt(),
        sqlite3.OperationalError("locked"),
        ExceptionGroup("two", [ValueError(1), KeyError(2)]),
    ],
    ids=lambda e: type(e).__name__,
)
def test_built_in_exceptions_arrive_as_themselves(error: BaseException) -> None:
    back = travelled(error)
    assert type(back) is type(error)
    assert repr(back) == repr(error)
    assert "Remote traceback (node 1, task 'f')" in notes(back)


def test_attributes_and_unusual_constructors_survive() -> None:
    back = travelled(Custom(7, detail="d"))
    assert isinstance(back, Custom)
    assert (back.code, back.detail, str(back)) == (7, "d", "code 7")


def test_causes_contexts_and_notes_come_along() -> None:
    error = ValueError("outer")
    error.add_note("mine")
    error.__cause__ = Custom(1, detail="inner")
    back = travelled(error)
    assert isinstance(back.__cause__, Custom)
    assert back.__cause__.detail == "inner"
    assert back.__notes__[0] == "mine"


def test_the_log_tail_is_a_note() -> None:
    assert "Last output of the task:\nthe last line" in notes(travelled(ValueError(), log_tail="the last line\n"))


@pytest.mark.parametrize("error", [Refuses("text"), ValueError(lambda: (yield)), ValueError(sys)])
def test_an_exception_that_cannot_be_pickled_becomes_a_remote_error_or_itself(error: BaseException) -> None:
    back = travelled(error)
    assert isinstance(back, RemoteError | type(error))
    if isinstance(back, RemoteError):
        assert type(error).__name__ in back.exception_type
        assert "Remote traceback" in notes(back)


def test_a_class_that_is_unknown_here_becomes_a_remote_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_there")
    exec("class Theirs(Exception): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_there", module)
    data = encode_failure(caught(module.Theirs("hello")))
    monkeypatch.delitem(sys.modules, "only_there")
    back = decode_failure(pickle.loads(data), where="node 1", node=1, task="f")
    assert isinstance(back, RemoteError)
    assert back.exception_type == "only_there.Theirs"
    assert back.exception_message == "hello"
    assert (back.node, back.task) == (1, "f")


def test_an_exception_whose_str_raises_does_not_hide_the_failure() -> None:
    back = travelled(BadText())
    assert "Remote traceback" in notes(back)


def test_errors_of_skyward_keep_their_fields() -> None:
    lost = travelled(SlotLost("gone", node=3, signal=9, started=True))
    assert isinstance(lost, SlotLost)
    assert (lost.node, lost.signal, lost.started) == (3, 9, True)
    exited = travelled(TaskExited("exit", code=4))
    assert isinstance(exited, TaskExited)
    assert (exited.code, exited.node, exited.task) == (4, 1, "f")
