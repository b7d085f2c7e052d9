"""A job's call on its node: it is unpacked there, run there, and its value is packed there.

So neither the hub nor the runner ever loads what a user's pickle holds: the hub has no such right, and the runner lacks
the user's packages and may hold a provider's credentials.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import CommandFailed, ResultNotPicklable, UsageError
from ...node.slot.execute import exited
from ...values.launch import ProcessLaunch
from ...wire.failures import encode_failure, stamp_as, stamp_failure
from ...wire.payloads import pickle_whole, unpickle_whole
from ..client.trial import TrialReturn, TrialTask, run_trial
from ..model.operations import operation_named
from .command import run_command
from .left_files import naming_left_files
from .save_notes import forwarding_notes

_OURS = os.path.dirname(os.path.abspath(__file__))
NO_VARIABLES: Mapping[str, str] = {}
_LENGTH = 8


class CallFailed(Exception):
    """Carrier of the exception of a job's function, from the node to the runner, which may lack its class.

    Args:
        text: The exception in words.
        failure: The exception, as `wire.failures.encode_failure` packs it.
        may_retry: Whether the job's retries count for it; see `retry_on` of `@sky.compute`.
    """

    def __init__(self, text: str, failure: bytes, may_retry: bool = True) -> None:
        super().__init__(text, failure, may_retry)
        self.text, self.failure, self.may_retry = text, failure, may_retry

    def __str__(self) -> str:
        return self.text


def run_packed(call: bytes, env: Mapping[str, str] = NO_VARIABLES, saves: str = "") -> bytes:
    """Run a packed call with variables of its job, and return its packed value.

    `saves` is the channel for notes of its saves.

    Raises:
        CallFailed: The function raised, or its value cannot be packed.
    """
    os.environ.update(env)  # this process may have served another job before
    kinds: tuple[type[BaseException], ...] = ()
    try:
        function, args, kwargs, *rest = unpickle_whole(call)  # those that waited for an upgrade have three parts
        kinds = rest[0] if rest else ()
        with forwarding_notes(saves), naming_left_files():
            value = function.fn(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise _carried(error, kinds) from None
    try:
        return pickle_whole(value)
    except Exception as error:
        reason = f"value: cannot be packed, because {type(error).__name__}: {error}; return plain data or arrays"
        raise _carried(ResultNotPicklable(reason)) from None


def stream_packed(call: bytes, env: Mapping[str, str] = NO_VARIABLES, saves: str = "") -> Iterator[bytes]:
    """Run a packed call of a generator function with variables of its job, and yield its items, each packed.

    Raises:
        CallFailed: The function raised, or an item cannot be packed.
    """
    os.environ.update(env)
    kinds: tuple[type[BaseException], ...] = ()
    try:
        function, args, kwargs, kinds = unpickle_whole(call)
        with forwarding_notes(saves), naming_left_files():
            for number, item in enumerate(function.fn(*args, **kwargs)):
                yield _packed_item(number, item)
    except CallFailed:
        raise
    except (Exception, SystemExit) as error:
        raise _carried(error, kinds) from None


def _packed_item(number: int, item: object) -> bytes:
    try:
        return pickle_whole(item)
    except Exception as error:
        reason = f"item {number}: cannot be packed, because {type(error).__name__}: {error}; yield plain data or arrays"
        raise _carried(ResultNotPicklable(reason)) from None


def run_packed_trial(packed: tuple[bytes, Mapping[str, str], str], task: TrialTask) -> TrialReturn | None:
    """Run a trial of a sweep, whose objective is the function of a packed call.

    `packed` has the call, variables of its job, and the channel for notes of its saves.

    Raises:
        CallFailed: The function raised.
    """
    call, env, saves = packed
    os.environ.update(env)
    try:
        function, *_ = unpickle_whole(call)
        with forwarding_notes(saves):
            return run_trial(function, task)
    except (Exception, SystemExit) as error:
        raise _carried(error) from None


def run_packed_trial_alone(call: bytes, env: Mapping[str, str], task: Mapping[str, Any], saves: str = "") -> bytes:
    """Run a trial that has a job of its own, and return its packed end: plain data, because its driver reads it.

    `task` has the fields of a `TrialTask`, as JSON.

    Raises:
        CallFailed: The function raised.
    """
    os.environ.update(env)
    kinds: tuple[type[BaseException], ...] = ()
    try:
        function, _, _, kinds = unpickle_whole(call)
        steps = task.get("steps")
        with forwarding_notes(saves), naming_left_files():
            end = run_trial(function, TrialTask(**{**task, "steps": None if steps is None else tuple(steps)}))
    except (Exception, SystemExit) as error:
        raise _carried(error, kinds) from None
    if end is None:
        return pickle_whole(None)
    values = None if end.values is None else [float(value) for value in end.values]
    reports = {int(step): float(value) for step, value in end.reports.items()}
    return pickle_whole({"values": values, "reports": reports, "stopped_by": str(end.stopped_by)})


def run_packed_command(argv: Sequence[str], stop: str, env: Mapping[str, str], saves: str = "") -> bytes:
    """Run a command and return its packed status, which is 0; see `run_command`.

    Raises:
        CallFailed: It ended with another one.
    """
    os.environ.update(env)
    try:
        with forwarding_notes(saves), naming_left_files():
            return pickle_whole(run_command(argv, stop))
    except CommandFailed as error:
        raise _carried(error) from None


def run_packed_operation(name: str, params: Mapping[str, Any], env: Mapping[str, str], saves: str = "") -> bytes:
    """Run a named operation with variables of its job, and return its packed value.

    Raises:
        CallFailed: It raised, or its value cannot be packed.
    """
    os.environ.update(env)
    try:
        with forwarding_notes(saves):
            return pickle_whole(operation_named(name).run(params))
    except (Exception, SystemExit) as error:
        raise _carried(error) from None


def _carried(error: Exception | SystemExit, kinds: tuple[type[BaseException], ...] = ()) -> CallFailed:
    """Return the carrier of what a function raised. `kinds`: classes whose errors may be retried; none: all."""
    if isinstance(error, SystemExit):
        error = exited(error)
    stamp_failure(error)
    may_retry = not kinds or isinstance(error, kinds)
    carrier = CallFailed(f"{type(error).__name__}: {error}", encode_failure(error, hide=_OURS), may_retry)
    stamp_as(carrier, error)
    return carrier


def join_call(launch: bytes, call: bytes) -> bytes:
    """Put the launch of a call's processes and the packed call into one piece."""
    return len(launch).to_bytes(_LENGTH, "little") + launch + call


def split_call(content: bytes) -> tuple[ProcessLaunch, bytes]:
    """Return the launch of a call's processes, and the packed call, which stays packed.

    Raises:
        UsageError: The launch names something else than integrations of skyward.
    """
    size = int.from_bytes(content[:_LENGTH], "little")
    launch = _LaunchUnpickler(io.BytesIO(content[_LENGTH : _LENGTH + size])).load()
    if not isinstance(launch, ProcessLaunch):
        raise _wrong_launch(type(launch).__qualname__)
    return launch, content[_LENGTH + size :]


class _LaunchUnpickler(pickle.Unpickler):
    """Unpickler of a launch, which comes from a user: it makes values of skyward's integrations, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_ours = module == "skyward.values.launch" or module.startswith("skyward.integrations.")
        found = super().find_class(module, name) if is_ours and "." not in name else None
        if not isinstance(found, type) or found.__module__ != module:
            raise _wrong_launch(f"{module}.{name}")
        return found


def _wrong_launch(name: str) -> UsageError:
    return UsageError(f"integration={name!r}: is not one of skyward's; use one of skyward.integrations")
