"""Endpoint and token of a run, in files that other processes of this user can find.

Each run has a folder `<state>/jobs/<job_id>` with mode 0700; `<state>` is `$XDG_STATE_HOME/skyward`, or
`~/.local/state/skyward`. It holds `endpoint.json`, which has no secret, and for a port `auth_token`, mode 0600 from its
first byte. Both appear complete or not at all (temporary file, fsync, rename), and are removed with the run. If their
process, known by pid and start time, is dead, the run was killed. Such files are not listed; the next run, or `sweep`,
removes them together with the socket.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ...calls.control import check_job_id
from ...core.ownership import make_private_folder
from ...errors import UsageError
from ...state.journal import Owner, state_folder

_ENDPOINT = "endpoint.json"
_TOKEN = "auth_token"
_OWNER = "owner.json"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Endpoint of one run: a socket of this machine, and a port if it was enabled.

    `host` is the address that the port is bound to.

    Example:
        for endpoint in runs():
            print(endpoint.job_id, endpoint.hostname, endpoint.port)
    """

    job_id: str
    host: str | None = None
    port: int | None = None
    socket: str | None = None
    pid: int
    started_at: float
    """Start time, in seconds since the epoch."""
    output_dir: str | None = None
    logging_dir: str | None = None
    has_auth: bool = False
    """Whether requests to the port need a token."""
    hostname: str = field(default_factory=platform.node)
    owner: Owner = field(default_factory=Owner.this_process)

    @property
    def is_alive(self) -> bool:
        """Return whether the process that wrote it is running."""
        return self.owner.is_alive()

    @property
    def is_here(self) -> bool:
        """Return whether it was written on this machine."""
        return self.owner.is_here


def default_job_id() -> str:
    """Return `job_<time>_<host>_<process>`, with a number if a run of this user has that id."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node())[:60]
    base = f"job_{time.strftime('%Y%m%d-%H%M%S')}_{host}_{os.getpid()}"
    number, name = 1, base
    while os.path.exists(_folder(name)):
        number += 1
        name = f"{base}_{number}"
    return name


def claim(job_id: str) -> None:
    """Create the folder of a run, and take over one of a dead process.

    Raises:
        UsageError: a living run has the id, or the folder cannot be created.
    """
    path = _folder(check_job_id(job_id))
    try:
        with _locked(os.path.dirname(path)):
            owner = _owner(path)
            if owner is not None and owner.is_alive():
                raise UsageError(
                    f"job_id={job_id!r}: the run of process {owner.pid} has this id; choose another, or leave it out"
                )
            _remove_dead(path)
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)  # a strict umask may have removed bits
            _write(path, _OWNER, json.dumps(asdict(Owner.this_process())))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror}; set XDG_STATE_HOME to a folder of yours"
        ) from error


def announce(endpoint: Endpoint, token: str | None) -> None:
    """Write the files of a listening run. Raise UsageError if they cannot be written."""
    path = _folder(endpoint.job_id)
    try:
        if token is not None:
            _write(path, _TOKEN, token)
        _write(path, _ENDPOINT, json.dumps(asdict(endpoint)))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error.strerror}; set XDG_STATE_HOME to a folder of yours"
        ) from error


def withdraw(job_id: str) -> None:
    """Remove the files that this process wrote for a run. Idempotent; files of another process stay."""
    path = _folder(check_job_id(job_id))
    if _owner(path) == Owner.this_process():
        _remove(path)


def endpoints() -> list[Endpoint]:
    """Return the endpoints of living runs, oldest first."""
    living = [endpoint for path in _folders() if (endpoint := _read(path)) is not None and endpoint.is_alive]
    return sorted(living, key=lambda endpoint: (endpoint.started_at, endpoint.job_id))


def endpoint_of(job_id: str) -> Endpoint | None:
    """Return the endpoint of one run; None if there is none, or its process is dead."""
    endpoint = _read(_folder(check_job_id(job_id)))
    return endpoint if endpoint is not None and endpoint.is_alive else None


def read_token(job_id: str) -> str | None:
    """Return the token of a run; None if it has none. Raise UsageError if it cannot be read."""
    path = os.path.join(_folder(check_job_id(job_id)), _TOKEN)
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except FileNotFoundError:  # a run without a port has none
        return None
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{path}: the token of {job_id!r} cannot be read: {error}; run as its owner") from error


def sweep(job_id: str | None = None) -> list[str]:
    """Remove the remains of killed runs, or of one of them. Files of another machine in a shared folder stay.

    Args:
        job_id: id of the run; None: all.

    Returns:
        The ids of the runs whose remains were removed.

    Raises:
        UsageError: `job_id` is not a valid id.

    Example:
        print("removed", sweep())
    """
    if job_id is not None:
        check_job_id(job_id)
    root = os.path.join(state_folder(), "jobs")
    if not os.path.isdir(root):
        return []
    swept = []
    with _locked(root):
        for path in _folders():
            owner = _owner(path)
            is_meant = job_id in (None, os.path.basename(path))
            if is_meant and (owner is None or not owner.is_alive()):
                _remove_dead(path)
                swept.append(os.path.basename(path))
    return sorted(swept)


# Files --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(root: str) -> Iterator[None]:
    """Lock the folder of runs, so that a folder without an owner is a stale one and not one in the making."""
    make_private_folder(root)
    fd = os.open(os.path.join(root, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _folder(job_id: str) -> str:
    return os.path.join(state_folder(), "jobs", job_id)


def _folders() -> Iterator[str]:
    root = os.path.join(state_folder(), "jobs")
    with contextlib.suppress(OSError):  # no run has created the folder yet
        for name in os.listdir(root):
            with contextlib.suppress(UsageError):  # not the folder of a run
                check_job_id(name)
                yield os.path.join(root, name)


def _write(folder: str, name: str, text: str) -> None:
    """Write a complete file or none, private from its first byte."""
    path = os.path.join(folder, name)
    made = f"{path}.{secrets.token_hex(4)}.new"
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(made, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the error that led here will be raised
            os.unlink(made)
        raise
    _sync(folder)


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _remove_dead(path: str) -> None:
    """Remove the folder and the socket of a dead run. A server that closes removes its socket itself."""
    endpoint = _read(path)
    if endpoint is not None and endpoint.socket is not None and endpoint.is_here:
        with contextlib.suppress(OSError):  # its server removed it, or it belongs to someone else
            os.unlink(endpoint.socket)
    _remove(path)


def _loaded(path: str, name: str) -> Any:
    """Load a JSON file; return None if it is missing or not JSON."""
    try:
        with open(os.path.join(path, name), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):  # missing, or written by another program
        return None


def _owner(path: str) -> Owner | None:
    try:
        return Owner(**_loaded(path, _OWNER))
    except TypeError:  # missing, or with the fields of another version
        return None


def _read(path: str) -> Endpoint | None:
    fields = _loaded(path, _ENDPOINT)
    try:
        return Endpoint(**{**fields, "owner": Owner(**fields["owner"])})
    except (TypeError, KeyError):  # missing, or with the fields of another version
        return None
