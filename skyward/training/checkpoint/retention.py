"""Which checkpoints stay, and which one a run goes on from.

The newest, the newest finite one and the best by a metric stay, and more up to the limit.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ...errors import CheckpointError
from ..agree import Ranks
from .commit import new_token
from .folders import Folder, LocalFolder, folder_at
from .layout import STAGING, FoundCheckpoint, checkpoints_in
from .manifest import MANIFEST
from .verdicts import together

__all__ = ["best_of", "delete_checkpoint", "latest_checkpoint", "latest_of_ranks", "prune", "prune_or_warn"]

_log = logging.getLogger(__name__)


def best_of(
    checkpoints: Sequence[FoundCheckpoint], metric: str, *, greater_is_better: bool | None = None
) -> list[FoundCheckpoint]:
    """Those that have the metric, the best first; a later one first among equals.

    greater_is_better: None says: unless the name has "loss", "perplexity" or "error" in it.
    """
    if greater_is_better is None:
        greater_is_better = not any(word in metric.lower() for word in ("loss", "perplexity", "error"))
    scored = []
    for at, found in enumerate(checkpoints):
        value = found.manifest.metadata.get("metrics", {}).get(metric)
        if isinstance(value, int | float) and not math.isnan(value):  # 0.0 is a value, NaN is none
            scored.append((-value if greater_is_better else value, -at, found))
    return [found for *_, found in sorted(scored, key=lambda each: each[:2])]


def prune(output_dir: str | os.PathLike[str], *, keep: int, protect: Collection[str]) -> list[str]:
    """Delete the oldest whole checkpoints until `keep` are left, at least 1. Give the paths of those deleted.

    The newest, the newest that a run may go on from (`FoundCheckpoint.is_sound`), and `protect` stay, even if those are
    more: a run that has become NaN does not delete the last checkpoint that is finite.
    """
    found = checkpoints_in(output_dir)
    sound = [checkpoint for checkpoint in found if checkpoint.is_sound]
    safe = {_same(path) for path in protect} | {_same(checkpoint.path) for checkpoint in (*found[-1:], *sound[-1:])}
    spare = [checkpoint.path for checkpoint in found if _same(checkpoint.path) not in safe]
    doomed = spare[: max(0, len(found) - max(keep, 1))]
    for path in doomed:
        delete_checkpoint(folder_at(path))
    return doomed


def prune_or_warn(output_dir: str, *, keep: int, protect: Callable[[], Collection[str]]) -> None:
    """Prune, but only warn of checkpoints that cannot be read or deleted: that must not end a run."""
    try:
        prune(output_dir, keep=keep, protect=protect())
    except (OSError, CheckpointError) as error:
        _log.warning("%s: old checkpoints could not be deleted: %s", output_dir, error)


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
    newest = _newest([checkpoint for checkpoint in found[0] if checkpoint.checkpoint_id in names], says=ranks.rank == 0)
    if newest is None:
        return None
    return next(checkpoint.path for checkpoint in found[ranks.rank] if checkpoint.checkpoint_id == newest.checkpoint_id)


def _newest(found: Sequence[FoundCheckpoint], *, says: bool = True) -> FoundCheckpoint | None:
    sound = [checkpoint for checkpoint in found if checkpoint.is_sound]
    newest = sound[-1] if sound else None
    for checkpoint in found[found.index(newest) + 1 :] if newest is not None else found:
        if says:
            _log.warning(
                "%s: passed over, its last loss or its weights were not finite; going on from %s (pass its path to "
                "load it all the same)",
                checkpoint.path,
                "the beginning" if newest is None else newest.path,
            )
    return newest


def delete_checkpoint(folder: Folder) -> None:
    """Nobody sees a half of it: it stops being a checkpoint first, in one step."""
    if isinstance(folder, LocalFolder):
        path = Path(folder.path)
        doomed = path.parent / f"{STAGING}deleted-{new_token()}"
        path.rename(doomed)
        LocalFolder(doomed).remove()
        return
    folder.child(MANIFEST).remove()
    folder.remove()


def _same(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)
