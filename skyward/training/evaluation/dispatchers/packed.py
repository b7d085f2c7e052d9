"""A job as it crosses to another process: contents by name, and with them only what is not there yet."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ....errors import PayloadNotLoadable
from ..dispatcher import Job
from ..worker import ContentsMissing, Worker

__all__ = ["PARTS", "MessageKind", "PackedJob", "numerics", "pack", "unpack"]

PARTS = ("factory", "load", "eval_fn", "payload")


class MessageKind(IntEnum):
    """A message between the process that trains and one beside it: its kind is sent first, then its body."""

    JOB = 1
    """To the worker: a payload of (state, packed job, contents)."""
    BEGUN = 2
    """The first answer: everything is there, the time of the job runs."""
    DONE = 3
    """A pickled Scored."""
    FAILED = 4
    """A pickled Failure."""
    MISSING = 5
    """Pickled digests: send the job again, with them."""


@dataclass(frozen=True, kw_only=True)
class PackedJob:
    """A job without its state and without its contents."""

    digests: dict[str, str]
    """By part: "factory", "load", "eval_fn", "payload"."""
    cache_key: str | None
    numerics: dict[str, Any]
    """See `numerics`."""


def pack(job: Job, known: Container[str], *, is_same_machine: bool) -> tuple[PackedJob, dict[str, bytes]]:
    """The job, and the contents to send along, by digest: those that are not `known` to be there.

    Raises: ArgumentNotPicklable.
    """
    contents = {part: getattr(job, part) for part in PARTS}
    packed = PackedJob(
        digests={part: content.digest for part, content in contents.items()},
        cache_key=job.cache_key,
        numerics=numerics(is_same_machine=is_same_machine),
    )
    unknown = {c.digest: c.data for c in contents.values() if c.digest not in known}
    return packed, unknown


def unpack(worker: Worker, packed: PackedJob, sent: Mapping[str, bytes]) -> dict[str, Any]:
    """By part: its value, made once in this process. What the job's numerics ask for is set.

    Raises: ContentsMissing; PayloadNotLoadable, naming the part.
    """
    missing = tuple(d for d in packed.digests.values() if d not in sent and not worker.has(d))
    if missing:
        raise ContentsMissing(*missing)
    parts = {}
    for part, digest in packed.digests.items():
        try:
            parts[part] = worker.content(digest, sent.get(digest))
        except ContentsMissing:  # another job's contents came in between
            raise
        except Exception as error:  # unpickling runs code of the user's
            raise PayloadNotLoadable(
                f"{part}: it cannot be loaded where evaluations run: {type(error).__name__}: {error}; what it imports "
                "must be installed there"
            ) from error
    _set(packed.numerics)
    return parts


def numerics(*, is_same_machine: bool) -> dict[str, Any]:
    """The settings of torch in this process that change results, if it is loaded; so that a worker's are the same.

    is_same_machine: the number of threads, which changes the order of sums, is the worker's own elsewhere.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "default_dtype": str(torch.get_default_dtype()).rpartition(".")[2],
        "matmul_precision": torch.get_float32_matmul_precision(),
        **({"threads": torch.get_num_threads()} if is_same_machine else {}),
    }


def _set(wanted: Mapping[str, Any]) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not wanted:
        return
    torch.set_default_dtype(getattr(torch, wanted["default_dtype"]))
    if torch.get_float32_matmul_precision() != wanted["matmul_precision"]:
        torch.set_float32_matmul_precision(wanted["matmul_precision"])
    if "threads" in wanted and torch.get_num_threads() != wanted["threads"]:
        torch.set_num_threads(wanted["threads"])
