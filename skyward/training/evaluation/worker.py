"""What scores states, wherever it is: models and contents, each made once and kept. No framework is imported here
until a job's own parts import one.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from ...wire.payloads import paused_collector

__all__ = ["ContentsMissing", "Scored", "Worker"]

MAX_MODELS = 4
MAX_CONTENTS = 16
"""The least recently used go first. A content in use lives as long as its job."""


class ContentsMissing(LookupError):
    """The worker lacks contents: send them. `.digests` names them."""

    def __init__(self, *digests: str) -> None:
        super().__init__(*digests)
        self.digests = digests


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What came of one job. Times are seconds since 1970, by this process's clock."""

    value: Any
    started_at: float
    loaded_at: float
    """The model was there with its weights."""
    finished_at: float


class _Kept:
    """A model, which one evaluation at a time uses."""

    def __init__(self) -> None:
        self.is_busy = False
        self.is_made = False
        self.model: Any = None


class Worker:
    """Keeps models by key and contents by digest. Thread-safe; owns no threads.

    Jobs of one cache_key run one after another, as they share a model; others run side by side.

    Args:
        is_guest: training runs in this process, too: what jobs draw at random is not taken from its generators.
    """

    def __init__(
        self, *, max_models: int = MAX_MODELS, max_contents: int = MAX_CONTENTS, is_guest: bool = False
    ) -> None:
        self._max_models, self._max_contents = max_models, max_contents
        self._is_guest = is_guest
        self._contents: OrderedDict[str, Any] = OrderedDict()
        self._models: OrderedDict[str, _Kept] = OrderedDict()
        self._changed = threading.Condition()

    def content(self, digest: str, data: bytes | None = None) -> Any:
        """The value with this digest, unpickled once. data: its pickle, where it is sent along.

        Raises: ContentsMissing, without data, when it is not here (any more); what unpickling raises.
        """
        with self._changed:
            if digest in self._contents:
                self._contents.move_to_end(digest)
                return self._contents[digest]
        if data is None:
            raise ContentsMissing(digest)
        with paused_collector():
            value = pickle.loads(data)
        with self._changed:
            value = self._contents.setdefault(digest, value)
            self._contents.move_to_end(digest)
            while len(self._contents) > self._max_contents:
                self._contents.popitem(last=False)
        return value

    def has(self, digest: str) -> bool:
        """Whether `content` needs no data."""
        with self._changed:
            return digest in self._contents

    def run(
        self,
        *,
        factory: Callable[[], Any],
        load: Callable[[Any, Any], object],
        eval_fn: Callable[[Any, Any], Any],
        payload: Any,
        cache_key: str | None,
        state: Any,
    ) -> Scored:
        """`eval_fn(model, payload)`, where the model has `state`. Waits while another job uses the same model.

        The time of a job begins when it has its model. Raises: what any of the functions raises; a kept model is
        thrown away then, as nobody knows what it is like.
        """
        with self._model(cache_key) as kept, self._apart():
            started_at = time.time()
            if not kept.is_made:
                kept.model = factory()
                kept.is_made = True
            load(kept.model, state)
            loaded_at = time.time()
            value = eval_fn(kept.model, payload)
            return Scored(value=value, started_at=started_at, loaded_at=loaded_at, finished_at=time.time())

    def forget(self, cache_key: str | None) -> None:
        """Gives up the model of a job that does not come back: those that wait for it, and later ones, get another."""
        if cache_key is None:
            return
        with self._changed:
            self._models.pop(cache_key, None)
            self._changed.notify_all()

    def _apart(self) -> AbstractContextManager[object]:
        if not self._is_guest or "torch" not in sys.modules:
            return nullcontext()
        from .randomness import OwnGenerators

        return OwnGenerators()

    @contextmanager
    def _model(self, cache_key: str | None) -> Iterator[_Kept]:
        if cache_key is None:
            yield _Kept()
            return
        kept = self._acquire(cache_key)
        try:
            yield kept
        except BaseException:
            with self._changed:
                if self._models.get(cache_key) is kept:
                    del self._models[cache_key]
            raise
        finally:
            with self._changed:
                kept.is_busy = False
                self._evict()
                self._changed.notify_all()

    def _acquire(self, cache_key: str) -> _Kept:
        with self._changed:
            while (kept := self._models.setdefault(cache_key, _Kept())).is_busy:
                self._changed.wait()  # ends with the other job, or with `forget` of it
            kept.is_busy = True
            self._models.move_to_end(cache_key)
            return kept

    def _evict(self) -> None:
        idle = [key for key, kept in self._models.items() if not kept.is_busy]
        for key in idle[: max(0, len(self._models) - self._max_models)]:
            del self._models[key]
