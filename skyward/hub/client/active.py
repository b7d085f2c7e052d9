"""A run that this process writes."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...errors import HubUnreachable, UsageError
from ..model.product import PREFIX
from ..model.runs import RunState
from .connection import HubConnection
from .names import check_key
from .records import line_of, line_of_metrics
from .sender import HEARTBEAT_S, LogSender, RunCommand, SenderThread
from .settings import DEFAULT_EXPERIMENT, Address
from .spool import SpoolLog, SpoolWriter, logs_in, store_bytes, store_file
from .tables import table_json

_log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""Seconds that the end of a run waits for its hub. With a hub that does not answer at all it waits a fifth of that."""
_FINAL = frozenset(state.value for state in RunState if state.is_final)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """How a run begins.

    Attributes:
        id: 32 hexadecimal digits.
        experiment: name of its experiment.
        name: its name; None for a run that goes on.
        user: name of the user.
        tags: first tags.
        parent: id of the run that it continues from.
        is_resumed: whether the run existed before.
        begins_again: whether the first point of each metric replaces those of an earlier attempt, from its step on.
    """

    id: str
    experiment: str | None = None
    name: str | None = None
    user: str = ""
    tags: Mapping[str, str] = ()  # type: ignore[assignment]
    parent: str | None = None
    is_resumed: bool = False
    begins_again: bool = False


class ActiveRun:
    """A run that this process writes. `hub.start_run` makes it; use it in a `with` block.

    Every call appends to a file and returns: nothing waits for the network, and nothing is lost while the hub is away.
    Thread-safe. A forked child may log to the run too, but never ends it.

    Example:
        >>> from skyward import hub
        >>> with hub.start_run(run_name="first") as run:
        ...     run.log_params({"lr": 3e-4})
        ...     for step in range(3):
        ...         run.log_metrics({"loss": 1 / (step + 1)}, step=step)
        >>> run.state
        'completed'
    """

    def __init__(self, spec: RunSpec, *, spool: Path, address: Address | None, writes_start: bool = True) -> None:
        self.id, self.name, self.experiment = spec.id, spec.name, spec.experiment
        self.folder = spool / spec.id
        self.address = address
        self.state = "running"
        self.on_end: Callable[[], None] = lambda: None
        self._params: dict[str, str] = {}
        self._known_keys: set[str] = set()
        self._begins_again = spec.begins_again
        self._replaced: set[str] = set()
        self._handler: Callable[[Sequence[RunCommand]], None] | None = None
        self._owner = os.getpid()
        self._making = threading.RLock()
        self._writer: SpoolWriter | None = None
        self._sender: SenderThread | None = None
        _active.add(self)
        if writes_start:
            self._begin(spec)

    def __repr__(self) -> str:
        where = self.address.url if self.address else str(self.folder)
        return f"<ActiveRun {self.id} {self.name or ''} {self.state} -> {where}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        elif isinstance(error, KeyboardInterrupt):
            self.end("cancelled", "KeyboardInterrupt")
        else:
            self.end("failed", error_text(error))

    # Logging ----------------------------------------------------------------------------------------------------------

    def log_metric(self, key: str, value: float, step: int | None = None) -> None:
        """Log one metric; see `log_metrics`."""
        self.log_metrics({key: value}, step)

    def log_metrics(
        self, metrics: Mapping[str, float], step: int | None = None, *, timestamp: int | None = None
    ) -> None:
        """Log metrics at a step.

        Args:
            metrics: values by key. NaN and infinities are legal, and so are scalars of numpy and torch.
            step: the step, a whole number; None means 0.
            timestamp: milliseconds since 1970; None means now.

        Raises:
            UsageError: a key or value is not legal.
        """
        self._append(self._line_of_metrics(step, _now() if timestamp is None else timestamp, metrics))

    def log_metric_rows(self, rows: Iterable[tuple[int, int, Mapping[str, float]]]) -> None:
        """Log metrics of many steps by one write. If a key or value is not legal, log none of them.

        Args:
            rows: step, timestamp in milliseconds since 1970, and values by key; see `log_metrics`.

        Raises:
            UsageError: a key or value is not legal.
        """
        lines = [self._line_of_metrics(*row) for row in rows]
        if lines:
            self._append(b"".join(lines))

    def log_param(self, key: str, value: object) -> None:
        """Log one parameter; see `log_params`."""
        self.log_params({key: value})

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log parameters. They are kept as text, and cannot be changed once logged.

        Raises:
            UsageError: a key is not legal, or this process logged another value for it.
        """
        if not hasattr(params, "items"):
            raise UsageError(
                f"params={params!r:.60}: not a dict; write log_params({{'lr': 3e-4}}), or vars(args) of a namespace",
                field="params",
                value=params,
            )
        texts = {check_key(key): str(value) for key, value in params.items()}
        for key, text in texts.items():
            if self._params.get(key, text) != text:
                raise UsageError(
                    f"params[{key!r}]={text!r:.60}: the run has {self._params[key]!r:.60} already; log it under "
                    "another key, because parameters do not change",
                    field=key,
                    value=text,
                )
        self._params.update(texts)
        if texts:
            self._append(line_of(["p", texts]))

    def set_tag(self, key: str, value: object) -> None:
        """Set one tag; see `set_tags`."""
        self.set_tags({key: value})

    def set_tags(self, tags: Mapping[str, object]) -> None:
        """Set tags, which may be changed later. Values are kept as text."""
        if tags:
            self._append(line_of(["t", {check_key(key): str(value) for key, value in tags.items()}]))

    def delete_tag(self, key: str) -> None:
        """Delete a tag."""
        self._append(line_of(["dt", check_key(key)]))

    def log_artifact(self, key: str, path: str | os.PathLike[str]) -> None:
        """Log a file, or all files of a folder. They are copied, so they may change afterwards.

        Args:
            key: path of the artifact within the run, with `/`; a folder's files come below it.
            path: the file or folder.

        Raises:
            OSError: it cannot be read, or the disk is full.
        """
        check_key(key)
        source = Path(path)
        if source.is_dir():
            for file in sorted(file for file in source.rglob("*") if file.is_file()):
                self._log_stored(f"{key}/{file.relative_to(source).as_posix()}", *store_file(self.folder, file))
            return
        self._log_stored(key, *store_file(self.folder, source))

    def log_bytes(self, key: str, data: bytes) -> None:
        """Log bytes as an artifact."""
        self._log_stored(check_key(key), *store_bytes(self.folder, data))

    def log_text(self, key: str, text: str) -> None:
        """Log a text as an artifact."""
        self.log_bytes(key, text.encode())

    def log_table(self, key: str, rows: Any) -> None:
        """Log a table as an artifact, in the form of MLflow's tables.

        Args:
            key: path of the artifact; `.json` is appended if it is missing.
            rows: a list of dicts, a dict of columns, or a pandas DataFrame.

        Raises:
            UsageError: it is none of these, or its columns differ in length.
        """
        self.log_bytes(key if key.endswith(".json") else f"{key}.json", table_json(rows))

    def log_inputs(self, inputs: Iterable[Mapping[str, Any]]) -> None:
        """Log data sets that the run reads, as dicts with name, digest, source_type and source."""
        self._append(line_of(["in", [dict(given) for given in inputs]]))

    def register_model(self, name: str, artifact_path: str, tags: Mapping[str, object] | None = None) -> int:
        """Register an artifact of this run as a new version of a model.

        This waits for the hub, after sending whatever waits.

        Args:
            name: name of the model; made if missing.
            artifact_path: key of the artifact, or folder of artifacts; or the URL of a checkpoint, also of another run
                or job. Retention never deletes that checkpoint then.
            tags: tags of the version. Values are kept as text.

        Returns:
            Number of the version.

        Raises:
            UsageError: the run has no such artifact.
            CheckpointNotFound: no checkpoint is at the URL.
            OSError: its store does not answer, or this process may not write there.
            HubUnreachable: no hub is named, or it does not answer.
            HubError: it refuses the model.
        """
        if self.address is None:
            raise HubUnreachable(f"register_model({name!r}): needs a hub, and none is named; pass hub.connect(url=...)")
        from .registry import register

        if not self.flush(60.0):
            raise HubUnreachable(
                f"register_model({name!r}): the hub did not take the run's artifacts within 60 s; try again later",
                url=self.address.url,
                retryable=True,
            )
        with HubConnection(self.address) as connection:
            return register(connection, name, self.id, artifact_path, dict(tags or {}))

    def fork(self, step: int, run_name: str | None = None) -> ActiveRun:
        """Begin a run that continues from a step of this one, with its parameters. This run stays as it is.

        Args:
            step: the last step that both have in common.
            run_name: name of the new run; None: a random one.
        """
        from .names import random_name

        tags = {f"{PREFIX}.fork.run": self.id, f"{PREFIX}.fork.step": str(int(step))}
        spec = RunSpec(
            id=os.urandom(16).hex(),
            experiment=self.experiment,
            name=run_name or random_name(),
            user=user_name(),
            tags=tags,
            parent=self.id,
        )
        child = ActiveRun(spec, spool=self.folder.parent, address=self.address)
        child.log_params(self._params)
        return child

    def cut(self, step: int) -> None:
        """Drop the run's points behind a step, because a resumed training logs them again."""
        self._begins_again = False
        self._append(line_of(["cut", int(step)]))

    # Commands ---------------------------------------------------------------------------------------------------------

    def take_commands(self, handler: Callable[[Sequence[RunCommand]], None]) -> None:
        """Let a function receive `save`, `stop` and `abort` from the hub. It is called in the sender's thread."""
        from .sender import COMMANDS_S

        self._handler = handler
        if self._sender is not None:
            self._sender.heartbeat_s = COMMANDS_S
            self._sender.hurry()

    def acknowledge(self, number: int, result: str) -> None:
        """Report what became of a command."""
        self._append(line_of(["ack", number, result]))
        if self._sender is not None:
            self._sender.hurry()

    def _commanded(self, commands: Sequence[RunCommand]) -> None:
        if self._handler is not None:
            self._handler(commands)

    # Life -------------------------------------------------------------------------------------------------------------

    @property
    def params(self) -> Mapping[str, str]:
        """Parameters that this process has logged."""
        return self._params

    @property
    def unsent(self) -> int:
        """Number of records that the hub has not acknowledged; without a hub, all of the run's folder."""
        count = self._writer.held if self._writer is not None else 0
        for path in logs_in(self.folder):
            try:
                log = SpoolLog(path)
            except FileNotFoundError:  # sent and deleted meanwhile
                continue
            count += log.unsent
            log.close()
        return count

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until the hub has everything that was logged so far. Return whether it has."""
        if self._sender is not None:
            return self._sender.flush(timeout_s)
        return self._writer is None

    def end(self, state: str = "completed", error: str | None = None, *, timeout_s: float = CLOSE_S) -> None:
        """End the run and send the rest. Idempotent; in a forked child it only closes the child's file.

        Args:
            state: "completed", "failed" or "cancelled".
            error: description of the failure.
            timeout_s: seconds to wait for the hub.

        Raises:
            UsageError: the state is another one.
        """
        if state not in _FINAL:
            raise UsageError(f"state={state!r}: is not an end; use one of {', '.join(sorted(_FINAL))}", field="state")
        if self.state != "running":
            return
        if os.getpid() == self._owner:
            self._append(line_of(["s", state, _now(), error]))
            self.state = state
        self.close(timeout_s)
        self.on_end()

    def close(self, timeout_s: float = CLOSE_S) -> int:
        """Stop writing without ending the run, and send the rest.

        Args:
            timeout_s: seconds to wait for the hub; a fifth of it if the hub does not answer.

        Returns:
            Number of records that are still unsent. They stay in `folder`.
        """
        with self._making:
            sender, self._sender = self._sender, None
            writer, self._writer = self._writer, None
        _active.discard(self)
        if writer is None:
            return 0
        is_complete = sender is not None and sender.close(timeout_s / 5 if sender.is_failing else timeout_s)
        writer.close()
        if is_complete:
            self._remove(writer)
            return 0
        unsent = self.unsent
        if sender is not None and unsent:
            _log.warning(
                "run %s: %d records are not sent yet. They are in %s; send them with `skyward hub sync %s`",
                self.id,
                unsent,
                self.folder,
                self.folder,
            )
        return unsent

    def _remove(self, writer: SpoolWriter) -> None:
        # An OSError: another process of the run has its file there, or the folder was never made.
        with contextlib.suppress(OSError):
            SpoolLog(writer.path).remove()
        for folder in (self.folder / "files", self.folder):
            with contextlib.suppress(OSError):
                folder.rmdir()

    # Within -----------------------------------------------------------------------------------------------------------

    def _begin(self, spec: RunSpec) -> None:
        fields = {
            "experiment": spec.experiment or DEFAULT_EXPERIMENT,
            "name": spec.name,
            "user": spec.user,
            "started_at": _now(),
            "tags": dict(spec.tags),
            "parent": spec.parent,
        }
        self._append(line_of(["run", fields]))
        if spec.is_resumed:
            self._append(line_of(["s", "running", _now(), None]))

    def _log_stored(self, key: str, digest: str, size: int) -> None:
        self._append(line_of(["a", check_key(key), size, digest]))

    def _line_of_metrics(self, step: int | None, timestamp: int, metrics: Mapping[str, float]) -> bytes:
        if not self._known_keys.issuperset(metrics):
            self._known_keys.update(check_key(key) for key in metrics)
        try:
            at = 0 if step is None else int(step)
            line = line_of_metrics(at, timestamp, metrics)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"metrics=...: not legal ({error}); log numbers only") from error
        if not self._begins_again:
            return line
        new = [key for key in metrics if key not in self._replaced]
        self._replaced.update(new)
        return b"".join(line_of(["cut", at - 1, key]) for key in new) + line

    def _append(self, lines: bytes) -> None:
        writer = self._writer
        if writer is None:
            writer = self._open()
        writer.append(lines)
        sender = self._sender
        if sender is not None:
            sender.notice()

    def _open(self) -> SpoolWriter:
        with self._making:
            if self.state != "running":
                raise UsageError(
                    f"run={self.id!r}: has ended; resume it with hub.start_run(resume={self.id!r})", field="run"
                )
            if self._writer is None:
                _active.add(self)
                self._writer = SpoolWriter(self.folder)
                if self.address is not None:
                    sender = LogSender(self.id, self.folder, self.address)
                    sender.commands = self._commanded
                    self._sender = SenderThread(sender, self._writer)
                    if self._handler is None:
                        self._sender.heartbeat_s = HEARTBEAT_S
                    else:
                        self.take_commands(self._handler)
            return self._writer

    def _forget_in_child(self) -> None:
        """Begin a file of its own in a forked child, at its first record. The parent's file and thread stay there."""
        writer, self._writer, self._sender = self._writer, None, None
        self._making = threading.RLock()
        self._handler = None
        if writer is not None:
            writer.forget()


_active: weakref.WeakSet[ActiveRun] = weakref.WeakSet()


def _forget_all_in_child() -> None:
    for run in list(_active):
        run._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)


def _now() -> int:
    return time.time_ns() // 1_000_000


def user_name() -> str:
    """Return the name of the user of this process."""
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no name for this number, as in some containers
        return str(os.getuid())


def error_text(error: BaseException) -> str:
    """Return the class and the message of an exception."""
    text = str(error)
    return f"{type(error).__name__}: {text}"[:5000] if text else type(error).__name__
