"""Errors of training runs: control and checkpoints."""

from __future__ import annotations

from .base import SkywardError


class ControlFailed(SkywardError):
    """A training run did not answer, or refused a command.

    Raised by the client that `pool.control(...)` returns. Check that the run has a `TrainerControlCallback` and still
    runs.

    Attributes:
        job_id: The run, or None.
        status: HTTP status of the answer; None if there was no answer.
        is_gone: Whether the run has ended.
        reason: Code for the missing answer; 0 if there is none. 255: none came in time, so asking again may help.

    Example:
        try:
            pool.control(future).save()
        except sky.errors.ControlFailed as error:
            if not error.is_gone:
                raise
    """

    reason: int = 0
    job_id: str | None = None
    status: int | None = None
    is_gone: bool = False


class CheckpointError(SkywardError):
    """A checkpoint of a training run cannot be written, read or trusted.

    Attributes:
        path: Path of the checkpoint or file; may be empty.
        rank: First rank that failed; -1 if no rank failed, or it is not known.
        error: That rank's error, as text.

    Example:
        try:
            trainer.train(resume_from_checkpoint=True)
        except sky.errors.CheckpointError as error:
            print(f"{error.path}: {error}")
    """

    path: str = ""
    rank: int = -1
    error: str = ""


class CheckpointNotFound(CheckpointError):
    """The checkpoint does not exist, or it lacks a part that the run requires.

    Check the path, or start without resuming.

    Example:
        try:
            trainer.train(resume_from_checkpoint=path)
        except sky.errors.CheckpointNotFound:
            trainer.train()
    """


class CheckpointCorrupt(CheckpointError):
    """A file of the checkpoint is missing, cannot be read, or differs from its manifest in size or digest.

    Resume from an older checkpoint; this one cannot be trusted.

    Example:
        try:
            trainer.train(resume_from_checkpoint=latest)
        except sky.errors.CheckpointCorrupt:
            trainer.train(resume_from_checkpoint=previous)
    """


class CheckpointMismatch(CheckpointError):
    """The checkpoint is intact, but its ranks or its sharding do not fit this run.

    Start the run with the world size and sharding that wrote the checkpoint.

    Example:
        try:
            trainer.train(resume_from_checkpoint=path)
        except sky.errors.CheckpointMismatch as error:
            print(error)  # names the differing ranks or layout
    """


class CheckpointSaveFailed(CheckpointError):
    """A rank could not write its part of a checkpoint.

    Nothing was committed on any rank, and the previous checkpoint is untouched. Free space, or check the permissions of
    `path`.

    Example:
        try:
            trainer.train()
        except sky.errors.CheckpointSaveFailed as error:
            print(f"rank {error.rank}: {error.error}")
    """


class CheckpointSuperseded(CheckpointError):
    """A newer attempt of the same job saves in the folder, so this one committed nothing.

    End this process: the newer attempt goes on from the checkpoints that were there before.

    Example:
        try:
            trainer.train(resume_from_checkpoint="auto")
        except sky.errors.CheckpointSuperseded as error:
            sys.exit(str(error))
    """


class ReplicationMismatch(CheckpointError):
    """Ranks that are declared to hold the same state do not.

    The ranks have diverged, often because of different seeds or a missing gradient synchronization.

    Attributes:
        component: Component whose state differs.
        tensors: Paths of the tensors that differ.
        ranks: Ranks that differ from the first of their group.

    Example:
        try:
            trainer.train()
        except sky.errors.ReplicationMismatch as error:
            print(error.component, error.ranks, error.tensors)
    """

    component: str = ""
    tensors: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
