"""The length of all weights as one vector, in the logs."""

from __future__ import annotations

import math
from typing import Any

from ..agree import Alone, Ranks
from ..events import TrainerCallback
from ..parts import part_of
from .metrics import is_training_log
from .norms import can_be_measured, measure, parameters_to_measure

__all__ = ["WeightNormLogger"]


class WeightNormLogger(TrainerCallback):
    """Adds `weight_norm` to each log of steps: the L2 norm of all parameters together, each counted once.

    Put it in front of the callbacks that write logs. It costs a few kernels and one wait for the device, whatever the
    number of parameters. Rank 0 computes it alone. Where parameters are sharded, or the model lies on several ranks as
    stages of a pipeline, all ranks compute their parts and all have the value.
    With parameters that have no values (meta device) it warns once and adds nothing.
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
