"""Facts about a run, written when it begins."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Mapping, Sized
from typing import Any

from ..agree import Ranks
from ..events import TrainerCallback
from ..parts import ModelPart, part_of
from .columns import format_value
from .progress import OutputStream, stream_of

_SECRETS = ("token", "password", "secret", "api_key")


class InfoCallback(TrainerCallback):
    """Write a run's facts when it begins: model, data, batch size, steps, ranks.

    Args:
        verbose: also write the arguments (secrets masked), versions, optimizer and the model's layers.
        output_stream: a text stream, "stdout" or "stderr"; None means standard output.

    Raises:
        UsageError: `output_stream` is another string.

    Example:
        >>> InfoCallback(verbose=True, output_stream="stderr").verbose
        True
    """

    runs_on = "rank_zero"
    on_error = "disable"

    def __init__(self, verbose: bool = False, *, output_stream: OutputStream | None = None) -> None:
        stream_of(output_stream)
        self.verbose, self.output_stream = verbose, output_stream

    def on_train_begin(self, args: Any, state: Any, ranks: Ranks, **context: Any) -> None:
        if not state.is_world_process_zero:
            return
        facts = facts_of_run(args, state, ranks, **context)
        if self.verbose:
            facts.update(details_of_run(args, **context))
        stream = stream_of(self.output_stream)
        stream.write(text_of(facts))
        stream.flush()


def facts_of_run(args: Any, state: Any, ranks: Ranks, **context: Any) -> dict[str, str]:
    """Return the run's main facts as text; facts that the producer does not provide are left out."""
    batch = _number(args, "per_device_train_batch_size") or _number(state, "train_batch_size")
    accumulation = _number(args, "gradient_accumulation_steps") or 1
    copies = getattr(context.get("trainer"), "data_parallel_size", ranks.world_size)
    facts: dict[str, Any] = {
        **_facts_of_model(context.get("model"), part_of(context.get("trainer"))),
        "examples": _length(getattr(context.get("train_dataloader"), "dataset", None)),
        "epochs": _epochs(args, state),
        "steps": _number(state, "max_steps"),
        "resumed at step": state.global_step or None,
        "batch of a device": batch,
        "gradient accumulation": accumulation if accumulation > 1 else None,
        "batch of a step": batch * accumulation * copies if batch else None,
        "ranks": ranks.world_size,
    }
    return {key: format_value(value) for key, value in facts.items() if value is not None}


def details_of_run(args: Any, **context: Any) -> dict[str, str]:
    """Return arguments, versions, optimizer and layers as text. Arguments that hold secrets are masked."""
    details = {**versions_of(), **{f"args.{name}": value for name, value in arguments_of(args).items()}}
    for name in ("optimizer", "lr_scheduler", "processing_class", "model"):
        if context.get(name) is not None:
            details[name] = str(context[name])
    part = part_of(context.get("trainer"))
    return details if part is None else {**details, "model": part.whole.text}


def versions_of() -> dict[str, str]:
    """Return the versions of Python and of the loaded libraries that a run may depend on."""
    names = ("torch", "transformers", "lightning", "keras", "jax", "tensorflow", "numpy", "skyward")
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in names}
    return {
        "python": platform.python_version(),
        **{name: str(value) for name, value in versions.items() if value is not None},
    }


def arguments_of(args: Any) -> dict[str, str]:
    """Return a run's arguments as text, without those that are None; secrets are masked."""
    return {name: _masked(name, value) for name, value in _vars(args)}


def text_of(facts: Mapping[str, str]) -> str:
    """Format one line per fact; a value of several lines stands below its name."""
    width = max((len(key) for key, value in facts.items() if "\n" not in value), default=0) + 1
    return "".join(
        f"{key}:\n{value}\n" if "\n" in value else f"{key + ':':<{width}} {value}\n" for key, value in facts.items()
    )


def _facts_of_model(model: Any, part: ModelPart | None) -> dict[str, Any]:
    if model is None:
        return {}
    facts: dict[str, Any] = {"model": type(model).__name__ if part is None else part.whole.name}
    if part is not None:
        total, trainable = part.whole.parameters, part.whole.trained
    elif callable(getattr(model, "parameters", None)):
        sizes = [(parameter.numel(), bool(parameter.requires_grad)) for parameter in model.parameters()]
        total = sum(size for size, _ in sizes)
        trainable = sum(size for size, is_trained in sizes if is_trained)
    elif callable(getattr(model, "count_params", None)) and getattr(model, "built", True):
        # A Keras model without an input shape has no weights before its first batch, and counting them raises.
        total, trainable = model.count_params(), _elements(model.trainable_weights)
    else:
        return facts
    facts["parameters"] = format_value(total, "si")
    if trainable != total:
        facts["trained"] = format_value(trainable, "si")
    return facts


def _epochs(args: Any, state: Any) -> Any:
    """Return the number of epochs, or None if it is unknown.

    If the arguments have a max_steps, that wins and the state knows the resulting epochs; for data without a length
    the state holds sys.maxsize.
    """
    counted = _number(state, "num_train_epochs")
    if _number(args, "max_steps") is None:
        return _number(args, "num_train_epochs") or counted
    return None if counted == sys.maxsize else counted


def _elements(weights: Iterable[Any]) -> int:
    total = 0
    for weight in weights:
        size = 1
        for length in weight.shape:
            size *= length
        total += size
    return total


def _vars(args: Any) -> list[tuple[str, Any]]:
    as_dict = getattr(args, "to_dict", None)  # Hugging Face's
    values = args if isinstance(args, Mapping) else as_dict() if callable(as_dict) else getattr(args, "__dict__", {})
    return [(key, value) for key, value in values.items() if not key.startswith("_") and value is not None]


def _masked(key: str, value: Any) -> str:
    return "***" if key.lower().endswith(_SECRETS) else str(value)


def _number(owner: Any, name: str) -> Any:
    value = getattr(owner, name, None)
    return value if isinstance(value, int | float) and value > 0 else None


def _length(dataset: Any) -> int | None:
    return len(dataset) if isinstance(dataset, Sized) else None
