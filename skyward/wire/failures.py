"""Failures of calls: how they cross the wire and how they are raised again.

The user's exception arrives as itself: same class, arguments, attributes, cause and context. An exception that cannot
be rebuilt becomes a RemoteError that describes it. Reasons are a class that does not exist here, a constructor that
refuses, or a failed pickling. Notes carry the remote traceback and the place of the failure.
"""

from __future__ import annotations

import builtins
import errno
import io
import linecache
import pickle
import re
import sys
import time
import traceback
from typing import Any

from .. import errors
from ..core import interrupts
from ..core.by_value import loads
from ..core.classes import class_path
from ..core.printable import printable_lines
from ..core.records import dataclass
from ..errors import RemoteError, ResultNotPicklable, SkywardError, TaskError
from .payloads import ByValuePickler

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
_TEXT_LIMIT = 32 * 1024
_PICKLE_LIMIT = 128 * 1024
"""Bytes. A failure travels in one frame, and holds its message up to three times: alone, pickled, in the traceback."""

_stamped: tuple[BaseException, float] | None = None


@dataclass(frozen=True, kw_only=True)
class EncodedFailure:
    """Failed call as the slot reports it. `pickled` is None if the exception cannot travel."""

    type_name: str
    message: str
    traceback: str
    pickled: bytes | None
    reason: str = ""
    """Reason why the exception could not be pickled; empty otherwise."""
    is_cancelled: bool = False
    at: float = 0.0
    """Time of the failure in seconds since the epoch, by the node's clock. Shows which rank of a gang failed first."""
    index: int | None = None
    """Index of the failed call within its map, for a chunk."""
    classes: tuple[str, ...] = ()
    """Full names of its class and its bases, for those who cannot unpickle it; empty from an older node."""

    def to_bytes(self) -> bytes:
        return pickle.dumps(self, protocol=5)


def is_fault_of_value(error: BaseException) -> bool:
    """Return whether the unpickling of a value failed by what the value is, and not by what this machine lacks."""
    if isinstance(error, OSError):
        return error.errno not in _SHORTAGES
    return not isinstance(error, MemoryError | SkywardError)


def explain_result_error(error: BaseException) -> ResultNotPicklable:
    """Explain why a value that arrived cannot be unpickled here, and what to do."""
    remedy = "return plain data or arrays"
    if isinstance(error, ModuleNotFoundError):
        remedy = f"install {error.name!r} on this machine, or {remedy}"
    elif isinstance(error, AttributeError):
        remedy = f"install the node's version of that module on this machine, or {remedy}"
    return ResultNotPicklable(
        f"value: cannot be loaded here, because its unpickling raised {type(error).__name__}: {error}; {remedy}"
    )


def stamp_failure(error: BaseException) -> None:
    """Record now as the time at which `error` was raised.

    Cleaning up, such as leaving a process group, can take seconds before the error is encoded, and would hide which
    rank failed first. Only the first stamp of an error counts. For processes that run one call at a time.
    """
    global _stamped
    if _stamped is None or _stamped[0] is not error:
        _stamped = (error, time.time())


def stamp_as(error: BaseException, instead_of: BaseException) -> None:
    """Give `error` the time of the exception that it replaces."""
    global _stamped
    if _stamped is not None and _stamped[0] is instead_of:
        _stamped = (error, _stamped[1])


def encode_failure(
    error: BaseException, *, is_cancelled: bool = False, index: int | None = None, hide: str = ""
) -> bytes:
    """Encode `error` for the wire.

    Args:
        error: The exception of the call.
        is_cancelled: Whether the call ended because it was cancelled.
        index: Index of the failed call within its map, for a chunk.
        hide: Folder of our own code, whose frames are left out at the top of the traceback.
    """
    pickled, reason = encode_exception(error)
    if pickled is not None and len(pickled) > _PICKLE_LIMIT:
        reason = f"its pickle of {len(pickled)} bytes exceeds the limit of {_PICKLE_LIMIT}"
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
        classes=tuple(map(class_path, type(error).__mro__)),
    )
    return failure.to_bytes()


def encode_exception(error: BaseException) -> tuple[bytes | None, str]:
    """Pickle `error`. Return the pickle and "", or None and the reason why it cannot be pickled.

    Loads the pickle once to be sure, because many exception classes pickle well and then fail in their constructor.
    """
    try:
        sink = io.BytesIO()
        _ExceptionPickler(sink, protocol=5).dump(error)
        data = sink.getvalue()
        loads(data, refills=False)
    except BaseException as why:  # runs the user's pickling and constructors, so SystemExit is possible too
        return None, f"{type(why).__name__}: {_message(why)}"
    return data, ""


class _ExceptionPickler(ByValuePickler):
    """Pickler that keeps the causes of exceptions and rebuilds them without calling their constructors."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException) and _has_plain_state(type(obj)):
            links = (obj.__cause__, obj.__context__, obj.__suppress_context__)
            state = {k: v for k, v in obj.__dict__.items() if k != "__notes__"}
            notes = tuple(getattr(obj, "__notes__", ()))
            return _rebuild, (type(obj),), (obj.args, state, links, notes), None, None, _restore
        return super().reducer_override(obj)


def _has_plain_state(cls: type[BaseException]) -> bool:
    """Return whether `args` and `__dict__` are its whole state: no pickling of its own, and no state in C."""
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
    """Build the exception to raise in this process, with notes about where and how it happened."""
    error: BaseException | None = None
    reason = failure.reason
    if failure.pickled is not None:
        try:
            error = loads(failure.pickled)
            if not isinstance(error, BaseException):
                error, reason = None, f"its pickle holds a {type(error).__qualname__}, not an exception"
        except BaseException as why:  # the class is unknown here, or its module fails to import or calls sys.exit()
            if interrupts.is_from_handler(why):  # Ctrl+C of this process is no failure to unpickle
                raise
            reason = f"{type(why).__name__}: {_message(why)}"
    if error is None:
        error = RemoteError(
            f"{failure.type_name}: {failure.message} (raised {where}; cannot be rebuilt here: {reason}); read the "
            "remote traceback below",
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


def _cell_of(file: str) -> str:
    """Return the notebook's own name of a cell, such as "Cell In[3]"; empty for other files.

    IPython keeps cells in files whose names say nothing to anyone.
    """
    module = sys.modules.get("IPython")
    get_shell = getattr(module, "get_ipython", None)
    compiler = getattr(get_shell() if get_shell is not None else None, "compile", None)
    number = getattr(compiler, "_filename_map", {}).get(file)
    return "" if number is None else f"Cell In[{number}]"


def _with_source(text: str) -> str:
    """Add source lines of files that only this process knows, such as the cells of a notebook."""
    lines = text.split("\n")
    shown: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        frame = _FRAME.match(line)
        cell = _cell_of(frame[2]) if frame is not None else ""
        shown.append(line.replace(f'File "{frame[2]}"', cell, 1) if frame is not None and cell else line)
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
    except BaseException as why:  # raised by the user's __str__
        return f"<its __str__ raised {type(why).__name__}>"


def _shortened(text: str) -> str:
    """Return the beginning and the end of a text that is longer than about `_TEXT_LIMIT` bytes."""
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
    except BaseException as why:  # raised by the user's __str__ or __repr__
        return f"<cannot format the traceback: {type(why).__name__}>"
