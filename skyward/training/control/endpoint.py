"""Where a run listens, and the secret that its port asks for: files that other processes of this user find.

A folder for each run, `<state>/jobs/<job_id>`, 0700; `<state>` is `$XDG_STATE_HOME/skyward`, else
`~/.local/state/skyward`. In it `endpoint.json`, which has no secret, and for a port `auth_token`, 0600 from its first
byte. Both are whole or not there (a temporary file, fsync, rename), and go with the run. Those of a process that is
dead, by its number and its start time, are of a run that was killed: nobody lists them, and the next run, or `sweep`,
removes them and its socket.
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

__all__ = [
    "Endpoint",
    "announce",
    "claim",
    "default_job_id",
    "endpoint_of",
    "endpoints",
    "read_token",
    "sweep",
    "withdraw",
]

_ENDPOINT = "endpoint.json"
_TOKEN = "auth_token"
_OWNER = "owner.json"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where one run listens: at a socket of this machine, and at a port where it was asked to.

    `host` is the address that the port is bound to.
    """

    job_id: str
    host: str | None = None
    port: int | None = None
    socket: str | None = None
    pid: int
    started_at: float
    """Seconds since the epoch."""
    output_dir: str | None = None
    logging_dir: str | None = None
    has_auth: bool = False
    """Whether requests to the port bring a token."""
    hostname: str = field(default_factory=platform.node)
    owner: Owner = field(default_factory=Owner.this_process)

    @property
    def is_alive(self) -> bool:
        """Whether the process that wrote it runs."""
        return self.owner.is_alive()

    @property
    def is_here(self) -> bool:
        """Whether this machine wrote it."""
        return self.owner.is_here


def default_job_id() -> str:
    """`job_<time>_<host>_<process>`, which no other run of this user has."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", platform.node())[:60]
    base = f"job_{time.strftime('%Y%m%d-%H%M%S')}_{host}_{os.getpid()}"
    number, name = 1, base
    while os.path.exists(_folder(name)):
        number += 1
        name = f"{base}_{number}"
    return name


def claim(job_id: str) -> None:
    """Make the folder of a run. One of a dead process is taken over.

    Raises: UsageError when a run that lives has that id, or the folder cannot be made.
    """
    path = _folder(check_job_id(job_id))
    try:
        with _locked(os.path.dirname(path)):
            owner = _owner(path)
            if owner is not None and owner.is_alive():
                raise UsageError(
                    f"job_id: {job_id!r} is that of a run of process {owner.pid}; choose another, or leave it out"
                )
            _remove_dead(path)
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)  # a umask of the user's may have left less
            _write(path, _OWNER, json.dumps(asdict(Owner.this_process())))
    except OSError as error:
        raise UsageError(f"state folder: {path} cannot be written: {error.strerror}") from error


def announce(endpoint: Endpoint, token: str | None) -> None:
    """Write the files of a run that listens. Raises: UsageError when they cannot be written."""
    path = _folder(endpoint.job_id)
    try:
        if token is not None:
            _write(path, _TOKEN, token)
        _write(path, _ENDPOINT, json.dumps(asdict(endpoint)))
    except OSError as error:
        raise UsageError(f"state folder: {path} cannot be written: {error.strerror}") from error


def withdraw(job_id: str) -> None:
    """Remove what this process wrote for a run. Idempotent; what another process has written stays."""
    path = _folder(check_job_id(job_id))
    if _owner(path) == Owner.this_process():
        _remove(path)


def endpoints() -> list[Endpoint]:
    """Those of runs whose process lives, oldest first."""
    found = [endpoint for path in _folders() if (endpoint := _read(path)) is not None and endpoint.is_alive]
    return sorted(found, key=lambda endpoint: (endpoint.started_at, endpoint.job_id))


def endpoint_of(job_id: str) -> Endpoint | None:
    """That of one run; None: there is none, or its process is dead."""
    endpoint = _read(_folder(check_job_id(job_id)))
    return endpoint if endpoint is not None and endpoint.is_alive else None


def read_token(job_id: str) -> str | None:
    """The run's secret; None: it has none. Raises: UsageError when it cannot be read."""
    path = os.path.join(_folder(check_job_id(job_id)), _TOKEN)
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except FileNotFoundError:  # a run without a port has none
        return None
    except (OSError, UnicodeError) as error:
        raise UsageError(f"the token of {job_id!r}, {path}, cannot be read: {error}") from error


def sweep(job_id: str | None = None) -> list[str]:
    """Remove what killed runs have left, or that one; their ids. What another machine wrote into a shared folder stays.

    Raises: UsageError for what is no job id.
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
    """One process at a time decides what is stale: a folder without an owner is not one that is being made."""
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
    with contextlib.suppress(OSError):  # no run has made the folder yet
        for name in os.listdir(root):
            with contextlib.suppress(UsageError):  # a folder that is no run of ours
                check_job_id(name)
                yield os.path.join(root, name)


def _write(folder: str, name: str, text: str) -> None:
    """The whole file or none, for this user alone from its first byte on."""
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
        with contextlib.suppress(OSError):  # the error that led here is raised
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
    """With the socket, which a server that is closed removes itself."""
    endpoint = _read(path)
    if endpoint is not None and endpoint.socket is not None and endpoint.is_here:
        with contextlib.suppress(OSError):  # its server removed it, or nobody may
            os.unlink(endpoint.socket)
    _remove(path)


def _loaded(path: str, name: str) -> Any:
    """None: it is not there, or was written by something else."""
    try:
        with open(os.path.join(path, name), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):  # as the docstring says
        return None


def _owner(path: str) -> Owner | None:
    try:
        return Owner(**_loaded(path, _OWNER))
    except TypeError:  # nothing is there, or fields of another version
        return None


def _read(path: str) -> Endpoint | None:
    said = _loaded(path, _ENDPOINT)
    try:
        return Endpoint(**{**said, "owner": Owner(**said["owner"])})
    except (TypeError, KeyError):  # nothing is there, or fields of another version
        return None
