"""The failure of a call, as it crosses the wire and as it is raised again.

The user's exception arrives as itself: same class, arguments, attributes, cause and context. What cannot be rebuilt
(its class does not exist here, its constructor refuses, it cannot be pickled) becomes a RemoteError that says what it
was. The remote traceback and where it happened are attached as notes.
"""

from __future__ import annotations

import builtins
import io
import linecache
import pickle
import re
import time
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from .. import errors
from ..core import interrupts
from ..core.printable import printable_lines
from ..errors import RemoteError, SkywardError, TaskError

__all__ = ["EncodedFailure", "decode_failure", "encode_exception", "encode_failure", "stamp_as", "stamp_failure"]

_TEXT_LIMIT = 32 * 1024
_PICKLE_LIMIT = 128 * 1024
"""Bytes. A failure travels in one frame, and its message in its pickle and in its traceback as well."""

_stamped: tuple[BaseException, float] | None = None


@dataclass(frozen=True, kw_only=True)
class EncodedFailure:
    """What the slot knows of a failed call. `pickled` is None where the exception cannot travel."""

    type_name: str
    message: str
    traceback: str
    pickled: bytes | None
    reason: str = ""
    """Why it could not be pickled; empty otherwise."""
    is_cancelled: bool = False
    at: float = 0.0
    """Seconds since the epoch, by the node's clock: it tells which rank of a gang failed first."""
    index: int | None = None
    """For a chunk: the index of the call that failed."""

    def to_bytes(self) -> bytes:
        return pickle.dumps(self, protocol=5)


def stamp_failure(error: BaseException) -> None:
    """`error` was raised now: what is done before it is encoded, such as leaving a process group, comes later.

    The first stamp of an error holds. For processes that run one call at a time.
    """
    global _stamped
    if _stamped is None or _stamped[0] is not error:
        _stamped = (error, time.time())


def stamp_as(error: BaseException, instead_of: BaseException) -> None:
    """`error` is sent in the place of another: it was raised when that was."""
    global _stamped
    if _stamped is not None and _stamped[0] is instead_of:
        _stamped = (error, _stamped[1])


def encode_failure(
    error: BaseException, *, is_cancelled: bool = False, index: int | None = None, hide: str = ""
) -> bytes:
    """`hide`: a folder whose frames are ours, left out of the traceback's top."""
    pickled, reason = encode_exception(error)
    if pickled is not None and len(pickled) > _PICKLE_LIMIT:
        reason = f"it is too large: {len(pickled)} bytes; the limit is {_PICKLE_LIMIT}"
        pickled = None
    failure = EncodedFailure(
        type_name=_type_name(error),
        message=_shortened(_message(error)),
        traceback=_shortened(_traceback_text(error, hide)),
        pickled=pickled,
        reason=_shortened(reason),
        is_cancelled=is_cancelled,
        at=_stamped[1] if _stamped is not None and _stamped[0] is error else time.time(),
        index=index,
    )
    return failure.to_bytes()


def encode_exception(error: BaseException) -> tuple[bytes | None, str]:
    """(pickle, "") or (None, why not). What this returns has been loaded once: constructors lie."""
    try:
        sink = io.BytesIO()
        _ExceptionPickler(sink, protocol=5).dump(error)
        data = sink.getvalue()
        pickle.loads(data)
    except BaseException as why:  # a pickling or a constructor of the user's: SystemExit can come too
        return None, f"{type(why).__name__}: {_message(why)}"
    return data, ""


class _ExceptionPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """Pickles exceptions without calling their constructors on the other side, and with their causes."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException) and _has_plain_state(type(obj)):
            links = (obj.__cause__, obj.__context__, obj.__suppress_context__)
            state = {k: v for k, v in obj.__dict__.items() if k != "__notes__"}
            notes = tuple(getattr(obj, "__notes__", ()))
            return _rebuild, (type(obj),), (obj.args, state, links, notes), None, None, _restore
        return super().reducer_override(obj)


def _has_plain_state(cls: type[BaseException]) -> bool:
    """Whether args and __dict__ are all there is: no pickling of its own, no state in C."""
    if cls.__reduce__ is not BaseException.__reduce__ or cls.__reduce_ex__ is not object.__reduce_ex__:
        return False
    first_builtin = next(c for c in cls.__mro__ if getattr(builtins, c.__name__, None) is c)
    return first_builtin not in _WITH_C_STATE and not any(issubclass(cls, c) for c in _WITH_C_STATE)


_WITH_C_STATE: tuple[type[BaseException], ...] = (
    OSError,
    SyntaxError,
    UnicodeError,
    StopIteration,
    SystemExit,
    ImportError,
    AttributeError,
    NameError,
    BaseExceptionGroup,
)


def _rebuild(cls: type[BaseException]) -> BaseException:
    return cls.__new__(cls)


def _restore(error: BaseException, state: Any) -> None:
    args, attributes, (cause, context, suppress), notes = state
    error.args = args
    error.__dict__.update(attributes)
    error.__cause__, error.__context__, error.__suppress_context__ = cause, context, suppress
    for note in notes:
        error.add_note(note)


def decode_failure(
    failure: EncodedFailure, *, where: str, node: int | None, task: str, log_tail: str = ""
) -> BaseException:
    """The exception to raise here, with notes that say what happened there."""
    error: BaseException | None = None
    reason = failure.reason
    if failure.pickled is not None:
        try:
            error = pickle.loads(failure.pickled)
            if not isinstance(error, BaseException):
                error, reason = None, f"its pickle holds a {type(error).__qualname__}"
        except BaseException as why:  # the class is unknown here, its module fails to import, or calls sys.exit()
            if interrupts.is_from_handler(why):
                raise
            reason = f"{type(why).__name__}: {_message(why)}"
    if error is None:
        error = RemoteError(
            f"{failure.type_name}: {failure.message} (raised {where}; it could not be rebuilt here: {reason})",
            exception_type=failure.type_name,
            exception_message=failure.message,
        )
    if isinstance(error, TaskError):
        error.node, error.task, error.remote_traceback = node, task, failure.traceback
    remote = _with_source(failure.traceback).rstrip()
    is_ours = isinstance(error, SkywardError) and type(error).__name__ in errors.__all__
    if not is_ours or not failure.message or isinstance(error, RemoteError):
        error.add_note(f"\nRemote traceback ({where}):\n{printable_lines(remote)}")
    else:
        error.add_note(f"({where})")
    if log_tail:
        error.add_note(f"Last output of the task:\n{printable_lines(log_tail).rstrip()}")
    return error


_FRAME = re.compile(r'( *)File "(.+)", line (\d+), in ')


def _with_source(text: str) -> str:
    """The traceback with lines of files that only this process knows: the cells of a notebook."""
    lines = text.split("\n")
    shown: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        shown.append(line)
        frame = _FRAME.match(line)
        if frame is not None and not following.startswith(f"{frame[1]}  "):
            source = linecache.getline(frame[2], int(frame[3])).strip()
            shown += [f"{frame[1]}  {source}"] if source else []
    return "\n".join(shown)


def _type_name(error: BaseException) -> str:
    cls = type(error)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as why:  # a __str__ of the user's
        return f"<its __str__ raised {type(why).__name__}>"


def _shortened(text: str) -> str:
    """At most `_TEXT_LIMIT` bytes or so; of what is longer, the beginning and the end."""
    data = text.encode("utf-8", "surrogatepass")
    if len(data) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    begin, end = data[:half].decode("utf-8", "ignore"), data[-half:].decode("utf-8", "ignore")
    return f"{begin} ... [{len(data) - 2 * half} bytes left out] ... {end}"


def _traceback_text(error: BaseException, hide: str) -> str:
    frames = error.__traceback__
    while hide and frames is not None and frames.tb_frame.f_code.co_filename.startswith(hide):
        frames = frames.tb_next
    shown = frames if frames is not None else error.__traceback__
    try:
        return "".join(traceback.format_exception(type(error), error, shown))
    except BaseException as why:  # a __str__ or __repr__ of the user's
        return f"<the traceback cannot be formatted: {type(why).__name__}>"
