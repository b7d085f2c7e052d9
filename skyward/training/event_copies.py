"""What an event gives, as it was then: for handlers that run while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NoReturn

from ..errors import UsageError

__all__ = ["LIVE", "event_as_it_is"]

LIVE = frozenset({"model", "optimizer", "lr_scheduler", "trainer", "train_dataloader", "eval_dataloader"})
"""What an event gives that training goes on changing, or that belongs to its thread."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def event_as_it_is(context: Mapping[str, Any]) -> dict[str, Any]:
    """Copies; where only the training thread may use something, what says so when it is used."""
    taken: dict[str, Any] = {}
    for name, value in context.items():
        if name in LIVE:
            taken[name] = None if value is None else _Elsewhere(name)
        elif name == "state":
            taken[name] = _state(value)
        elif name == "control":
            taken[name] = copy.copy(value)
        elif name == "ranks":
            taken[name] = value if value.world_size == 1 else _Rank(value)
        elif isinstance(value, dict | list | tuple):
            taken[name] = _copied(value)
        else:
            taken[name] = value
    return taken


def _state(state: Any) -> Any:
    """A copy. Its log history is long, and only ever the last record of it is added to."""
    if state is None:
        return None
    taken = copy.copy(state)
    for name, value in vars(taken).items():
        if name == "log_history" and value:
            setattr(taken, name, [*value[:-1], dict(value[-1])])
        elif isinstance(value, dict | list):
            setattr(taken, name, _copied(value))
    return taken


def _copied(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    if callable(getattr(value, "detach", None)) and callable(getattr(value, "clone", None)):
        return value.detach().clone()  # a tensor within a graph cannot be deep-copied
    return copy.deepcopy(value)


class _Elsewhere:
    """Stands for what only the training thread may use."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __repr__(self) -> str:
        return f"<{self._name}, which the training thread has>"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(
            f"{self._name} was used beside training, which changes it meanwhile: name {self._name} as a parameter of "
            "the handler, and it runs in place"
        )


class _Rank:
    """Who this rank is; it talks to no other from here."""

    def __init__(self, ranks: Any) -> None:
        self.rank, self.world_size, self.local_rank = ranks.rank, ranks.world_size, ranks.local_rank

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UsageError(
            f"ranks.{name} was used beside training, where other ranks do not wait for it: name the event in the "
            "callback's collective_events, and its handler runs in place"
        )
