"""Retention of checkpoints, and the choice of the one that a run resumes from.

The newest, the newest finite one and the best by a metric are always kept, and more up to the limit.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ...errors import CheckpointError, CheckpointNotFound, UsageError
from ...stores.folders import Folder, LocalFolder, folder_at
from ..agree import Ranks
from .commit import new_token
from .fence import AttemptWriter, record_or_warn
from .layout import STAGING, FoundCheckpoint, checkpoints_in
from .manifest import MANIFEST
from .verdicts import together

KEPT = ".kept-for-"
_KEEPER = re.compile(r"[A-Za-z0-9_.-]{1,100}")

_log = logging.getLogger(__name__)


def best_of(
    checkpoints: Sequence[FoundCheckpoint], metric: str, *, greater_is_better: bool | None = None
) -> list[FoundCheckpoint]:
    """Return the checkpoints that have the metric, the best first; of two equal ones the later comes first.

    Args:
        checkpoints: in the order of their commits.
        metric: name of the metric.
        greater_is_better: None: False if the name contains "loss", "perplexity" or "error".

    Example:
        best = best_of(checkpoints_in("out"), "eval_loss")[0].path
    """
    if greater_is_better is None:
        greater_is_better = not any(word in metric.lower() for word in ("loss", "perplexity", "error"))
    scored = []
    for at, checkpoint in enumerate(checkpoints):
        value = checkpoint.manifest.metadata.get("metrics", {}).get(metric)
        if isinstance(value, int | float) and not math.isnan(value):  # 0.0 is a value, NaN is not
            scored.append((-value if greater_is_better else value, -at, checkpoint))
    return [checkpoint for *_, checkpoint in sorted(scored, key=lambda row: row[:2])]


def prune(output_dir: str | os.PathLike[str], *, keep: int, protect: Collection[str]) -> list[str]:
    """Delete the oldest complete checkpoints until `keep` are left.

    Args:
        output_dir: folder or URL with the checkpoints.
        keep: number to keep, at least 1.
        protect: paths to keep in any case, beside those that `keep_checkpoint` marked. The newest, and the newest sound
            one (`FoundCheckpoint.is_sound`), are kept too, even beyond `keep`: a run that has become NaN must not
            delete its last finite checkpoint.

    Returns:
        The deleted paths.

    Example:
        prune("out", keep=3, protect=["out/checkpoint-500"])
    """
    checkpoints = checkpoints_in(output_dir)
    sound = [checkpoint for checkpoint in checkpoints if checkpoint.is_sound]
    safe = {_same(path) for path in protect} | {
        _same(checkpoint.path) for checkpoint in (*checkpoints[-1:], *sound[-1:])
    }
    spare = [
        checkpoint.path
        for checkpoint in checkpoints
        if _same(checkpoint.path) not in safe and not keepers_of(folder_at(checkpoint.path))
    ]
    doomed = spare[: max(0, len(checkpoints) - max(keep, 1))]
    for path in doomed:
        delete_checkpoint(folder_at(path))
    return doomed


def keep_checkpoint(path: str | os.PathLike[str], name: str) -> None:
    """Mark a checkpoint that something else needs, so that no run deletes it. It costs a small file in its folder.

    A job of a hub that loads a checkpoint of another job marks it by itself, and `register_model` of a run marks one
    that a model names by its URL. `delete_checkpoint` still deletes it, and so does whoever removes the folder.

    Args:
        path: folder or URL of the checkpoint.
        name: name of what needs it: 1 to 100 letters, digits, '-', '_' and '.'.

    Raises:
        CheckpointNotFound: no checkpoint is there.
        UsageError: the name is not legal.

    Example:
        keep_checkpoint("s3://runs/digits/checkpoint-500", "digits-3")
    """
    if not _KEEPER.fullmatch(name):
        raise UsageError(f"name={name[:100]!r}: not 1 to 100 letters, digits, '-', '_' or '.'; choose another one")
    folder = folder_at(path)
    if MANIFEST not in folder.names():
        raise CheckpointNotFound(f"path={folder.path!r}: no checkpoint is there; check the path", path=folder.path)
    with folder.create(f"{KEPT}{name}") as file:
        file.write(b"needed by another job or a model; remove this file to let it go\n")


def keep_for_model(path: str, model: str) -> None:
    """Mark a checkpoint that a registered model needs. Raises as `keep_checkpoint` does."""
    keep_checkpoint(path, re.sub(r"[^A-Za-z0-9_.-]", "-", f"model-{model}")[:100])


def keepers_of(folder: Folder) -> list[str]:
    """Return the names of what needs the checkpoint in a folder."""
    return [name.removeprefix(KEPT) for name in folder.names() if name.startswith(KEPT)]


def keep_for_loader(folder: Folder, writer: AttemptWriter | None) -> None:
    """Mark a checkpoint that a job loads, if it is another job's. A folder that is read only cannot lose it either."""
    if writer is None:
        return
    try:
        if not writer.is_recorded(folder.parent()[0]):
            keep_checkpoint(folder.path, writer.name)
    except (OSError, UsageError, CheckpointError) as error:
        _log.warning("%s: could not mark it as needed by %s: %s", folder.path, writer.name, error)


def prune_or_warn(output_dir: str, *, keep: int, protect: Callable[[], Collection[str]]) -> None:
    """Prune, but only log checkpoints that cannot be read or deleted, because that must not end a run."""
    try:
        prune(output_dir, keep=keep, protect=protect())
    except (OSError, CheckpointError) as error:
        _log.warning("%s: could not delete old checkpoints: %s", output_dir, error)


def latest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the path of the checkpoint that was committed last; None if there is none.

    One whose last loss or weights were not finite is skipped with a warning, because a run that resumed from it would
    stay NaN. It can still be loaded by its path.

    Args:
        output_dir: folder or URL with the checkpoints.

    Raises:
        CheckpointCorrupt: a manifest is damaged, so it is unknown which checkpoint is the newest.

    Example:
        path = latest_checkpoint("out")
    """
    newest = _newest(checkpoints_in(output_dir))
    return None if newest is None else newest.path


def latest_of_ranks(
    ranks: Ranks, output_dir: str, *, on_each_node: bool, writer: AttemptWriter | None = None
) -> str | None:
    """Return the result of `latest_checkpoint`, agreed between all ranks. Collective.

    From then on, older attempts than `writer` commit nothing there, so no newer checkpoint appears behind its back.

    With a disk of each node, it is the newest that all nodes have, because one node may have committed a checkpoint
    that another one has not. Each rank gets its own path.
    """
    looks = on_each_node or ranks.rank == 0
    by_rank = together(
        ranks,
        "looking for checkpoints",
        lambda: _found_by(writer, output_dir) if looks else [],
        failure=CheckpointError,
    )
    if not on_each_node:
        by_rank = [by_rank[0]] * len(by_rank)
    names = set[str].intersection(*({their.checkpoint_id for their in theirs} for theirs in by_rank))
    newest = _newest(
        [checkpoint for checkpoint in by_rank[0] if checkpoint.checkpoint_id in names], says=ranks.rank == 0
    )
    if newest is None:
        return None
    return next(
        checkpoint.path for checkpoint in by_rank[ranks.rank] if checkpoint.checkpoint_id == newest.checkpoint_id
    )


def _found_by(writer: AttemptWriter | None, output_dir: str) -> list[FoundCheckpoint]:
    record_or_warn(folder_at(output_dir), writer)
    return checkpoints_in(output_dir)


def _newest(checkpoints: Sequence[FoundCheckpoint], *, says: bool = True) -> FoundCheckpoint | None:
    sound = [checkpoint for checkpoint in checkpoints if checkpoint.is_sound]
    newest = sound[-1] if sound else None
    for checkpoint in checkpoints[checkpoints.index(newest) + 1 :] if newest is not None else checkpoints:
        if says:
            _log.warning(
                "%s: skipped, because its last loss or its weights were not finite; resuming from %s (pass its path to "
                "load it anyway)",
                checkpoint.path,
                "the start" if newest is None else newest.path,
            )
    return newest


def delete_checkpoint(folder: Folder) -> None:
    """Delete a checkpoint. It first stops being one in a single step, so that nobody sees a part of it.

    Args:
        folder: folder of the checkpoint.

    Example:
        delete_checkpoint(folder_at("out/checkpoint-100"))
    """
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
