"""Values that wait on a node until a link brings them away: in memory up to a limit, beyond it in the node's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ...wire.blobs import Blob, default_limit, spill
from ...wire.failures import encode_failure
from ...wire.frames import Frame, FrameKind
from ..slot.link import read_blob_body
from .complaints import complain

__all__ = ["Spool"]


class Spool:
    """Between the slots and a client's session. A value that finds no room is its own call's error and no other's."""

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self._folder = os.path.join(folder, "spool")
        self._limit = limit_bytes or default_limit()
        self._failed: dict[int, OSError] = {}

    @property
    def has_failed(self) -> bool:
        """Whether frames must go by `pass_on` although they carry no descriptor."""
        return bool(self._failed)

    def pass_on(self, frame: Frame, held_bytes: int) -> Iterator[Frame]:
        """What is sent in the place of a slot's frame. `held_bytes`: of blobs that the session keeps already.

        A descriptor of a frame that comes out is valid until the next step.
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
                f"{error.strerror}: a value of {size} bytes had to wait for its way to the client, and found no room "
                f"in {self._folder}"
            )
            self._failed[frame.ident] = OSError(error.errno, why)
            complain(None, why)
            return None

    def _after_failure(self, frame: Frame) -> Iterator[Frame]:
        """Nothing that stands on the blob may follow: only the end of the call, which is an error."""
        if frame.kind == FrameKind.RESULT:
            error = self._failed.pop(frame.ident)
            yield Frame(FrameKind.ERROR, frame.flags, 0, frame.ident, encode_failure(error))
        elif frame.kind == FrameKind.ERROR:
            del self._failed[frame.ident]
            yield frame

    def failure_of(self, task: int) -> OSError | None:
        """Why a blob of it is lost, asked once, before what stands on the blob is sent; None: none is."""
        return self._failed.pop(task, None)

    def forget(self, task: int) -> None:
        """It ended in another way."""
        self._failed.pop(task, None)
