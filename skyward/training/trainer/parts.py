"""Which parts of a checkpoint a run goes on with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ...errors import UsageError

__all__ = ["CheckpointParts"]


@dataclass(frozen=True, kw_only=True)
class CheckpointParts:
    """strict: a part that the checkpoint lacks is an error, else a warning. only, skip: keys; None: all of them."""

    strict: bool = True
    only: Collection[str] | None = None
    skip: Collection[str] = ()

    def __post_init__(self) -> None:
        for name, keys in (("only", self.only), ("skip", self.skip)):
            if isinstance(keys, str):
                raise UsageError(f"load_checkpoint: {name}={keys!r}: must be several keys; write {name}=[{keys!r}]")

    def of(self, known: Collection[str]) -> set[str]:
        """The keys among `known` that are to be loaded. Raises: UsageError for keys that are not known."""
        for name, keys in (("only", self.only or ()), ("skip", self.skip)):
            unknown = sorted(set(keys) - set(known))
            if unknown:
                raise UsageError(
                    f"load_checkpoint: {name}={sorted(keys)}: this run has no component {unknown[0]!r}; they are "
                    f"{', '.join(sorted(known))}"
                )
        return set(known if self.only is None else self.only) - set(self.skip)
