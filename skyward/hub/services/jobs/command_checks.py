"""Checks of commands and drivers of sweeps that are submitted as jobs. Texts reach programs, but no shell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ....errors import UsageError
from ...model.jobs import JobSpec
from ...model.operations import operation_named
from ...model.refusal import Reason, Refusal
from .operations import check_parameters

MOST_ARGUMENTS = 1000
MOST_BYTES = 128 * 1024
"""Bytes of the arguments and of the variables of a command. Linux takes no more than that in one of them."""
DEEPEST = 6
"""Levels of lists and objects in the image and the options of a job's pool."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def check_command(spec: JobSpec) -> None:
    """Check the parts of a spec whose form no schema describes.

    Raises:
        Refusal: One is too large, too deep, or nothing that a process can be given.
    """
    for field in ("image", "pool", "params"):
        if not _is_flat(getattr(spec, field), DEEPEST):
            raise _invalid(field, f"deeper than {DEEPEST} levels; write plain options")
    wrong = next((name for name in spec.secrets if not _VARIABLE.fullmatch(name)), None)
    if wrong is not None:
        raise _invalid("secrets", "an entry is not the name of a variable; write names, not values")
    if spec.operation:
        _check_operation(spec)
    if not spec.command:
        return
    if len(spec.command) > MOST_ARGUMENTS or not spec.command[0]:
        raise _invalid("command", f"not 1 to {MOST_ARGUMENTS} arguments after a program; put the rest into a file")
    _check_texts("command", spec.command)
    env: Any = spec.image.get("env", {})
    if not isinstance(env, Mapping):
        raise _invalid("image.env", "not an object; write names and values")
    if wrong := next((name for name in env if not _VARIABLE.fullmatch(name)), None):
        raise _invalid(f"env.{wrong[:40]}", "not the name of a variable; use letters, digits and '_'")
    _check_texts("env", env.values())


def check_driver(spec: JobSpec) -> None:
    """Check the fields of a spec that make its job the driver of a sweep whose trials are jobs.

    Raises:
        Refusal: They contradict each other, or a trial's job could not run.
    """
    if spec.trial is not None:
        raise _invalid("trial", "is set by the driver of a sweep; leave it out, and submit the sweep")
    if spec.trials is None:
        if not spec.nodes:
            raise _invalid("nodes", "0 is for the driver of a sweep whose trials are jobs; ask for 1 or more")
        return
    if spec.sweep is None or spec.nodes or spec.command or spec.operation:
        raise _invalid("trials", "needs a sweep, a call and nodes=0; send all of them, or leave trials out")
    own = JobSpec(**spec.trials)
    if own.nodes < 1 or own.command or own.operation or own.cron or own.after or own.notify:
        raise _invalid("trials", "is no request of one call; leave command, operation, cron, after and notify out")
    check_command(own)
    if own.sweep is not None or own.trials is not None or own.trial is not None:
        raise _invalid("trials", "names a sweep of its own; leave sweep, trials and trial out of it")


def _check_operation(spec: JobSpec) -> None:
    if spec.command or spec.sweep is not None or spec.on != "one":
        raise _invalid("operation", "has no command, no sweep and one node; leave the others out")
    try:
        check_parameters(operation_named(spec.operation), spec.params)
    except UsageError as error:
        raise Refusal(Reason.INVALID, str(error), field="params") from None


def _check_texts(field: str, values: Any) -> None:
    texts = list(values)
    if not all(isinstance(text, str) and "\0" not in text for text in texts):
        raise _invalid(field, "has a value that is no text, or has a NUL; write strings")
    if sum(len(text.encode(errors="replace")) for text in texts) > MOST_BYTES:
        raise _invalid(field, f"larger than {MOST_BYTES} bytes; put it into a file")


def _is_flat(value: Any, levels: int) -> bool:
    """Return whether a value has at most `levels` levels. It looks no deeper."""
    if not isinstance(value, Mapping | list | tuple):
        return True
    parts = value.values() if isinstance(value, Mapping) else value
    return levels > 0 and all(_is_flat(part, levels - 1) for part in parts)


def _invalid(field: str, problem: str) -> Refusal:
    return Refusal(Reason.INVALID, f"{field}: {problem}", field=field)
