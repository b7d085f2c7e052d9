"""Files of jobs: YAML with durations and sizes in words, read safely and within limits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...accelerators import Accelerator
from ...core.spellings import suggestion
from ...errors import MissingDependency, UsageError
from ..model.command_jobs import FIELDS

LARGEST = 256 * 1024
"""Bytes of a file."""
DEEPEST = 8
"""Levels of lists and objects in a file."""

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(Mi|Gi|Ti|M|G|T|MB|GB|TB|MiB|GiB|TiB)?")
_SIZES_GIB = {"": 1.0, "Mi": 2**-10, "Gi": 1.0, "Ti": 2.0**10, "M": 1e6 / 2**30, "G": 1e9 / 2**30, "T": 1e12 / 2**30}
_TYPES = {"eval": "evaluation"}


def read_job_file(path: Path) -> dict[str, Any]:
    """Read a file of YAML, without anchors, tags of its own, or code.

    Raises:
        UsageError: It cannot be read, is too large or too deep, or is not a mapping.
        MissingDependency: PyYAML is not installed.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise MissingDependency("yaml: is not installed; pip install pyyaml", name="yaml") from None

    shown = f"file={str(path)!r}"
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UsageError(f"{shown}: larger than {LARGEST} bytes; put data into files that the job reads")
        depth = 0
        for event in yaml.parse(content, Loader=yaml.SafeLoader):
            # An alias repeats what it names, and a few of them fill the memory.
            if isinstance(event, yaml.AliasEvent):
                raise UsageError(f"{shown}: has an alias, *{event.anchor}; write the values out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise UsageError(f"{shown}: deeper than {DEEPEST} levels; write plain fields")
        form = yaml.safe_load(content)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{shown}: cannot be read: {error}; check the file") from None
    if not isinstance(form, dict):
        raise UsageError(f"{shown}: is not a mapping; write fields such as command: [python, train.py]")
    return form


def job_request(form: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a form to the JSON that the hub takes: durations to seconds, sizes to GiB.

    Args:
        form: The fields of a file, as `FIELDS` names them. Durations and sizes may also have their JSON names.

    Raises:
        UsageError: A field is unknown or has an illegal value.

    Example:
        >>> job_request({"command": ["true"], "schedule": {"max_duration": "48h"}})["schedule"]
        {'max_duration_s': 172800.0}
    """
    request = _section("", form)
    for name in FIELDS:
        if name and name in request:
            request[name] = _section(name, _mapping(name, request[name]))
    command = request.get("command")
    if not command and not request.get("operation"):
        raise UsageError("command: missing; write the program and its arguments as a list", field="command")
    if command is None:
        request["params"] = dict(_mapping("params", request.get("params") or {}))
    elif isinstance(command, str) or not isinstance(command, list | tuple):
        raise UsageError(
            f"command={command!r}: not a list; no shell reads it, so write {str(command).split()!r}", field="command"
        )
    else:
        request["command"] = [_text(f"command[{index}]", part) for index, part in enumerate(command)]
    if "env" in request:
        request["env"] = {
            str(name): _text(f"env.{name}", value) for name, value in _mapping("env", request["env"]).items()
        }
    machines = request.get("resources", {})
    if kind := machines.get("gpu_type"):
        machines["gpu_type"] = Accelerator.from_name(str(kind)).name
    request["type"] = _TYPES.get(request.get("type", "other"), request.get("type", "other"))
    return request


def seconds_of(field: str, value: Any) -> float:
    """Return the seconds of a duration such as "90s", "30m", "48h" or "1h30m", or of a number of seconds.

    Raises:
        UsageError: It is none, or not above 0.

    Example:
        >>> seconds_of("max_duration", "1h30m")
        5400.0
    """
    text = f"{value}".replace(" ", "")
    parts = _DURATION.findall(text)
    is_whole = "".join(number + unit for number, unit in parts) == text
    units = [unit for _, unit in parts]
    total = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if isinstance(value, bool) or not is_whole or (len(parts) > 1 and "" in units) or not 0 < total < math.inf:
        raise UsageError(f'{field}={value!r}: not a duration; write "90s", "30m", "48h" or "7d"', field=field)
    return total


def _gib(field: str, value: Any) -> float:
    match = None if isinstance(value, bool) else _SIZE.fullmatch(f"{value}")
    if match is None:
        raise UsageError(f'{field}={value!r}: not a size; write "64Gi" or "512Mi"', field=field)
    unit = (match[2] or "").removesuffix("B")
    return float(match[1]) * _SIZES_GIB[unit]


def _cores(field: str, value: Any) -> float:
    text = f"{value}"
    try:
        cores = float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)
    except ValueError:
        cores = -1.0
    if isinstance(value, bool) or not 0 <= cores < math.inf:
        raise UsageError(f'{field}={value!r}: not a number of processors; write 16, or "500m" for a half', field=field)
    return cores


def _same(_field: str, value: Any) -> Any:
    return value


_UNITS: Mapping[tuple[str, str], tuple[str, Callable[[str, Any], Any]]] = {
    ("", "hold"): ("is_held", _same),
    ("", "notify_wait"): ("notify_wait_s", seconds_of),
    ("resources", "memory"): ("memory_gib", _gib),
    ("resources", "cpu"): ("cpu", _cores),
    ("schedule", "max_duration"): ("max_duration_s", seconds_of),
    ("schedule", "keep"): ("keep_s", seconds_of),
    ("schedule", "max_wait"): ("max_wait_s", seconds_of),
    ("schedule", "checkpoint_interval"): ("checkpoint_interval_s", seconds_of),
}
"""Section and field in words -> its name in JSON, and the function that reads it."""


def _section(section: str, form: Mapping[str, Any]) -> dict[str, Any]:
    known = {*FIELDS[section], *(name for place, name in _UNITS if place == section)}
    made: dict[str, Any] = {}
    for name, value in form.items():
        place = f"{section}.{name}" if section else str(name)
        if name not in known:
            raise UsageError(f"{place}: unknown field; {_advice(name, known)}", field=place)
        if value is not None:
            own, read = _UNITS.get((section, name), (name, _same))
            made[own] = read(place, value)
    return made


def _advice(name: Any, known: Iterable[str]) -> str:
    near = suggestion(str(name), known)
    return f"did you mean {near}?" if near else f"use one of {', '.join(sorted(known))}"


def _mapping(field: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{field}={value!r}: not a mapping; write its fields below it", field=field)
    return value


def _text(field: str, value: Any) -> str:
    """Return a value as text. YAML reads 1, 0.5 and dates as other than text, and a process gets only text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise UsageError(f"{field}={value!r}: not text; put it in quotes", field=field)
