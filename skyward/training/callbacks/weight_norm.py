"""L2 norm of all weights together, in the logs."""

from __future__ import annotations

import math
from typing import Any

from ..agree import Alone, Ranks
from ..events import TrainerCallback
from ..parts import part_of
from .metrics import is_training_log
from .norms import can_be_measured, measure, parameters_to_measure


class WeightNormLogger(TrainerCallback):
    """Add `weight_norm`, the L2 norm of all parameters together, to each log of steps.

    Shared parameters count once. Put the callback before the ones that write logs. It costs a few kernels and one wait
    for the device, whatever the number of parameters. Rank 0 computes it alone; if parameters are sharded, or the model
    is a pipeline, all ranks compute their parts and all get the value.

    The callback warns once and turns itself off if parameters are on the meta device.

    Example:
        >>> callbacks = [WeightNormLogger(), ...]  # before JsonLogger and TBLogger
    """

    on_error = "disable"
    collective_events = frozenset({"on_train_begin", "on_log_step"})

    def __init__(self) -> None:
        self._is_off = False

    def on_train_begin(self, model: Any = None, ranks: Ranks | None = None, **kwargs: Any) -> None:
        self._is_off = not can_be_measured(model, ranks or Alone(), who="WeightNormLogger")

    def on_log_step(
        self, logs: dict[str, Any], model: Any = None, trainer: Any = None, ranks: Ranks | None = None, **kwargs: Any
    ) -> None:
        world = ranks or Alone()
        # One rank's view for all: those that hold a part must come together or not at all.
        if self._is_off or not world.share(is_training_log(logs)):
            return
        parameters = parameters_to_measure(model, trainer, world)
        norm = measure(parameters).total()
        if part_of(trainer) is not None:
            logs["weight_norm"] = math.hypot(*world.exchange(norm))
        elif parameters or world.rank == 0:
            logs["weight_norm"] = norm
