"""Functions of `skyward.hub` that log to the current run, with MLflow's names and order of arguments."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...node.slot.runtime import current_call
from .active import ActiveRun, RunSpec, error_text, user_name
from .names import check_key, random_name
from .settings import EXPERIMENT, JOB, JOB_TAG, Address, address_of, can_reach, spool_folder
from .tunnel import program_hub


@dataclass
class _Current:
    """Hub of this process, and its open runs; the last one is the current one."""

    address: Address | None = None
    is_connected: bool = False
    spool: Path | None = None
    experiment: str | None = None
    program_experiment: str | None = None
    """In a task: the experiment of the pool's program."""
    runs: list[ActiveRun] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)


_current = _Current()


def connect(
    url: str | None = None,
    token: str | None = None,
    project: str | None = None,
    *,
    spool: str | os.PathLike[str] | None = None,
) -> Address | None:
    """Choose the hub of this process's later runs. Nothing is sent yet, so it need not answer.

    Args:
        url: address such as `http://127.0.0.1:8057`. None: `SKYWARD_HUB_URL`; without that, a run is a folder only.
        token: token; None: `SKYWARD_HUB_TOKEN`.
        project: project; None: `SKYWARD_HUB_PROJECT`, or the token's.
        spool: folder of all runs' folders. None: `SKYWARD_HUB_SPOOL`, or `~/.local/state/skyward/hub/runs`.

    Returns:
        The address; None without a hub.

    Raises:
        UsageError: the address is not one.

    Example:
        >>> from skyward import hub
        >>> hub.connect("http://127.0.0.1:8057", token="sky_1_secret", project="vision")
        Address(url='http://127.0.0.1:8057', token='***', project='vision')
        >>> hub.disconnect()
    """
    address = address_of(url, token, project)
    with _current.lock:
        _current.address, _current.is_connected = address, True
        if spool is not None:
            _current.spool = spool_folder(spool)
    return address


def disconnect() -> None:
    """Forget what `connect` chose; the environment counts again.

    Example:
        >>> from skyward import hub
        >>> hub.disconnect()
    """
    with _current.lock:
        _current.address, _current.is_connected, _current.spool, _current.experiment = None, False, None, None


def current_address() -> Address | None:
    """Return the hub of this process: what `connect` chose, or the environment's.

    In a task without one, or with one that its node does not reach, it is the hub of the pool's program.
    """
    if _current.is_connected:
        return _current.address
    named = address_of()
    if current_call() is None or (named is not None and can_reach(named)):
        return named
    through, experiment = program_hub()
    _current.program_experiment = experiment
    return through or named


def current_experiment() -> str | None:
    """Return the experiment of later runs: that of `set_experiment`, the environment's, or that of the program."""
    return _current.experiment or os.environ.get(EXPERIMENT) or _current.program_experiment or None


def current_spool() -> Path:
    """Return the folder of all runs' folders."""
    return _current.spool or spool_folder()


def set_experiment(name: str) -> str:
    """Choose the experiment of later runs.

    Args:
        name: its name; made at the first run if it is missing.

    Example:
        >>> from skyward import hub
        >>> hub.set_experiment("digits")
        'digits'
        >>> hub.disconnect()
    """
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"name={name!r}: is not a name of an experiment; pass a text", field="name", value=name)
    _current.experiment = name
    return name


def start_run(
    run_name: str | None = None,
    experiment: str | None = None,
    resume: str | None = None,
    *,
    tags: Mapping[str, object] | None = None,
) -> ActiveRun:
    """Begin a run, or go on with one. Use the result in a `with` block, which ends the run.

    Args:
        run_name: name; None: a random one such as `swift-heron-204`.
        experiment: name of its experiment. None: that of `set_experiment`, `SKYWARD_HUB_EXPERIMENT`, or "Default".
        resume: id of a run to go on with. It may have ended, or its process may have died.
        tags: first tags.

    Raises:
        UsageError: an argument is not legal.

    Example:
        >>> from skyward import hub
        >>> with hub.start_run(run_name="baseline", experiment="digits") as run:
        ...     run.log_metrics({"loss": 0.5}, step=1)
        ...     run.set_tags({"note": "first try"})
        >>> len(run.id)
        32
    """
    texts = {check_key(key): str(value) for key, value in (tags or {}).items()}
    if job := os.environ.get(JOB):
        texts[JOB_TAG] = job
    address = current_address()
    if resume is None:
        spec = RunSpec(
            id=os.urandom(16).hex(),
            experiment=experiment or current_experiment(),
            name=run_name or random_name(),
            user=user_name(),
            tags={"mlflow.source.name": sys.argv[0] if sys.argv else "", **texts},
        )
    else:
        spec = RunSpec(
            id=_checked_id(resume),
            experiment=experiment or current_experiment(),
            name=run_name,
            user=user_name(),
            tags=texts,
            is_resumed=True,
        )
    return open_run(spec, spool=current_spool(), address=address)


def open_run(spec: RunSpec, *, spool: Path, address: Address | None) -> ActiveRun:
    """Open a run as the current one of this process, until it ends."""
    run = ActiveRun(spec, spool=spool, address=address)
    with _current.lock:
        _current.runs.append(run)
    run.on_end = lambda: _forget(run)
    return run


def active_run() -> ActiveRun | None:
    """Return the run that `start_run` began last and that has not ended; None if there is none.

    Example:
        >>> from skyward import hub
        >>> hub.active_run() is None
        True
    """
    with _current.lock:
        return _current.runs[-1] if _current.runs else None


def end_run(status: str = "FINISHED") -> None:
    """End the current run, if there is one.

    Args:
        status: "FINISHED", "FAILED" or "KILLED" as in MLflow, or "completed", "failed" or "cancelled".

    Example:
        >>> from skyward import hub
        >>> run = hub.start_run()
        >>> hub.end_run()
        >>> run.state
        'completed'
    """
    run = active_run()
    if run is not None:
        run.end(_STATES.get(status, status))


def log_metric(key: str, value: float, step: int | None = None) -> None:
    """Log one metric to the current run; without one, begin a run.

    Example:
        >>> from skyward import hub
        >>> hub.log_metric("loss", 0.25, step=10)
        >>> hub.end_run()
    """
    _run().log_metrics({key: value}, step)


def log_metrics(metrics: Mapping[str, float], step: int | None = None) -> None:
    """Log metrics at a step to the current run; without one, begin a run.

    Example:
        >>> from skyward import hub
        >>> hub.log_metrics({"loss": 0.25, "accuracy": 0.9}, step=10)
        >>> hub.end_run()
    """
    _run().log_metrics(metrics, step)


def log_param(key: str, value: object) -> None:
    """Log one parameter to the current run; without one, begin a run.

    Example:
        >>> from skyward import hub
        >>> hub.log_param("lr", 3e-4)
        >>> hub.end_run()
    """
    _run().log_params({key: value})


def log_params(params: Mapping[str, object]) -> None:
    """Log parameters to the current run; without one, begin a run.

    Example:
        >>> from skyward import hub
        >>> hub.log_params({"lr": 3e-4, "batch_size": 32})
        >>> hub.end_run()
    """
    _run().log_params(params)


def set_tag(key: str, value: object) -> None:
    """Set one tag of the current run; without one, begin a run.

    Example:
        >>> from skyward import hub
        >>> hub.set_tag("note", "warm start")
        >>> hub.end_run()
    """
    _run().set_tags({key: value})


def set_tags(tags: Mapping[str, object]) -> None:
    """Set tags of the current run; without one, begin a run.

    Example:
        >>> from skyward import hub
        >>> hub.set_tags({"team": "vision", "note": "warm start"})
        >>> hub.end_run()
    """
    _run().set_tags(tags)


def log_artifact(local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
    """Log a file or folder to the current run; without one, begin a run.

    Args:
        local_path: the file or folder.
        artifact_path: folder within the run's artifacts; None: their root. Methods of a run take the key first and
            this path second.

    Example:
        >>> import pathlib, tempfile
        >>> from skyward import hub
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "notes.txt"
        >>> _ = path.write_text("all is well")
        >>> hub.log_artifact(path, "texts")
        >>> hub.end_run()
    """
    name = Path(local_path).resolve().name
    _run().log_artifact(f"{artifact_path}/{name}" if artifact_path else name, local_path)


def log_text(text: str, artifact_file: str) -> None:
    """Log a text as an artifact of the current run; without one, begin a run.

    Example:
        >>> from skyward import hub
        >>> hub.log_text("all is well", "notes.txt")
        >>> hub.end_run()
    """
    _run().log_text(artifact_file, text)


def log_table(data: Any, artifact_file: str) -> None:
    """Log a table as an artifact of the current run; without one, begin a run.

    Args:
        data: a list of dicts, a dict of columns, or a pandas DataFrame.
        artifact_file: key of the artifact.

    Example:
        >>> from skyward import hub
        >>> hub.log_table([{"prompt": "2+2", "answer": "4"}], "samples.json")
        >>> hub.end_run()
    """
    _run().log_table(artifact_file, data)


def _run() -> ActiveRun:
    return active_run() or start_run()


def _forget(run: ActiveRun) -> None:
    with _current.lock:
        if run in _current.runs:
            _current.runs.remove(run)


def _checked_id(run_id: str) -> str:
    if not isinstance(run_id, str) or len(run_id) != 32 or not set(run_id) <= set("0123456789abcdef"):
        raise UsageError(
            f"resume={run_id!r:.60}: is not the id of a run; pass its 32 hexadecimal digits",
            field="resume",
            value=run_id,
        )
    return run_id


_STATES = {"FINISHED": "completed", "FAILED": "failed", "KILLED": "cancelled"}
_EXIT_S = 10.0


def _end_all() -> None:
    """End the runs that nobody ended, when the program ends. One that an exception ended has failed."""
    error = getattr(sys, "last_value", None)
    deadline = time.monotonic() + _EXIT_S
    for run in reversed(list(_current.runs)):
        left_s = max(0.5, deadline - time.monotonic())
        if error is None or isinstance(error, SystemExit):
            run.end(timeout_s=left_s)
        elif isinstance(error, KeyboardInterrupt):
            run.end("cancelled", "KeyboardInterrupt", timeout_s=left_s)
        else:
            run.end("failed", error_text(error), timeout_s=left_s)


atexit.register(_end_all)
