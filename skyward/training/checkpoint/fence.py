"""Fence of a checkpoint folder: of several attempts of one job, only the newest commits.

An attempt that stood still may go on after the next one has begun, when nobody expects it any longer. So each attempt
records its number in the folder, and a commit looks for a higher one. This needs no server that both can reach.

Two attempts on one file system never commit both. The newer one first records its number, and then takes away the
staging folders of older ones. An older one that looked before the record was there finds no folder to rename.
An object store has no such step: a rank that stands still between its look and the put of its manifest is not refused.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ...errors import CheckpointSuperseded, UsageError
from ...stores.folders import Folder, LocalFolder
from .commit import no_fence
from .layout import STAGING

WRITER = "SKYWARD_CHECKPOINT_WRITER"
"""Variable with the name and the number of the attempt that saves, such as `nightly:3`. A hub sets it for its jobs."""
_FORM = re.compile(r"(?P<name>[A-Za-z0-9_-]{1,64}):(?P<number>\d{1,9})")
_RECORD = re.compile(r"\.attempt-(?P<name>[A-Za-z0-9_-]{1,64})-(?P<number>\d{1,9})")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttemptWriter:
    """Attempt that saves: the name of its job, and its number, the higher the newer."""

    name: str
    number: int

    @property
    def tag(self) -> str:
        """Part of the names of its staging folders."""
        return f"{self.name}~{self.number}"

    def record(self, folder: Folder) -> None:
        """Record this attempt in a folder, and take away what older ones have staged there.

        Raises:
            CheckpointSuperseded: A newer attempt has been there.
        """
        names = folder.names()
        own = f".attempt-{self.name}-{self.number}"
        if own not in names:
            with folder.create(own) as file:
                file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')}\n".encode())
            # Listed again behind the record: an older attempt that had staged before now either sees it or is seen.
            names = folder.names()
        self._compare(folder, names)
        for name in names:
            if name.startswith(STAGING) and isinstance(folder, LocalFolder) and self._is_older(name):
                _take_away(Path(folder.path, name))
            elif (number := self._number_of(name)) is not None and number < self.number:
                folder.child(name).remove()

    def is_recorded(self, folder: Folder) -> bool:
        """Return whether an attempt of this job has saved or resumed in a folder."""
        return any(self._number_of(name) is not None for name in folder.names())

    def permit(self, folder: Folder) -> None:
        """Return if this attempt may commit to a folder now.

        Raises:
            CheckpointSuperseded: A newer attempt has been there.
        """
        self._compare(folder, folder.names())

    def _compare(self, folder: Folder, names: list[str]) -> None:
        newest = max((number for name in names if (number := self._number_of(name)) is not None), default=0)
        if newest > self.number:
            raise CheckpointSuperseded(
                f"attempt={self.number}: attempt {newest} of {self.name} saves in {folder.path} now, so nothing was "
                "committed; end this process",
                path=folder.path,
            )

    def _number_of(self, name: str) -> int | None:
        """Return the number of an attempt of this job that has recorded itself by a file of this name."""
        match = _RECORD.fullmatch(name)
        return int(match["number"]) if match and match["name"] == self.name else None

    def _is_older(self, staging: str) -> bool:
        tag = next((part for part in staging.split(".") if part.startswith(f"{self.name}~")), "")
        number = tag.rpartition("~")[2]
        return number.isdecimal() and int(number) < self.number


def writer_here() -> AttemptWriter | None:
    """Return the attempt that this process belongs to, by its environment; None if there is none.

    Raises:
        UsageError: The variable has another form.
    """
    text = os.environ.get(WRITER, "")
    if not text:
        return None
    match = _FORM.fullmatch(text)
    if match is None:
        raise UsageError(f"{WRITER}={text[:80]!r}: not a name, a colon and a number; write it as nightly:3")
    return AttemptWriter(match["name"], int(match["number"]))


def record_or_warn(folder: Folder, writer: AttemptWriter | None) -> None:
    """Record the attempt that looks for a checkpoint to go on from. A folder that is read only needs no record.

    Raises:
        CheckpointSuperseded: A newer attempt has been there.
    """
    if writer is None:
        return
    try:
        writer.record(folder)
    except OSError as error:
        _log.warning("%s: could not record attempt %d: %s", folder.path, writer.number, error)


def fence_of(writer: AttemptWriter | None, folder: Folder) -> Callable[[], None]:
    """Return what raises CheckpointSuperseded once `writer` must no longer commit to a folder."""
    return no_fence if writer is None else lambda: writer.permit(folder)


@contextmanager
def explaining(fence: Callable[[], None]) -> Iterator[None]:
    """Raise CheckpointSuperseded instead of an OSError if a newer attempt has taken the staging away."""
    try:
        yield
    except OSError:
        fence()
        raise


def _take_away(staging: Path) -> None:
    """Remove a staging folder. It first changes its name in a single step, so that it can no longer be renamed."""
    doomed = staging.with_name(f"{STAGING}superseded-{uuid.uuid4().hex}")
    try:
        staging.rename(doomed)
    except FileNotFoundError:  # it was committed or discarded at this moment
        return
    _log.info("%s: removed what an older attempt has staged", staging)
    LocalFolder(doomed).remove()
