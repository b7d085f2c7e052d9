"""Common part of an evaluator's jobs: how a worker makes the model, and how it scores it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UsageError
from .dispatcher import NOTHING, Content, Job, warm_up_of
from .weights import halved, loader_for

_log = logging.getLogger(__name__)

OWN_KEY = "auto"
LARGE_BYTES = 16 << 20
"""Size of a pickled function above which it has probably captured a model or its data."""


class Recipe:
    """Make the jobs of one evaluator.

    Args:
        model_factory: as in `AsyncEvaluator`.
        eval_fn: as in `AsyncEvaluator`.
        payload: as in `AsyncEvaluator`.
        load: as in `AsyncEvaluator`.
        cache_key: as in `AsyncEvaluator`.
        fp16_state_dict: as in `AsyncEvaluator`.
        timeout_s: as in `AsyncEvaluator`.
        shares_memory: the dispatcher's attribute of this name.
        argument_names: as in `AsyncEvaluator`.

    Raises:
        UsageError: a function is not callable, or `timeout_s` is out of its range.
    """

    def __init__(
        self,
        model_factory: Callable[[], Any],
        eval_fn: Callable[[Any, Any], Any],
        payload: Any,
        *,
        load: Callable[[Any, Any], object] | None,
        cache_key: str | None,
        fp16_state_dict: bool,
        timeout_s: float | None,
        shares_memory: bool,
        argument_names: Mapping[str, str],
    ) -> None:
        self.eval_fn_name = argument_names.get("eval_fn", "eval_fn")
        for field, function in (("model_factory", model_factory), (self.eval_fn_name, eval_fn)):
            if not callable(function):
                raise UsageError(f"{field}={function!r}: is not callable; pass a function")
        if timeout_s is not None and not timeout_s > 0:
            raise UsageError(f"timeout_s={timeout_s!r}: must be seconds > 0; set None for no limit")
        self._factory, self._eval_fn = Content(model_factory, "model_factory"), Content(eval_fn, self.eval_fn_name)
        self._payload = Content(payload, argument_names.get("payload", "payload"))
        self._load = None if load is None else Content(load, "load")
        self._cache_key, self._is_half, self._timeout_s = cache_key, fp16_state_dict, timeout_s
        self._shares_memory = shares_memory
        self.token = secrets.token_hex(4)
        """Random name of this evaluator, unique among all."""

    def job(self, state: Any, *, step: int, snapshot_id: str) -> Job:
        """Make a job in a background lane, because this may cast the state and pickle; raises ArgumentNotPicklable."""
        if self._is_half:
            state = halved(state)
        if self._load is None:
            self._load = Content(loader_for(state), "load")
        return self._job(self._load, state, step=step, snapshot_id=snapshot_id)

    def _job(self, load: Content, state: Any, *, step: int, snapshot_id: str) -> Job:
        return Job(
            factory=self._factory,
            load=load,
            eval_fn=self._eval_fn,
            payload=self._payload,
            cache_key=self._model_key(),
            state=state,
            step=step,
            snapshot_id=snapshot_id,
            timeout_s=self._timeout_s,
        )

    def warm_up(self) -> Job:
        """Make a job that creates everything the others need; raises ArgumentNotPicklable."""
        return warm_up_of(self._job(NOTHING, None, step=0, snapshot_id="warm-up"))

    def check_pickles(self, name: str) -> None:
        """Raise ArgumentNotPicklable now rather than in the first evaluation; warn about large functions."""
        if self._shares_memory:
            return
        for content in (self._factory, self._eval_fn, self._payload):
            size = len(content.data)
            if content is not self._payload and size > LARGE_BYTES:
                _log.warning(
                    "%s: %s has %.3g MB when pickled, so it has probably captured a model or its data; pass data as "
                    "%s, and make the model in model_factory",
                    name,
                    content.field,
                    size / 1e6,
                    self._payload.field,
                )

    def _model_key(self) -> str | None:
        if self._cache_key is None:
            return None
        if self._shares_memory:  # models stay in this process, so hashing the factory would be wasted time
            return f"{self.token}:{self._cache_key}"
        return f"{self._factory.digest}:{self.token if self._cache_key == OWN_KEY else self._cache_key}"
