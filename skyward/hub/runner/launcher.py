"""A launcher: it takes attempts from the hub, and starts a detached runner for each.

Everything that it knows is in its folder, so another one that is started there goes on where it was killed.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...errors import HubError, HubUnreachable
from ..client.connection import HubConnection, path_of
from ..client.settings import JOB, PROJECT, SPOOL, TOKEN, URL, Address
from ..model.jobs import FEEDS, PROTOCOL
from ..store.lock import ProcessLock, make_folder
from .launch_file import CODE, LAUNCH, PID, checkpoint_folder, read_launch, write_private
from .reporter import HubLink, Stale
from .starter import RunnerStarter
from .unpacked_code import forget_code

WAIT_S = 5.0
"""Seconds for which the hub may hold a poll until there is something to do."""
CONFIRM_S = 15.0
"""Seconds for which the hub must have asked to kill a runner: after a pause of this machine it may be heard again."""
STUBBORN_S = 60.0
"""Seconds after which a runner is killed whose attempt is over, and which has not ended."""
STARTER_S = 1.5
"""Seconds after the start of a runner until a starter is made for the next ones. At once, it would slow that one."""
LAST_LINES, LAST_CHARACTERS = 3, 500
"""Most lines and characters of the log of a runner that the hub shows as the reason of its end."""
LOGS = 100
"""Log files of ended runners that are kept."""
_RETRY_S = 1.0
_ENDING_S = 0.1
"""Seconds between two looks at a runner whose attempt is over. The next job may wait for it."""
Key = tuple[str, int]

_log = logging.getLogger(__name__)


class Launcher:
    """Launcher of one folder.

    Args:
        address: The hub, with an owner's token.
        folder: Where it keeps what it has started. One launcher at a time may use it.
        machines: Names of the machine sets that it serves. None and no `providers`: all.
        providers: Names of providers whose machine sets it serves, too, also those that are declared later.
        umask: Mask of the files of jobs. -1: that of this process, which may keep its own files more private.

    Raises:
        UsageError: Another launcher uses the folder, or it cannot be written.
    """

    def __init__(
        self,
        address: Address,
        folder: Path,
        machines: Sequence[str] = (),
        providers: Sequence[str] = (),
        *,
        umask: int = -1,
    ) -> None:
        make_folder("data", folder)
        self._lock = ProcessLock(folder / "launcher.lock")
        self._attempts, self._logs = folder / "attempts", folder / "logs"
        for place in (self._attempts, self._logs):
            make_folder("data", place)
        self._name = _name_of(folder)
        self._address, self._serves = address, {"machines": list(machines), "providers": list(providers)}
        self._umask = umask
        self._children: dict[Key, subprocess.Popen[bytes]] = {}
        self._asked: dict[tuple[str, Key], float] = {}
        self._starter: RunnerStarter | None = None
        self._executed_at = math.inf
        self._sent: set[str] = set()
        """Folders of ended runners whose output is with the hub."""
        self._is_over = threading.Event()

    def run(self) -> bool:
        """Serve the hub until `stop`. Its runners go on.

        It ends by itself, with a line in the log, when its folder is removed: it knows none of its runners then.

        Returns:
            Whether it was told to stop.
        """
        connection = HubConnection(self._address)
        while not self._is_over.is_set():
            if not self._lock.is_in_place:
                _log.error("data=%r: the folder was removed; start the launcher again", str(self._attempts.parent))
                break
            try:
                self._obey(self._poll(connection))
            except HubError as error:
                _log.warning("the hub refused or did not answer: %s", error)
                self._is_over.wait(_RETRY_S)
            except Exception:
                # A full disk or a broken answer must not end the launcher for good.
                if self._lock.is_in_place:
                    _log.exception("an order of the hub failed; it is tried again")
                    self._is_over.wait(_RETRY_S)
        connection.close()
        if self._starter is not None:
            self._starter.close()
        self._lock.release()
        return self._is_over.is_set()

    def stop(self) -> None:
        """Let `run` return, within `WAIT_S`."""
        self._is_over.set()

    def _poll(self, connection: HubConnection) -> Mapping[str, Any]:
        self._reap()
        self._keep_starter()
        known = [_key_of(folder) for folder in self._folders()]
        ended = [folder for folder in self._folders() if not _lives(folder)]
        for folder in ended:
            self._send_rest(folder)
        gone = [_key_of(folder) for folder in ended]
        # The next poll notices runners that end, and the time of a starter, so it must not be far away then.
        wait_s = 1.0 if len(known) > len(gone) or self._executed_at < math.inf else WAIT_S
        last_lines = [_last_lines(folder / "runner.log") for folder in ended]
        body = {**self._serves, "known": known, "gone": gone, "last_lines": last_lines}
        body |= {"wait_s": wait_s, "protocol": PROTOCOL}
        answer: Mapping[str, Any] = connection.json("POST", path_of("v1", "launchers", self._name, "poll"), body)
        return answer

    def _send_rest(self, folder: Path) -> None:
        """Send the output and items that a runner wrote before it was killed, while the hub still takes them: once."""
        feeds = [feed for feed in FEEDS if (folder / feed).exists()]
        if folder.name in self._sent or not feeds:
            return
        launch = read_launch(folder)
        address = Address(url=self._address.url, token=launch["token"] or None, project=launch["project"])
        link = HubLink(address, launch["job"], launch["attempt"])
        try:
            for feed in feeds:
                start, sent = -1, 0
                while sent != start:  # the hub's first answer leads behind what it has
                    start, sent = sent, link.send_piece(feed, folder / feed, sent)
        except HubUnreachable as error:
            if error.status is None:
                raise
            # A proxy that refuses these bytes for good must not keep the launcher from its other jobs.
            _log.warning("%s: the rest of its output and items is not sent: %s", folder.name, error)
        except Stale:  # it has ended by its runner's word, with all that it sent
            pass
        except HubError as error:
            _log.warning("%s: the rest of its output and items is not sent: %s", folder.name, error)
        finally:
            link.close()
        self._sent.add(folder.name)

    def _obey(self, orders: Mapping[str, Any]) -> None:
        for launch in orders["start"]:
            self._start(launch)
        asked = {("kill", (job, number)) for job, number in orders["kill"]}
        asked |= {("forget", (job, number)) for job, number in orders["forget"]}
        self._asked = {order: self._asked.get(order, time.monotonic()) for order in asked}
        for (what, key), since in self._asked.items():
            waited_s = time.monotonic() - since
            if what == "forget":
                self._forget(key, is_stubborn=waited_s > STUBBORN_S)
            elif waited_s > CONFIRM_S:
                self._kill(key)
        if self._asked and not orders["start"]:
            self._is_over.wait(_ENDING_S)

    def _start(self, launch: Mapping[str, Any]) -> None:
        key = (launch["job"], launch["attempt"])
        folder = self._folder(key)
        folder.mkdir(mode=0o700, exist_ok=True)
        write_private(folder / LAUNCH, launch)
        environment = self._environment(folder, launch)
        try:
            if not self._fork(folder, environment):
                self._execute(key, folder, environment)
        except OSError:
            _log.exception("attempt %d of job %s: its runner cannot be started", key[1], key[0])
            return
        _log.info("attempt %d of job %s: its runner was started", key[1], key[0])

    def _fork(self, folder: Path, environment: Mapping[str, str]) -> bool:
        """Let the starter start a runner. Return False if it did not."""
        if self._starter is None:
            return False
        with _descriptors(folder) as (lock, log):
            is_started = self._starter.start(folder, environment, lock, log)
        return is_started or _lives(folder)

    def _execute(self, key: Key, folder: Path, environment: Mapping[str, str]) -> None:
        """Start a runner as a new interpreter."""
        with _descriptors(folder) as (lock, log):
            child = subprocess.Popen(
                [sys.executable, "-m", "skyward.hub.runner", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=environment,
                start_new_session=True,
                pass_fds=[lock],
                umask=self._umask,
            )
        (folder / PID).write_text(f"{child.pid}\n")
        self._children[key], self._executed_at = child, time.monotonic()

    def _keep_starter(self) -> None:
        """Have a starter for the next runner. A launcher without jobs has none."""
        if self._starter is not None and not self._starter.is_alive:
            self._starter.close()
            self._starter = None
        if self._starter is None and time.monotonic() - self._executed_at > STARTER_S:
            self._executed_at = math.inf  # if it fails, the next runner is executed, and another is tried
            try:
                self._starter = RunnerStarter(self._logs / "starter.log", _without_token(), self._umask)
            except OSError as error:
                _log.warning("no starter of runners: %s", error)

    def _environment(self, folder: Path, launch: Mapping[str, Any]) -> dict[str, str]:
        """Return the runner's environment: ours without our token, and with the job's."""
        environment = _without_token() | {URL: self._address.url, TOKEN: launch["token"], PROJECT: launch["project"]}
        environment |= {SPOOL: str(folder / "spool"), JOB: str(launch["job"])}
        return environment | checkpoint_folder(folder, launch)

    def _kill(self, key: Key) -> None:
        folder = self._folder(key)
        with suppress(OSError, ValueError):  # no process was started, or it has just ended
            if _lives(folder):
                os.kill(int((folder / PID).read_text()), signal.SIGKILL)
                _log.warning("attempt %d of job %s: its runner was killed", key[1], key[0])

    def _forget(self, key: Key, *, is_stubborn: bool) -> None:
        folder = self._folder(key)
        if _lives(folder):
            if is_stubborn:
                self._kill(key)
            return
        with suppress(FileNotFoundError):
            (folder / "runner.log").replace(self._logs / f"{folder.name}.log")
        # The launch goes last: a folder that lost it would be known to nobody. Its keeper may still write beside it.
        for child in folder.iterdir():
            if child.is_dir():
                shutil.rmtree(child, ignore_errors=True)
            elif child.name != LAUNCH:
                child.unlink(missing_ok=True)  # or its keeper was faster
        if [child.name for child in folder.iterdir()] == [LAUNCH]:
            shutil.rmtree(folder)
            self._sent.discard(folder.name)
        forget_code(folder.parent.parent / CODE)
        for old in sorted(self._logs.iterdir(), key=lambda path: path.stat().st_mtime)[:-LOGS]:
            old.unlink(missing_ok=True)

    def _reap(self) -> None:
        self._children = {key: child for key, child in self._children.items() if child.poll() is None}

    def _folders(self) -> Iterator[Path]:
        return (folder for folder in sorted(self._attempts.iterdir()) if (folder / LAUNCH).exists())

    def _folder(self, key: Key) -> Path:
        return self._attempts / f"{key[0]}-{key[1]}"


def _without_token() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_TOKEN"}


@contextmanager
def _descriptors(folder: Path) -> Iterator[tuple[int, int]]:
    """Open the lock of a runner, which holds it for as long as it lives, and its log. Raises OSError."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with (folder / "runner.log").open("ab") as log:
            yield lock, log.fileno()
    finally:
        os.close(lock)


def _key_of(folder: Path) -> Key:
    job, _, number = folder.name.rpartition("-")
    return job, int(number)


def _last_lines(log: Path) -> str:
    """Return the last lines of a log as one; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * LAST_CHARACTERS))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    text = " / ".join([line.strip() for line in lines if line.strip()][-LAST_LINES:])
    return "".join(character if character.isprintable() else " " for character in text)[-LAST_CHARACTERS:]


def _lives(folder: Path) -> bool:
    """Return whether the runner of a folder lives. It holds the lock, which the kernel releases at its death."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # none was started
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _name_of(folder: Path) -> str:
    file = folder / "name"
    if not file.exists():
        write_private(file, f"launcher-{uuid.uuid4().hex[:12]}")
    return file.read_text().strip()
