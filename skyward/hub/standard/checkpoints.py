"""Operations on checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..model.operations import NamedOperation, register_operation


@dataclass(frozen=True, kw_only=True)
class VerifyCheckpoint:
    """Parameters of `checkpoint.verify`.

    Attributes:
        path: Folder or URL of the checkpoint, as the job's node sees it.
        digests: Whether to read each file and compare its digest. False: compare sizes only.
    """

    path: str
    digests: bool = True

    def __post_init__(self) -> None:
        if not 1 <= len(self.path) <= 4096:
            raise ValueError("path: empty or longer than 4096 characters; write a folder or URL")


def verify(parameters: VerifyCheckpoint) -> dict[str, Any]:
    """Return the problems of a checkpoint, in words; none if it is intact. No code of the checkpoint runs."""
    from ...training.checkpoint import problems

    found = problems(parameters.path, digests=parameters.digests)
    return {"path": parameters.path, "problems": found}


register_operation(
    NamedOperation(
        name="checkpoint.verify",
        text="Look for damage in a checkpoint: files that are missing, changed or cut.",
        parameters=VerifyCheckpoint,
        function=f"{__name__}:verify",
    )
)
