"""Values that wait on a node until a link takes them: in memory up to a limit, beyond it in the node's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ...core.limits import default_blob_limit
from ...wire.blobs import Blob, spill
from ...wire.failures import encode_failure
from ...wire.frames import Frame, FrameKind
from ..slot.link import read_blob_body
from .complaints import complain


class Spool:
    """Spool between the slots and a client's session. A value without room fails its own call, and no other."""

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self._folder = os.path.join(folder, "spool")
        self._limit = limit_bytes or default_blob_limit()
        self._failed: dict[int, OSError] = {}

    @property
    def has_failed(self) -> bool:
        """Return whether all frames must go through `pass_on`, even those without a descriptor."""
        return bool(self._failed)

    def pass_on(self, frame: Frame, held_bytes: int) -> Iterator[Frame]:
        """Yield the frames to send in place of a slot's frame.

        A yielded frame's descriptor is valid until the next step. `held_bytes`: size of blobs that the session holds.
        """
        if frame.ident in self._failed:
            yield from self._after_failure(frame)
        elif frame.kind != FrameKind.BLOB or frame.fd < 0:
            yield frame
        else:
            digest, size, _, _ = read_blob_body(frame.body)
            if held_bytes + size <= self._limit:
                yield frame
            elif (spilled := self._spill(frame, digest, size)) is not None:
                yield frame._replace(fd=spilled.fd)
                spilled.close()

    def _spill(self, frame: Frame, digest: bytes, size: int) -> Blob | None:
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            return spill(Blob(digest, size, os.dup(frame.fd)), self._folder)
        except OSError as error:
            why = (
                f"{error.strerror}: a value of {size} bytes had to wait for its way to the client, but {self._folder} "
                "has no room for it"
            )
            self._failed[frame.ident] = OSError(error.errno, why)
            complain(None, f"agent lost a value: {why}")
            return None

    def _after_failure(self, frame: Frame) -> Iterator[Frame]:
        """Drop frames that need the lost blob; pass only the end of the call, which is an error."""
        if frame.kind == FrameKind.RESULT:
            error = self._failed.pop(frame.ident)
            yield Frame(FrameKind.ERROR, frame.flags, 0, frame.ident, encode_failure(error))
        elif frame.kind == FrameKind.ERROR:
            del self._failed[frame.ident]
            yield frame

    def failure_of(self, task: int) -> OSError | None:
        """Return the error of a lost blob, once, before the frame that needs the blob is sent."""
        return self._failed.pop(task, None)

    def forget(self, task: int) -> None:
        """Forget a task that has ended in another way."""
        self._failed.pop(task, None)
