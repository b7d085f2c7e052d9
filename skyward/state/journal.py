"""Journal of a pool of rented machines: a write-ahead record of every request.

Each pool has a folder of this user, `~/.local/state/skyward/pools/<pool>.<id>` (XDG_STATE_HOME is respected), mode
0700. It holds `journal.jsonl`, with one record per line, and other data that must survive, such as the pool's private
key. Each record is on the disk (fsync) before the next step is taken. So any process that finds the folder of a dead
owner can end the machines that the owner rented. The folder is removed once everything is known to be gone, never
earlier.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib
import json
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, field, replace
from typing import Any

from ..core.ownership import check_path, make_private_folder
from ..core.process import start_time
from ..core.records import dataclass
from ..errors import UsageError

_FILE = "journal.jsonl"
_ENDED_S = 600.0


def state_folder() -> str:
    """Return the folder for state that outlives a process: `$XDG_STATE_HOME/skyward`, or `~/.local/state/skyward`.

    Raises:
        UsageError: Another user may have put it there; see `skyward.core.ownership`.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification ignores relative paths
        base = os.path.expanduser("~/.local/state")
    folder = os.path.join(base, "skyward")
    check_path(folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Process that a pool belongs to. The start time distinguishes it from a later process with the same number."""

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
        """Parse a `tag`; None if the text is not one."""
        parts = tag.split("/")
        if len(parts) != 4 or not parts[2].isdigit():
            return None
        return cls(host=parts[0], boot=parts[1], pid=int(parts[2]), started=parts[3])

    @property
    def tag(self) -> str:
        """Text form without secrets, for a provider's tags."""
        return f"{self.host}/{self.boot}/{self.pid}/{self.started}"

    @property
    def is_here(self) -> bool:
        """Return whether this user runs, or ran, the process on this machine. The state of others is unknown here."""
        return self.host in (_host(), _host_before())

    def is_alive(self) -> bool:
        """Return whether the process runs now. True for processes of other machines, because nobody here can know."""
        if not self.is_here:
            return True
        return self.boot == _boot() and start_time(self.pid) == self.started != ""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Create call, recorded before it is made. `ids`: None until the outcome is known; () if nothing was created."""

    token: str
    at: float
    offer: dict[str, Any]
    nodes: tuple[int, ...]
    ids: tuple[str, ...] | None = None


@dataclass
class Journal:
    """Records of one pool, made by `open_new` or `journals`, never directly.

    Thread-safe within a process. Only its owner writes; after the owner's death, whichever process holds it
    `exclusively`.
    """

    folder: str
    pool: str
    id: str
    provider: str
    fields: dict[str, Any]
    """Arguments that make the provider again; plain data, no secrets."""
    scope: str
    """Account and region, as the provider names them."""
    owner: Owner
    lease_s: float
    at: float
    attempts: dict[str, Attempt] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    asked: dict[str, float] = field(default_factory=dict)
    """Id -> last request to end it, by the provider's clock."""
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
        """Create the journal of a pool that this process, or `owner`, opens.

        Args:
            pool: Name of the pool.
            provider: Name of the provider.
            fields: Plain data, without secrets, from which the provider is made again.
            scope: Account and region, as the provider names them.
            lease_s: Time that a machine lives without contact.
            owner: Process that owns the pool; None for this one.
            id: Id from the tags of found machines whose own journal is lost, so that their end is on record too.

        Raises:
            UsageError: The state folder is not writable.
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
                f"state folder: {folder} cannot be written ({error.strerror}), and nothing is rented without a record; "
                "set XDG_STATE_HOME to a folder of yours"
            ) from error
        return journal

    @classmethod
    def read(cls, folder: str) -> Journal | None:
        """Read the journal in a folder; None if there is none, or if its first record was never completed."""
        try:
            with open(os.path.join(folder, _FILE), encoding="utf-8") as file:
                lines = file.read().split("\n")
        except (FileNotFoundError, NotADirectoryError):  # removed meanwhile, or not the folder of a journal
            return None
        records = []
        for line in lines:
            with contextlib.suppress(ValueError):  # half a line from a process that was killed while writing
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

    # Copies ---------------------------------------------------------------------------------------------------------

    def packed(self) -> dict[str, str]:
        """Return its files as text by their names, for `unpack` on another machine. One is the machines' private key.

        Raises:
            UsageError: They cannot be read.
        """
        packed = {}
        try:
            for name in sorted(os.listdir(self.folder)):
                with open(os.path.join(self.folder, name), encoding="utf-8") as file:
                    packed[name] = file.read()
        except (OSError, ValueError) as error:
            raise UsageError(f"state folder: {self.folder} cannot be read: {error}; check its permissions") from error
        return packed

    @staticmethod
    def unpack(pool: str, identifier: str, packed: Mapping[str, str]) -> None:
        """Write the files of another machine's journal, unless they are here. This process owns the copy.

        So it is left over once the pool has ended, like that of any process which has died.

        Raises:
            UsageError: They cannot be written.
            ValueError, KeyError: They are not those of a journal.
        """
        folder = os.path.join(_pools(), f"{pool}.{identifier}")
        if any(os.path.basename(name) != name for name in (f"{pool}.{identifier}", *packed)):
            raise ValueError("not names of files")  # words: ok, the caller words it
        first, *others = packed[_FILE].strip().split("\n")
        head = {**json.loads(first), "owner": asdict(Owner.this_process())}
        files = {**packed, _FILE: "\n".join([json.dumps(head), *others])}
        if os.path.exists(os.path.join(folder, _FILE)):
            return
        try:
            make_private_folder(folder)
            for name in sorted(files, key=lambda name: name == _FILE):  # the records last: they make it a journal
                fd = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with open(fd, "w", encoding="utf-8") as file:
                    file.write(files[name])
        except OSError as error:
            raise UsageError(f"state folder: {folder} cannot be written: {error.strerror}; check the disk") from error

    # Records --------------------------------------------------------------------------------------------------------

    def begin(self, *, offer: dict[str, Any], nodes: list[int], at: float) -> Attempt:
        """Record a create call before it is made. Its token also becomes a tag of whatever the call creates."""
        with self._lock:
            token = self.next_token
            self._record({"what": "create", "token": token, "offer": offer, "nodes": nodes, "at": at})
            return self.attempts[token]

    @property
    def next_token(self) -> str:
        """Token of the next attempt; valid for the only process that begins attempts."""
        return f"{self.id}-{len(self.attempts)}"

    def settle(self, token: str, ids: list[str]) -> None:
        """Record the outcome of a create call: the ids of the machines, empty if it created none."""
        with self._lock:
            self._record({"what": "created", "token": token, "ids": ids})

    def asking(self, ids: list[str], *, at: float) -> None:
        """Record that the end of machines is about to be requested, so that a successor need not repeat it at once."""
        with self._lock:
            self._note({"what": "asking", "ids": ids, "at": at})

    def ended(self, ids: list[str]) -> None:
        """Record that the provider confirms these machines are gone."""
        with self._lock:
            if ids:
                self._note({"what": "gone", "ids": ids})

    def close(self, *, at: float | None = None) -> None:
        """Remove the folder, including the key, because everything is gone. `at`: now, by the provider's clock."""
        with self._lock:
            if not self.is_closed:
                _remember_ended(self.id, time.time() if at is None else at)
                self._record({"what": "closed"})
                import shutil  # only here, as pools that rent nothing import this module

                shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def living(self) -> dict[str, Attempt]:
        """Id -> attempt, for machines that were created and are not known to be gone."""
        return {i: a for a in self.attempts.values() for i in a.ids or () if i not in self.gone}

    @property
    def open_attempts(self) -> list[Attempt]:
        """Create calls whose outcome is not on record."""
        return [a for a in self.attempts.values() if a.ids is None]

    @contextlib.contextmanager
    def exclusively(self, *, restore: bool = False) -> Iterator[bool]:
        """Lock the journal against other processes that clean up. Yields False if it is already closed.

        Blocks while another process holds the lock, at the latest until that process ends. `restore` is for the owner:
        it writes all records again if somebody removed them, because the machines in them may still cost money.
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
                is_open = self._read_again()
            yield is_open
        finally:
            # Closing is not enough: a process forked meanwhile holds the descriptor, and with it the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def refresh(self) -> None:
        """Learn what other processes have recorded."""
        with self._lock:
            self._read_again()

    def _read_again(self) -> bool:
        """Read the records, and return whether the journal is open. Needs the lock."""
        now = Journal.read(self.folder)
        if now is None:
            return False
        self.attempts, self.gone, self.is_closed, self.asked = now.attempts, now.gone, now.is_closed, now.asked
        return not now.is_closed

    @property
    def is_there(self) -> bool:
        """Return whether the journal exists: nobody, including this process, has closed and removed it."""
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
            raise UsageError(f"journal of pool {self.pool!r}: is closed; open a new one")
        self._write(record)
        self._apply(record)

    def _note(self, record: dict[str, Any]) -> None:
        """Write a record that only helps a successor. Machines are ended even if the disk is full."""
        with contextlib.suppress(OSError):  # a full or read-only disk
            self._write(record)
        self._apply(record)

    def _write(self, record: dict[str, Any]) -> None:
        fd = os.open(os.path.join(self.folder, _FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            # The newline comes first, so that half a record of a killed process does not spoil this one. One write call
            # keeps a record in one piece.
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
    """Return the open journals on this machine, oldest first; with `pool`, only those of pools with that name."""
    try:
        names = os.listdir(_pools())
    except FileNotFoundError:  # nothing was ever rented from here
        return []
    known = [Journal.read(os.path.join(_pools(), name)) for name in names]
    selected = [j for j in known if j is not None and not j.is_closed and pool in (None, j.pool)]
    return sorted(selected, key=lambda journal: journal.at)


def recently_ended(now: float) -> set[str]:
    """Return the ids of journals closed in the last minutes. A cloud may still list their machines as running."""
    identifiers: set[str] = set()
    with contextlib.suppress(FileNotFoundError):  # nothing was ever closed here
        for name in os.listdir(_ended()):
            path = os.path.join(_ended(), name)
            try:
                with open(path, encoding="ascii") as file:
                    at = float(file.read())
            except (OSError, ValueError):  # another process is writing or removing it
                continue
            if abs(now - at) <= _ENDED_S:
                identifiers.add(name)
            else:
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    os.unlink(path)
    return identifiers


def _remember_ended(identifier: str, at: float) -> None:
    with contextlib.suppress(OSError, UsageError):  # optional: it only saves a repeated check
        make_private_folder(_ended())
        with open(os.path.join(_ended(), identifier), "w", encoding="ascii") as file:
            file.write(str(at))


def _ended() -> str:
    return os.path.join(state_folder(), "ended")


def _pools() -> str:
    return os.path.join(state_folder(), "pools")


def _sync_folder(path: str) -> None:
    """Flush a folder: a new file is durable only when its folder is on the disk too."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _host() -> str:
    """Identify this user on this machine, within its namespace of process numbers.

    The host name counts too, because homes may be shared by machines and cloned machines may share their id. A Mac's id
    is unique, and its name changes with the network.
    """
    machine = machine_id()
    name = "" if machine and platform.system() == "Darwin" else platform.node()
    return _digest(f"{machine}|{name}|{_namespace()}|{os.getuid()}")


def _host_before() -> str:
    """Identify the host as before 2026-11, without the user: records and tags from then stay readable."""
    machine = "" if platform.system() == "Darwin" else machine_id()
    return _digest(f"{machine}|{platform.node()}|{_namespace()}")


def _digest(text: str) -> str:
    """Hash a text: a machine's id should stay on it, and others can read tags."""
    digest: str = _sha256()(text.encode()).hexdigest()
    return digest[:12]


def _sha256() -> Any:
    """Return SHA-256 without OpenSSL, which takes 0.8 MiB and 4 ms in each client. `random` does the same."""
    for module in ("_sha2", "_sha256"):  # Python 3.12 and later; 3.11
        with contextlib.suppress(ImportError):  # built without it
            return importlib.import_module(module).sha256
    import hashlib

    return hashlib.sha256


def _namespace() -> str:
    with contextlib.suppress(OSError):  # not Linux
        return os.readlink("/proc/self/ns/pid")
    return ""


@functools.cache
def machine_id() -> str:
    """Return the system's own id, which survives a new host name; empty if there is none."""
    if platform.system() == "Darwin":
        import subprocess

        with contextlib.suppress(OSError, subprocess.SubprocessError):  # without the program, the host name must do
            argv = ["ioreg", "-rd1", "-c", "IOPlatformExpertDevice"]
            output = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=10).stdout
            if match := re.search(r'"IOPlatformUUID" = "([^"]+)"', output):
                return match[1]
        return ""
    with contextlib.suppress(OSError), open("/etc/machine-id", encoding="ascii") as file:  # not Linux
        return file.read().strip()
    return ""


def _boot() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # not Linux
        return file.read().strip()[:8]
    return "-"
