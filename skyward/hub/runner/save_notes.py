"""Notes of saves on their way from the process that saves, over a channel of its call, to the runner."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import PoolClosed
from ...node.slot.channels import channel_of
from ...node.slot.runtime import current_call
from ...training.checkpoint.notes import NOTES

if TYPE_CHECKING:
    from ...pool.pool import ComputePool
    from ...wire.task_channel import TaskChannel

_LOOK_S = 0.5
_ACCEPT_S = 0.05
"""Seconds between two looks whether the attempt is over. Its machines wait for that."""
_LONGEST = 8192
"""Bytes of a note. A longer line is not one of ours."""


@contextmanager
def forwarding_notes(channel: str) -> Iterator[None]:
    """Send the notes of saves in this process, and in its children, while the block runs. Empty: send none."""
    call = current_call()
    if call is None or not channel:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="skyward-saves-") as folder:
        file, is_over = Path(folder, "notes"), threading.Event()
        before = os.environ.get(NOTES)
        os.environ[NOTES] = str(file)
        worker = threading.Thread(
            target=_forward,
            args=(file, lambda: channel_of(call, channel), is_over),
            name="skyward-save-notes",
            daemon=True,
        )
        worker.start()
        try:
            yield
        finally:
            is_over.set()
            worker.join()
            os.environ.pop(NOTES)
            if before is not None:
                os.environ[NOTES] = before


def _forward(file: Path, open_channel: Callable[[], TaskChannel], is_over: threading.Event) -> None:
    """Send whole lines of a file as they appear. The channel is opened for the first: only one rank has any."""
    channel, position = None, 0
    try:
        while True:
            is_last = is_over.wait(_LOOK_S)
            with suppress(FileNotFoundError), file.open("rb") as notes:
                notes.seek(position)
                for line in notes:
                    if not line.endswith(b"\n"):
                        break
                    position += len(line)
                    channel = channel or open_channel()
                    channel.send(line[:_LONGEST])
            if is_last:
                return
    except (BrokenPipeError, EOFError, PoolClosed):  # the runner is gone, and nobody listens
        return
    finally:
        if channel is not None:
            channel.close()


class NoteCollector:
    """Thread of a runner that takes the notes of one attempt. The trials of a sweep have a channel each.

    Args:
        pool: The open pool.
        channel: Name of the channel.
        on_save: Called with each note, as the hub takes it.
    """

    def __init__(self, pool: ComputePool, channel: str, on_save: Callable[[dict[str, Any]], None]) -> None:
        self._pool, self._channel, self._on_save = pool, channel, on_save
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="skyward-save-collector", daemon=True)
        self._thread.start()

    def close(self, wait_s: float = 5.0) -> None:
        """Take the notes that have arrived, and end. The call is over, and its channel with it."""
        self._is_over.set()
        self._thread.join(wait_s)

    def _collect(self) -> None:
        channels: list[TaskChannel] = []
        try:
            while True:
                is_last = self._is_over.is_set()
                try:
                    channels.append(self._pool.channel(self._channel, timeout_s=0.0 if is_last else _ACCEPT_S))
                    continue
                except TimeoutError:
                    channels = [channel for channel in channels if self._take(channel)]
                if is_last:
                    return
        except PoolClosed:
            return
        finally:
            for channel in channels:
                channel.close()

    def _take(self, channel: TaskChannel) -> bool:
        """Take the notes that have arrived, and return whether more may come."""
        try:
            while True:
                if (note := _note_of(channel.receive(0.0))) is not None:
                    self._on_save(note)
        except TimeoutError:
            return True
        except EOFError:
            channel.close()
            return False


def _note_of(message: bytes) -> dict[str, Any] | None:
    """Return a note whose fields have the right types. The job's code may have written anything."""
    try:
        note = json.loads(message)
        step = None if note["step"] is None else int(note["step"])
        return {
            "path": str(note["path"])[:1000],
            "step": step,
            "bytes": max(0, int(note["bytes"])),
            "seconds": max(0.0, float(note["seconds"])),
        }
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
