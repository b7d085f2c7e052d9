"""`optim_args`: the further options of an optimizer as one text, as Hugging Face's Trainer reads it."""

from __future__ import annotations

import math

from ..errors import UsageError

__all__ = ["options_of"]

_FLAGS = {"nesterov", "centered"}
_TAKEN: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum", "dampening", "nesterov"),
    "adagrad": ("lr_decay", "eps"),
    "rmsprop": ("momentum", "alpha", "eps", "centered"),
}
"""Those that have an effect in Hugging Face's. It reads `weight_decay` too, but the groups of parameters have theirs
from the argument of that name. Source: transformers 5.23, trainer_optimizer.py."""


def options_of(optim: str, text: str | None, *, arguments: str) -> dict[str, float | bool]:
    """The options in `text`, "name=value, ...", that the optimizer named `optim` takes. arguments: whose they are.

    Raises: UsageError for others, and for values that are no numbers.
    """
    where = f"{arguments}.optim_args={text!r}"
    options: dict[str, float | bool] = {}
    for part in filter(None, (text or "").replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        taken = _TAKEN.get(optim, ())
        if name not in taken:
            takes = ", ".join(taken) or "none"
            raise UsageError(
                f"{where}: {name!r} is no option of optim={optim!r}, which takes {takes}; learning_rate, weight_decay "
                "and adam_* are arguments of their own"
            )
        options[name] = _flag(value, where, name) if name in _FLAGS else _number(value, where, name)
    if options.get("nesterov") and (not options.get("momentum") or options.get("dampening")):
        raise UsageError(f"{where}: nesterov needs a momentum above 0 and no dampening")
    return options


def _number(value: str, where: str, name: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise UsageError(f"{where}: {name}={value}: must be a number, at least 0")
    return number


def _flag(value: str, where: str, name: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if value.lower() not in known:
        raise UsageError(f"{where}: {name}={value}: must be one of {', '.join(known)}")
    return known[value.lower()]
