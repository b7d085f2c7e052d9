"""Scorer of states on any worker, with models and contents that are made once and kept.

Imports no framework itself; the parts of a job do.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from ...core.by_value import loads
from ...wire.payloads import paused_collector

MAX_MODELS = 4
MAX_CONTENTS = 16
"""Limits of kept models and contents; the least recently used go first. A content in use lives as long as its job."""


class ContentsMissing(LookupError):
    """Error of a worker that lacks contents, with their digests in `.digests`; send them along."""

    def __init__(self, *digests: str) -> None:
        super().__init__(*digests)
        self.digests = digests


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Result of one job. Times are seconds since 1970, by this process's clock."""

    value: Any
    started_at: float
    loaded_at: float
    """Time at which the model had its weights."""
    finished_at: float


class _Kept:
    """A model that one evaluation at a time uses."""

    def __init__(self) -> None:
        self.is_busy = False
        self.is_made = False
        self.model: Any = None


class Worker:
    """Keep models by key and contents by digest, and score states. Thread-safe; owns no threads.

    Jobs with the same cache_key run one after another, because they share a model. Others run side by side.

    Args:
        max_models: models to keep.
        max_contents: contents to keep.
        is_guest: True in the training process; jobs then draw random numbers from generators of their own.
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
        """Return the value with this digest, unpickled once; `data` is its pickle, if it was sent along.

        Raises:
            ContentsMissing: it is not here (or no longer), and `data` is None.
        """
        with self._changed:
            if digest in self._contents:
                self._contents.move_to_end(digest)
                return self._contents[digest]
        if data is None:
            raise ContentsMissing(digest)
        with paused_collector():
            value = loads(data)
        with self._changed:
            value = self._contents.setdefault(digest, value)
            self._contents.move_to_end(digest)
            while len(self._contents) > self._max_contents:
                self._contents.popitem(last=False)
        return value

    def has(self, digest: str) -> bool:
        """Return whether `content` needs no data."""
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
        """Return `eval_fn(model, payload)` for a model with `state`; wait while another job uses the same model.

        The time of a job begins when it has its model. An exception of any of the functions is raised as it is, and
        the kept model is thrown away, because its condition is unknown.
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
        """Give up the model of a job that hangs; jobs that wait for it, and later ones, get another one."""
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
                self._changed.wait()  # until the other job ends, or `forget` gives it up
            kept.is_busy = True
            self._models.move_to_end(cache_key)
            return kept

    def _evict(self) -> None:
        idle = [key for key, kept in self._models.items() if not kept.is_busy]
        for key in idle[: max(0, len(self._models) - self._max_models)]:
            del self._models[key]
