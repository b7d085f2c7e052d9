"""Jobs on the way to another process: contents by digest, and only those sent along that it lacks."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ....errors import PayloadNotLoadable
from ..dispatcher import Job
from ..worker import ContentsMissing, Worker

PARTS = ("factory", "load", "eval_fn", "payload")


class MessageKind(IntEnum):
    """Kind of a message between the training process and a worker beside it; it is sent before the body."""

    JOB = 1
    """To the worker: a payload (state, packed job, contents)."""
    BEGUN = 2
    """First answer: all contents are there and the job's time begins."""
    DONE = 3
    """Answer: a pickled Scored."""
    FAILED = 4
    """Answer: a pickled failure."""
    MISSING = 5
    """Answer: pickled digests of missing contents; send the job again with them."""


@dataclass(frozen=True, kw_only=True)
class PackedJob:
    """Job without its state and its contents."""

    digests: dict[str, str]
    """Digests of the contents, by "factory", "load", "eval_fn" and "payload"."""
    cache_key: str | None
    numerics: dict[str, Any]
    """Settings of torch, see the function `numerics`."""


def pack(job: Job, known: Container[str], *, is_same_machine: bool) -> tuple[PackedJob, dict[str, bytes]]:
    """Return the packed job, and by digest the contents that are not in `known`.

    Raises:
        ArgumentNotPicklable: a content cannot be pickled.
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
    """Return the values of a job's contents by part, made once in this process, and apply its numerics.

    Raises:
        ContentsMissing: contents are neither here nor in `sent`.
        PayloadNotLoadable: a content cannot be unpickled; the message names the part.
    """
    missing = tuple(d for d in packed.digests.values() if d not in sent and not worker.has(d))
    if missing:
        raise ContentsMissing(*missing)
    parts = {}
    for part, digest in packed.digests.items():
        try:
            parts[part] = worker.content(digest, sent.get(digest))
        except ContentsMissing:  # evicted by another job's contents since the check above
            raise
        except Exception as error:  # unpickling runs user code
            raise PayloadNotLoadable(
                f"{part}: cannot be loaded where evaluations run ({type(error).__name__}: {error}); install there what "
                "it imports"
            ) from error
    _set(packed.numerics)
    return parts


def numerics(*, is_same_machine: bool) -> dict[str, Any]:
    """Return the settings of torch in this process that change results, so that a worker can copy them.

    Args:
        is_same_machine: include the number of threads, which changes the order of sums. Elsewhere it is the worker's
            own choice.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "default_dtype": str(torch.get_default_dtype()).rpartition(".")[2],
        "matmul_precision": torch.get_float32_matmul_precision(),
        **({"threads": torch.get_num_threads()} if is_same_machine else {}),
    }


def _set(settings: Mapping[str, Any]) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not settings:
        return
    torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    if torch.get_float32_matmul_precision() != settings["matmul_precision"]:
        torch.set_float32_matmul_precision(settings["matmul_precision"])
    if "threads" in settings and torch.get_num_threads() != settings["threads"]:
        torch.set_num_threads(settings["threads"])
