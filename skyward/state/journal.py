"""The journal of a pool of rented machines: what was asked for, written down before it is asked for.

A folder of this user for each pool, `~/.local/state/skyward/pools/<pool>.<id>` (XDG_STATE_HOME is respected), mode
0700. In it `journal.jsonl`, one record a line, each on the disk (fsync) before the next step is taken; and what else
the pool must not lose: its private key. Whoever finds the folder of a dead owner, in whatever process, can end what
the owner rented. The folder is removed when everything is known to be gone, never before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..core.ownership import check_path, make_private_folder
from ..core.process import start_time
from ..errors import UsageError

__all__ = ["Attempt", "Journal", "Owner", "journals", "machine_id", "recently_ended", "state_folder"]

_FILE = "journal.jsonl"
_ENDED_S = 600.0


def state_folder() -> str:
    """Where what must outlive a process is kept: `$XDG_STATE_HOME/skyward`, else `~/.local/state/skyward`.

    Raises:
        UsageError: a stranger may have put it there; see `skyward.core.ownership`.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # the standard says: a relative one is ignored
        base = os.path.expanduser("~/.local/state")
    folder = os.path.join(base, "skyward")
    check_path(folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that a pool belongs to. The start time tells it from a later process with the same number."""

    host: str
    boot: str
    pid: int
    started: str

    @classmethod
    def this_process(cls) -> Owner:
        pid = os.getpid()
        return cls(host=_host(), boot=_boot(), pid=pid, started=start_time(pid))

    @classmethod
    def from_tag(cls, tag: str) -> Owner | None:
        """The inverse of `tag`; None where the text is not one."""
        parts = tag.split("/")
        if len(parts) != 4 or not parts[2].isdigit():
            return None
        return cls(host=parts[0], boot=parts[1], pid=int(parts[2]), started=parts[3])

    @property
    def tag(self) -> str:
        """As text without secrets, for a provider's tags."""
        return f"{self.host}/{self.boot}/{self.pid}/{self.started}"

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, this user's on this machine: of others nobody here knows whether they live."""
        return self.host in (_host(), _host_before())

    def is_alive(self) -> bool:
        """Whether the process runs now. Of another machine's process: True, for it cannot be known."""
        if not self.is_here:
            return True
        return self.boot == _boot() and start_time(self.pid) == self.started != ""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One create call, known before it is made. `ids`: None until its outcome is known; () when nothing was made."""

    token: str
    at: float
    offer: dict[str, Any]
    nodes: tuple[int, ...]
    ids: tuple[str, ...] | None = None


@dataclass
class Journal:
    """One pool's records; made by `open_new` or `journals`, never directly.

    Thread-safe within a process. Only its owner, and after the owner's death whoever holds `exclusively`, writes.
    """

    folder: str
    pool: str
    id: str
    provider: str
    fields: dict[str, Any]
    """What makes the provider again; plain data, no secrets."""
    scope: str
    """Account and region, as the provider names them."""
    owner: Owner
    lease_s: float
    at: float
    attempts: dict[str, Attempt] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    asked: dict[str, float] = field(default_factory=dict)
    """By id: when its end was last asked for, by the provider's clock."""
    is_closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open_new(
        cls,
        *,
        pool: str,
        provider: str,
        fields: dict[str, Any],
        scope: str,
        lease_s: float = 0.0,
        owner: Owner | None = None,
        id: str = "",  # noqa: A002
    ) -> Journal:
        """The journal of a pool that this process, or `owner`, opens.

        id: for what was found by its tags, its own journal being lost: so that ending it is on record too.

        Raises UsageError if the state folder cannot be written.
        """
        identifier = id or uuid.uuid4().hex[:12]
        folder = os.path.join(_pools(), f"{pool}.{identifier}")
        journal = cls(
            folder=folder,
            pool=pool,
            id=identifier,
            provider=provider,
            fields=fields,
            scope=scope,
            owner=owner or Owner.this_process(),
            lease_s=lease_s,
            at=time.time(),
        )
        try:
            make_private_folder(folder)
            journal._write(journal._head())
            _sync_folder(folder)
            _sync_folder(_pools())
        except OSError as error:
            raise UsageError(
                f"state folder: {folder} cannot be written ({error.strerror}); nothing is rented without a record of "
                "it: set XDG_STATE_HOME to a folder of yours"
            ) from error
        return journal

    @classmethod
    def read(cls, folder: str) -> Journal | None:
        """The journal in that folder; None when there is none, or one whose first record was never finished."""
        try:
            with open(os.path.join(folder, _FILE), encoding="utf-8") as file:
                lines = file.read().split("\n")
        except (FileNotFoundError, NotADirectoryError):  # removed meanwhile, or no journal's folder
            return None
        records = []
        for line in lines:
            with contextlib.suppress(ValueError):  # half a line, of a process that was killed while it wrote
                records.append(json.loads(line))
        if not records or records[0].get("what") != "opened":
            return None
        head = dict(records[0])
        head.pop("what")
        head["owner"] = Owner(**head["owner"])
        journal = cls(folder=folder, **head)
        for record in records[1:]:
            journal._apply(record)
        return journal

    # Records --------------------------------------------------------------------------------------------------------

    def begin(self, *, offer: dict[str, Any], nodes: list[int], at: float) -> Attempt:
        """On the disk before the create call: its token, which also is a tag of whatever the call makes."""
        with self._lock:
            token = self.next_token
            self._record({"what": "create", "token": token, "offer": offer, "nodes": nodes, "at": at})
            return self.attempts[token]

    @property
    def next_token(self) -> str:
        """That of the attempt that `begin` makes next; for who alone begins them."""
        return f"{self.id}-{len(self.attempts)}"

    def settle(self, token: str, ids: list[str]) -> None:
        """The outcome of a create call: the ids of what it made, none if it made nothing."""
        with self._lock:
            self._record({"what": "created", "token": token, "ids": ids})

    def asking(self, ids: list[str], *, at: float) -> None:
        """Their end will now be asked for: whoever goes on after this process need not ask again at once."""
        with self._lock:
            self._note({"what": "asking", "ids": ids, "at": at})

    def ended(self, ids: list[str]) -> None:
        """The provider says that these are gone."""
        with self._lock:
            if ids:
                self._note({"what": "gone", "ids": ids})

    def close(self, *, at: float | None = None) -> None:
        """Everything is gone: the folder goes too, with the key in it. `at`: now, by the provider's clock."""
        with self._lock:
            if not self.is_closed:
                _remember_ended(self.id, time.time() if at is None else at)
                self._record({"what": "closed"})
                shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def living(self) -> dict[str, Attempt]:
        """By id: what was made and is not known to be gone."""
        return {i: a for a in self.attempts.values() for i in a.ids or () if i not in self.gone}

    @property
    def open_attempts(self) -> list[Attempt]:
        """Create calls of which nobody wrote down how they ended."""
        return [a for a in self.attempts.values() if a.ids is None]

    @contextlib.contextmanager
    def exclusively(self, *, restore: bool = False) -> Iterator[bool]:
        """Hold the journal against other processes that clean up. False: it is closed, by another or by its owner.

        Blocks while another holds it; that ends with the other's process at the latest. `restore`: for the owner. It
        writes all its records again where somebody removed them: what they are about may still cost money.
        """
        if restore and not self.is_closed and not self.is_there:
            with self._lock:
                self._restore()
        try:
            fd = os.open(self.folder, os.O_RDONLY)
        except FileNotFoundError:
            yield False
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with self._lock:
                now = Journal.read(self.folder)
                if now is not None:
                    self.attempts, self.gone, self.is_closed = now.attempts, now.gone, now.is_closed
                    self.asked = now.asked
            yield now is not None and not now.is_closed
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process that was forked meanwhile holds the descriptor too
            os.close(fd)

    @property
    def is_there(self) -> bool:
        """Whether nobody, this process included, has closed and removed it."""
        return not self.is_closed and os.path.exists(os.path.join(self.folder, _FILE))

    def _restore(self) -> None:
        make_private_folder(self.folder)
        self._write(self._head())
        for a in self.attempts.values():
            self._write({"what": "create", "token": a.token, "offer": a.offer, "nodes": a.nodes, "at": a.at})
            if a.ids is not None:
                self._write({"what": "created", "token": a.token, "ids": a.ids})
        self._write({"what": "gone", "ids": sorted(self.gone)})

    def _head(self) -> dict[str, Any]:
        names = ("pool", "id", "provider", "fields", "scope", "lease_s", "at")
        return {"what": "opened", "owner": asdict(self.owner), **{name: getattr(self, name) for name in names}}

    def _record(self, record: dict[str, Any]) -> None:
        if self.is_closed:
            raise UsageError(f"the journal of pool {self.pool!r} is closed")
        self._write(record)
        self._apply(record)

    def _note(self, record: dict[str, Any]) -> None:
        """A record that helps who comes next. Machines are ended even where the disk is full."""
        with contextlib.suppress(OSError):  # the disk is full or read-only; see above
            self._write(record)
        self._apply(record)

    def _write(self, record: dict[str, Any]) -> None:
        fd = os.open(os.path.join(self.folder, _FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # A newline first: behind half a record of one who was killed, this one is still a line of its own.
            line = b"\n" + json.dumps(record).encode()
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, "the disk is full", self.folder)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _apply(self, record: dict[str, Any]) -> None:
        what = record["what"]
        if what == "create":
            token = record["token"]
            self.attempts[token] = Attempt(
                token=token, at=record["at"], offer=record["offer"], nodes=tuple(record["nodes"])
            )
        elif what == "created":
            token = record["token"]
            self.attempts[token] = replace(self.attempts[token], ids=tuple(record["ids"]))
        elif what == "asking":
            self.asked.update(dict.fromkeys(record["ids"], record["at"]))
        elif what == "gone":
            self.gone.update(record["ids"])
        elif what == "closed":
            self.is_closed = True


def journals(pool: str | None = None) -> list[Journal]:
    """Those on this machine that are not closed, oldest first; `pool`: only of pools of that name."""
    try:
        names = os.listdir(_pools())
    except FileNotFoundError:  # nothing was ever rented from here
        return []
    known = [Journal.read(os.path.join(_pools(), name)) for name in names]
    open_ones = [j for j in known if j is not None and not j.is_closed and pool in (None, j.pool)]
    return sorted(open_ones, key=lambda journal: journal.at)


def recently_ended(now: float) -> set[str]:
    """The ids of journals that were closed in the last minutes: a cloud may still show their machines as running."""
    identifiers: set[str] = set()
    with contextlib.suppress(FileNotFoundError):  # nothing was ever closed here
        for name in os.listdir(_ended()):
            path = os.path.join(_ended(), name)
            try:
                with open(path, encoding="ascii") as file:
                    at = float(file.read())
            except (OSError, ValueError):  # being written, or removed, by another process
                continue
            if abs(now - at) <= _ENDED_S:
                identifiers.add(name)
            else:
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    os.unlink(path)
    return identifiers


def _remember_ended(identifier: str, at: float) -> None:
    with contextlib.suppress(OSError, UsageError):  # it only saves a second look
        make_private_folder(_ended())
        with open(os.path.join(_ended(), identifier), "w", encoding="ascii") as file:
            file.write(str(at))


def _ended() -> str:
    return os.path.join(state_folder(), "ended")


def _pools() -> str:
    return os.path.join(state_folder(), "pools")


def _sync_folder(path: str) -> None:
    """A new file is safe only when its folder is on the disk too."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _host() -> str:
    """This user on this machine, and the part of it in which process numbers mean what they mean here.

    The name counts too where homes may be shared by machines, and cloned machines may share their id. A Mac's id is its
    own, and its name is what the network of the moment calls it.
    """
    machine = machine_id()
    name = "" if machine and platform.system() == "Darwin" else platform.node()
    return _digest(f"{machine}|{name}|{_namespace()}|{os.getuid()}")


def _host_before() -> str:
    """What `_host` was until 2026-11, when the user did not count: records and tags of then are read forever."""
    machine = "" if platform.system() == "Darwin" else machine_id()
    return _digest(f"{machine}|{platform.node()}|{_namespace()}")


def _digest(text: str) -> str:
    """The machine's id is meant to stay on it, and tags are read by others."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _namespace() -> str:
    with contextlib.suppress(OSError):  # not Linux
        return os.readlink("/proc/self/ns/pid")
    return ""


@functools.cache
def machine_id() -> str:
    """The system's own, which outlives its name; empty where it says none."""
    if platform.system() == "Darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # no such program: the host's name must do
            argv = ["ioreg", "-rd1", "-c", "IOPlatformExpertDevice"]
            shown = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=10).stdout
            if match := re.search(r'"IOPlatformUUID" = "([^"]+)"', shown):
                return match[1]
        return ""
    with contextlib.suppress(OSError), open("/etc/machine-id", encoding="ascii") as file:  # not Linux
        return file.read().strip()
    return ""


def _boot() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # not Linux
        return file.read().strip()[:8]
    return "-"
