"""TensorBoard SummaryWriter for runs that resume, without duplicate or missing events.

On resume, events behind the checkpoint's step are cut out of the files. TensorBoard has a purge step for this, but not
all of its readers apply it to texts. It is set as well, for readers that have read the files already, to the step
*behind* the checkpoint's, because a reader also hides events at the purge step itself. Events that a producer writes
again at the checkpoint's own step, to be sure that they exist, are left out.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import MissingDependency
from ..events import TrainerCallback

_log = logging.getLogger(__name__)

_MOST_WAIT_S = 3


class ResumableSummaryWriter(TrainerCallback):
    """Write TensorBoard events that a resumed run continues without duplicates.

    The `add_*` methods are those of `torch.utils.tensorboard.SummaryWriter`, which is created at the first of them.
    Give the writer to the callbacks that write, such as TBLogger, and to the run as a callback of its own. Checkpoints
    then store its folder: a resumed run continues there, without events after the checkpoint's step. Of two scalars
    with the same tag and step the first one stays. Use it from one thread.

    Args:
        log_dir: folder of the event files.

    Raises:
        MissingDependency: a run begins and torch or tensorboard is not installed.

    Example:
        >>> ResumableSummaryWriter("runs/tiny").log_dir
        'runs/tiny'
    """

    runs_on = "rank_zero"

    def __init__(self, log_dir: str | Path) -> None:
        self._log_dir = Path(log_dir)
        self._resumed_at: int | None = None
        self._written: Counter[str] = Counter()
        self._scalars: tuple[int | None, set[str]] = (None, set())
        self._writer: Any = None

    @property
    def log_dir(self) -> str:
        """Folder of the event files."""
        return str(self._log_dir)

    def get_logdir(self) -> str:
        """Return the folder, like SummaryWriter's method."""
        return self.log_dir

    def on_train_begin(self, state: Any, **kwargs: Any) -> None:
        """Note the step that the run resumes from; idempotent, so callbacks that got the writer may call it too."""
        missing = [name for name in ("torch", "tensorboard") if find_spec(name) is None]
        if missing:
            raise MissingDependency(
                "ResumableSummaryWriter: needs torch and tensorboard; pip install 'skyward[training]'", name=missing[0]
            )
        if state.global_step == 0:
            self._resumed_at = None
        elif self._resumed_at != state.global_step and _files_in(self._log_dir):
            self.close()
            self._resumed_at = state.global_step

    def on_train_end(self, **kwargs: Any) -> None:
        self.flush()

    def flush(self) -> None:
        """Return when all events are in the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the file; later events go to a new one. Idempotent."""
        writer, self._writer = self._writer, None
        self._resumed_at = None
        if writer is not None:
            writer.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the folder, after a flush: a checkpoint is about to rely on the events."""
        self.flush()
        return {"log_dir": str(self._log_dir.resolve())}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        original = Path(state_dict["log_dir"])
        if original.is_dir():
            self._log_dir = original
        elif original != self._log_dir.resolve():
            _log.warning("%s: the resumed run's folder is missing; using %s", original, self._log_dir)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("add_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def add(*args: Any, **kwargs: Any) -> None:
            writer = self._open()
            if not self._is_there(name, *args, **kwargs):
                getattr(writer, name)(*args, **kwargs)

        return add

    def _open(self) -> Any:
        if self._writer is not None:
            return self._writer
        _leave_tensorflow_alone()
        from torch.utils.tensorboard import SummaryWriter

        make: Callable[..., Any] = SummaryWriter
        if self._resumed_at is None:
            self._writer = make(str(self._log_dir))
        else:
            self._written = _cut(self._log_dir, self._resumed_at)
            _wait_for_a_later_name(self._log_dir)
            self._writer = make(str(self._log_dir), purge_step=self._resumed_at + 1)
        return self._writer

    def _is_there(self, method: str, tag: object = None, *args: Any, **kwargs: Any) -> bool:
        """Return whether this event was written at this step before."""
        step = kwargs.get("global_step", args[1] if len(args) > 1 else None)
        key = f"{tag}/text_summary" if method == "add_text" else str(tag)
        if step is not None and step == self._resumed_at and self._written[key] > 0:
            self._written[key] -= 1
            return True
        if method != "add_scalar" or step is None:
            return False
        at, tags = self._scalars
        if step != at:
            tags = set()
        is_there = key in tags
        self._scalars = (step, tags | {key})
        return is_there


def _files_in(folder: Path) -> list[Path]:
    """Return the event files in the order in which TensorBoard reads them."""
    return sorted(folder.glob("*tfevents*")) if folder.is_dir() else []


def _leave_tensorflow_alone() -> None:
    """Stop TensorBoard from importing TensorFlow, which takes seconds and only serves file names.

    A module of this name is TensorBoard's own switch for that. Source: tensorboard/compat/__init__.py.
    """
    if "tensorflow" not in sys.modules:
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))


def _cut(folder: Path, step: int) -> Counter[str]:
    """Remove events behind `step` from the folder's files; return how often each tag was written at `step`."""
    from tensorboard.compat.proto.event_pb2 import Event

    for left in folder.glob(".cut.*"):  # from a process that was killed here
        left.unlink(missing_ok=True)
    there: Counter[str] = Counter()
    for path in _files_in(folder):
        data = path.read_bytes()
        kept: list[bytes] = []
        for record, event in _records(data, Event):
            if event.step <= step:
                kept.append(record)
            if event.step == step:
                there.update(value.tag for value in event.summary.value)
        if sum(map(len, kept)) < len(data):
            _replace(path, kept)
    return there


def _records(data: bytes, event: Any) -> Iterator[tuple[bytes, Any]]:
    """Yield each complete record of a file with its event.

    A record is a length (8 bytes), its checksum (4), the event and its checksum (4). The last one may be incomplete if
    the writer was killed. Source: tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details".
    """
    from google.protobuf.message import DecodeError

    at = 0
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        end = at + length + 16
        if length == 0 or end > len(data):  # an incomplete record, or zeros after a power failure
            return
        try:
            content = event.FromString(data[at + 12 : end - 4])
        except DecodeError:  # a writer was killed within this record
            return
        yield data[at:end], content
        at = end


def _replace(path: Path, records: list[bytes]) -> None:
    new = path.with_name(f".cut.{secrets.token_hex(4)}")  # readers look for "tfevents" in the name
    try:
        with new.open("xb") as file:
            file.writelines(records)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait, for less than a second, until a new file's name sorts last; names begin with the second of creation."""
    newest = max((_second_of(file) for file in _files_in(folder)), default=0)
    ahead = newest + 1 - time.time()
    if ahead > _MOST_WAIT_S:
        _log.warning(
            "%s: its newest file is dated %.0f s ahead of this machine's clock; TensorBoard may show events after the "
            "checkpoint twice",
            folder,
            ahead,
        )
        return
    while (ahead := newest + 1 - time.time()) > 0:
        time.sleep(ahead)


def _second_of(path: Path) -> int:
    _, _, after = path.name.partition("tfevents.")
    second = after.partition(".")[0]
    return int(second) if second.isdecimal() else 0
