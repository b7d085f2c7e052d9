"""Which checkpoint a run goes on from."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ...errors import CheckpointError
from ..agree import Ranks
from .layout import FoundCheckpoint, checkpoints_in
from .verdicts import together

__all__ = ["latest_checkpoint", "latest_of_ranks"]

_log = logging.getLogger(__name__)


def latest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The path of the checkpoint that was committed last; None where there is none.

    One whose last loss or weights were not finite is passed over, with a warning: a run that went on from it would stay
    NaN. It can still be loaded by its path.
    """
    newest = _newest(checkpoints_in(output_dir))
    return None if newest is None else newest.path


def latest_of_ranks(ranks: Ranks, output_dir: str, *, on_each_node: bool) -> str | None:
    """As `latest_checkpoint`. Collective. On disks of each node: the newest that all have, since one node may have
    committed what another had not; each rank gets its own path.
    """
    looks = on_each_node or ranks.rank == 0
    found = together(
        ranks,
        "looking for checkpoints",
        lambda: checkpoints_in(output_dir) if looks else [],
        failure=CheckpointError,
    )
    if not on_each_node:
        found = [found[0]] * len(found)
    names = set[str].intersection(*({their.checkpoint_id for their in theirs} for theirs in found))
    newest = _newest([each for each in found[0] if each.checkpoint_id in names], says=ranks.rank == 0)
    if newest is None:
        return None
    return next(each.path for each in found[ranks.rank] if each.checkpoint_id == newest.checkpoint_id)


def _newest(found: Sequence[FoundCheckpoint], *, says: bool = True) -> FoundCheckpoint | None:
    sound = [each for each in found if each.is_sound]
    newest = sound[-1] if sound else None
    for each in found[found.index(newest) + 1 :] if newest is not None else found:
        if says:
            _log.warning(
                "%s: passed over, its last loss or its weights were not finite; going on from %s (pass its path to "
                "load it all the same)",
                each.path,
                "the beginning" if newest is None else newest.path,
            )
    return newest
