"""The callbacks that every run has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import UsageError
from ..arguments import TrainingArguments
from ..callbacks.info import InfoCallback
from ..callbacks.metrics import DefaultMetrics
from ..callbacks.progress import ProgressCallback
from ..events import TrainerCallback

__all__ = ["with_defaults"]


def with_defaults(given: Iterable[object] | None, args: TrainingArguments) -> list[object]:
    """The user's callbacks between those that every run has; the user's own of such a class takes its place."""
    if not isinstance(given, Iterable | None):
        raise UsageError(f"Trainer: callbacks={given!r}: must be a list of callbacks")
    callbacks = list(given or ())

    def absent(kind: type[TrainerCallback], **options: Any) -> list[object]:
        is_given = any(isinstance(each, kind) or each is kind for each in callbacks)
        return [] if is_given else [kind(**options)]

    progress = {"use_tqdm": False} if args.disable_tqdm else {}
    return [
        *absent(DefaultMetrics),
        *callbacks,
        *absent(InfoCallback),
        *absent(ProgressCallback, **progress),
    ]
