"""Resources in the options of a call: checks, and the need that the scheduler books."""

from __future__ import annotations

from typing import NoReturn

from ..accelerators import Accelerator
from ..core.bounds import is_positive
from ..errors import UsageError
from ..schedule.resources import UNIT, Need


def need_of(
    cpus: float | None, gpus: float | None, memory_gib: float | None, accelerator: str | Accelerator | None
) -> Need | None:
    """Return the need of a call with these options; None if it says no numbers.

    Raises:
        UsageError: A value is illegal, or an accelerator has an unknown name.
    """
    for field, value, unit in (("cpus", cpus, "processors"), ("memory_gib", memory_gib, "GiB")):
        if value is not None and not is_positive(value):
            _refuse(field, value, f"must be a number of {unit} > 0; set {field}=2, or None to book none")
    if gpus is not None and (not is_positive(gpus, or_zero=True) or (gpus > 1 and gpus != int(gpus))):
        _refuse("gpus", gpus, "must be 0, a share below 1, or a whole number; set gpus=1, gpus=0.25, or None")
    kind = _kind(accelerator)
    if kind is not None and gpus == 0:
        _refuse("gpus", gpus, "hides all devices, but accelerator= asks for one; leave one of them out")
    need = Need(
        cpus=max(1, round(cpus * UNIT)) if cpus else 0,
        memory_mib=max(1, round(memory_gib * 1024)) if memory_gib else 0,
        devices=(UNIT * kind.count if kind is not None else None) if gpus is None else _thousandths(gpus),
        accelerator=None if kind is None else kind.with_count(1),
    )
    return need if need.has_numbers else None


def _thousandths(gpus: float) -> int:
    # A third of a device is 333 thousandths, so that three of them fit.
    return max(1, int(gpus * UNIT + 1e-6)) if gpus else 0


def _kind(accelerator: str | Accelerator | None) -> Accelerator | None:
    if accelerator is None or isinstance(accelerator, Accelerator):
        return accelerator
    if not isinstance(accelerator, str):
        _refuse("accelerator", accelerator, 'not an accelerator; pass a name such as "A100"')
    return Accelerator.from_name(accelerator)


def check_node_count(nodes: object) -> None:
    """Raise UsageError unless this is a number of nodes, or None."""
    if nodes is not None and (isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1):
        _refuse("nodes", nodes, "must be a whole number >= 1; set nodes=2, or None for one node")


def _refuse(field: str, value: object, problem: str) -> NoReturn:
    raise UsageError(f"{field}={value!r}: {problem}", field=field, value=value)
