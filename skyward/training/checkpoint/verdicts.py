"""Phases that all ranks pass together: each does its part, all hear how the others fared, and all go on or all raise.

A rank that fails says so in the exchange that the others are in. So nobody waits for it, and nobody believes that
something is done which one of them could not do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ...errors import CheckpointError, CheckpointSaveFailed, SkywardError
from ..agree import Ranks

__all__ = ["Verdict", "together"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Verdict(Generic[T]):
    """What one rank says at the end of a phase. failure: its error, as itself where it can travel, and as text."""

    value: T | None = None
    error: SkywardError | None = None
    text: str = ""

    @property
    def has_failed(self) -> bool:
        return bool(self.text)


def together(
    ranks: Ranks, what: str, act: Callable[[], T], *, failure: type[CheckpointError] = CheckpointSaveFailed
) -> list[T]:
    """What `act` gives on every rank, by rank. Collective, whatever happens in `act`.

    Raises: on all ranks the same, where `act` raised on any: the first such rank's error if it is one of ours, else
    `failure` with its text; on the rank itself with its own error as the cause. What ends a process
    (KeyboardInterrupt) is raised as itself where it happened.
    """
    mine: BaseException | None = None
    verdict: Verdict[T]
    try:
        verdict = Verdict(value=act())
    except BaseException as error:
        mine = error
        ours = error if isinstance(error, SkywardError) else None
        verdict = Verdict(error=ours, text=f"{type(error).__name__}: {error}")
    try:
        answers = ranks.exchange(verdict)
    except Exception as lost:
        if mine is not None:
            raise mine from lost
        raise failure(
            f"{what}: a rank went away, or did not answer in time: {lost}", rank=-1, error=str(lost)
        ) from lost
    failed = [(rank, answer) for rank, answer in enumerate(answers) if answer.has_failed]
    if not failed:
        return [_value(answer) for answer in answers]
    if mine is not None and not isinstance(mine, Exception):
        raise mine
    shared = _error(what, failed, failure)
    if shared is mine:
        raise shared
    raise shared from mine


def _value(answer: Verdict[T]) -> T:
    value: Any = answer.value
    return value  # type: ignore[no-any-return]  # None where that is what act gave


def _error(what: str, failed: list[tuple[int, Verdict[Any]]], failure: type[CheckpointError]) -> SkywardError:
    rank, first = failed[0]
    if first.error is not None:
        return first.error
    others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
    return failure(f"{what} failed on rank {rank}{others}: {first.text}", rank=rank, error=first.text)
