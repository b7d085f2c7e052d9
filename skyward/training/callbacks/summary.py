"""TensorBoard's SummaryWriter for runs that resume: nothing twice, nothing missing, as its own readers see it.

On resume, events behind the checkpoint's step are cut out of the files: TensorBoard has a purge step for this, but
not all of its readers apply it to texts. It is set all the same, for one that has read the files already, to the step
*behind* the checkpoint's: a reader hides what is at the purge step, too. What is written at the checkpoint's own step
again, because a producer makes up for what may not have been done, is left out.
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

__all__ = ["ResumableSummaryWriter"]

_log = logging.getLogger(__name__)

_MOST_WAIT_S = 3


class ResumableSummaryWriter(TrainerCallback):
    """A `torch.utils.tensorboard.SummaryWriter` in `log_dir`, made when something is first added to it.

    Give it to whoever writes, such as TBLogger, and to the callbacks, which keeps its folder in checkpoints: a run
    that resumes goes on in its original folder, without what was written after the checkpoint's step. Its methods
    `add_*` are SummaryWriter's. Of two scalars with one tag and one step it keeps the first. For one thread.

    Raises: MissingDependency, where a run begins without tensorboard.
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
        """The folder that is written to."""
        return str(self._log_dir)

    def get_logdir(self) -> str:
        """As SummaryWriter has it."""
        return self.log_dir

    def on_train_begin(self, state: Any, **kwargs: Any) -> None:
        """Idempotent: whoever was given the writer may call it too. Raises: MissingDependency."""
        if find_spec("tensorboard") is None or find_spec("torch") is None:
            raise MissingDependency(
                "ResumableSummaryWriter: needs torch and tensorboard; pip install 'skyward[training]'"
            )
        if state.global_step == 0:
            self._resumed_at = None
        elif self._resumed_at != state.global_step and _files_in(self._log_dir):
            self.close()
            self._resumed_at = state.global_step

    def on_train_end(self, **kwargs: Any) -> None:
        self.flush()

    def flush(self) -> None:
        """Returns when what was added is in the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Idempotent. What is added later goes to a new file."""
        writer, self._writer = self._writer, None
        self._resumed_at = None
        if writer is not None:
            writer.close()

    def state_dict(self) -> dict[str, Any]:
        """Also writes what was added: a checkpoint is about to rely on it."""
        self.flush()
        return {"log_dir": str(self._log_dir.resolve())}

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        original = Path(state_dict["log_dir"])
        if original.is_dir():
            self._log_dir = original
        elif original != self._log_dir.resolve():
            _log.warning("%s: the folder of the run that resumes is not there; %s is used", original, self._log_dir)

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
        """Whether this was written at this step before."""
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
    """Event files in the order in which readers read them."""
    return sorted(folder.glob("*tfevents*")) if folder.is_dir() else []


def _leave_tensorflow_alone() -> None:
    """TensorBoard imports TensorFlow where it is installed, for the names of files: seconds, for nothing here. A module
    of this name is its own way to say no. Source: tensorboard/compat/__init__.py.
    """
    if "tensorflow" not in sys.modules:
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))


def _cut(folder: Path, step: int) -> Counter[str]:
    """Takes what is behind `step` out of the folder's files. Gives how often each tag was written at it."""
    from tensorboard.compat.proto.event_pb2 import Event

    for left in folder.glob(".cut.*"):  # by a process that was killed while it did this
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
    """The whole records of a file, and what they say: length (8 bytes), its checksum (4), an event, its checksum (4).
    Ends where a writer was killed.

    Source: tensorflow.org/tutorials/load_data/tfrecord, "TFRecords format details".
    """
    from google.protobuf.message import DecodeError

    at = 0
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        end = at + length + 16
        if length == 0 or end > len(data):  # half a record, or what a loss of power left
            return
        try:
            found = event.FromString(data[at + 12 : end - 4])
        except DecodeError:  # a writer was killed within this record
            return
        yield data[at:end], found
        at = end


def _replace(path: Path, records: list[bytes]) -> None:
    new = path.with_name(f".cut.{secrets.token_hex(4)}")  # a name that no reader takes for events
    try:
        with new.open("xb") as file:
            file.writelines(records)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _wait_for_a_later_name(folder: Path) -> None:
    """Readers take files by their names, which begin with the second they were made in: less than a second's wait."""
    newest = max((_second_of(file) for file in _files_in(folder)), default=0)
    ahead = newest + 1 - time.time()
    if ahead > _MOST_WAIT_S:
        _log.warning(
            "%s: its newest file is %.0f s in the future of this machine's clock; TensorBoard may show what was "
            "written after the checkpoint twice",
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
