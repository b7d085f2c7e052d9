"""Phases that all ranks pass together: each does its part and learns how the others fared; all go on, or all raise.

A rank that fails reports it in the exchange that the others are waiting in. So no rank waits for it forever, and none
believes that a phase is done which one of them could not do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ...errors import CheckpointError, CheckpointSaveFailed, SkywardError
from ..agree import Ranks

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Verdict(Generic[T]):
    """Outcome of a phase on one rank.

    Args:
        value: result of the rank's part.
        error: its error, if it is one of this library's, which can be pickled.
        text: its error as text; empty if the part succeeded.
    """

    value: T | None = None
    error: SkywardError | None = None
    text: str = ""

    @property
    def has_failed(self) -> bool:
        return bool(self.text)


def together(
    ranks: Ranks, what: str, act: Callable[[], T], *, failure: type[CheckpointError] = CheckpointSaveFailed
) -> list[T]:
    """Run `act` on every rank, and return the results by rank. Collective, even if `act` raises.

    Args:
        ranks: ranks that take part.
        what: the phase, for error messages.
        act: part of this rank.
        failure: class of the error if `act` raises one that cannot travel.

    Raises:
        SkywardError: the same on all ranks: the error of the first rank that failed, or a `failure` with its text. The
            rank itself has its own error as the cause.
        BaseException: this rank's own KeyboardInterrupt, or another error that ends a process.
    """
    own: BaseException | None = None
    verdict: Verdict[T]
    try:
        verdict = Verdict(value=act())
    except BaseException as error:
        own = error
        ours = error if isinstance(error, SkywardError) else None
        verdict = Verdict(error=ours, text=f"{type(error).__name__}: {error}")
    try:
        answers = ranks.exchange(verdict)
    except Exception as lost:
        # The exchange may have broken because of this rank's own error, which tells more.
        if own is not None:
            raise own from lost
        gone = f"{what}: a rank is gone, or did not answer in time ({lost}); read the errors of the other ranks"
        raise failure(gone, rank=-1, error=str(lost)) from lost
    failed = [(rank, answer) for rank, answer in enumerate(answers) if answer.has_failed]
    if not failed:
        return [_value(answer) for answer in answers]
    if own is not None and not isinstance(own, Exception):
        raise own
    shared = _error(what, failed, failure)
    if shared is own:
        raise shared
    raise shared from own


def _value(answer: Verdict[T]) -> T:
    value: Any = answer.value
    return value  # type: ignore[no-any-return]  # None if `act` returned None


def _error(what: str, failed: list[tuple[int, Verdict[Any]]], failure: type[CheckpointError]) -> SkywardError:
    rank, first = failed[0]
    if first.error is not None:
        return first.error
    others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
    problem = f"{what}: failed on rank {rank}{others}: {first.text}"
    return failure(f"{problem}; read its own error there", rank=rank, error=first.text)
