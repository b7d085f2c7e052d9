"""Servers in a pool's program, by name: those that a decorator has declared, and those that run for a call.

A server begins with the first *seat*, which a rank of a call holds from its first line to its last, and ends with the
last one. So calls of one name that run at the same time share a server, also calls of several pools.

The settings are the program's own, from its decorator: no node chooses a folder on the program's machine. This module
is imported with the decorator, so it loads neither torch nor a server's library before there is a request.

A server that ends is known until its last state is written. The next one of its name waits for that, because both may
save in the same folder. If that state cannot be written, the end of a pool whose calls it served raises the error.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointSaveFailed, MissingDependency, SkywardError
from ...wire.task_channel import TaskChannel, losses, services
from .pool_transport import CHANNEL, ENDED, refuse
from .server_settings import DiLoCoSettings

if TYPE_CHECKING:
    from .pool_server import PoolServer

_log = logging.getLogger(__name__)
_HELLO_S = 30.0
_PATIENCE_S = 120.0
"""Time for a failed call to restart, in seconds, where no option gives workers a time to come back."""
_LAST_SAVE_S = 120.0
"""Longest wait for a last save at the end of a call, in seconds."""
_FORMER_S = 20.0
"""Longest wait for the last save of a former server. It is less than the worker's wait, which then retries."""

_declared: dict[str, DiLoCoSettings] = {}
_running: dict[str, SeatedServer] = {}
_ending: dict[str, SeatedServer] = {}
"""Servers that write their last state."""
_unsaved: list[tuple[frozenset[str], CheckpointSaveFailed]] = []
"""Pools that a server has served, and why its last state is not saved."""
_lock = threading.Lock()


def declare(server: str, settings: DiLoCoSettings) -> None:
    """Set the settings of the next server of that name. One that runs keeps its own."""
    _declared[server] = settings
    services.setdefault(CHANNEL, serve)
    losses.setdefault(CHANNEL, take_unsaved)


def forget(server: str) -> None:
    """Forget the settings of a server. One that runs goes on."""
    _declared.pop(server, None)


def take_unsaved(pool: str) -> CheckpointSaveFailed | None:
    """Return why the last state of a server that has served a pool is not saved. It is said once; the log has all."""
    with _lock:
        late = [server for server in _ending.values() if server.has_served(pool)]
    for server in late:
        try:
            server.stop(_FORMER_S)
        except TimeoutError as error:
            return server.unsaved("is not saved yet", error)
    with _lock:
        failures = [entry for entry in _unsaved if pool in entry[0]]
        for entry in failures:
            _unsaved.remove(entry)
    return failures[0][1] if failures else None


def serve(channel: TaskChannel) -> None:
    """Serve a channel of a task: a seat, or one request."""
    try:
        head = json.loads(channel.receive(_HELLO_S))
        if "gang" in head:
            _hold_seat(channel, head)
        else:
            _answer(channel, head)
    except (OSError, EOFError):  # the task has ended
        return


class SeatedServer:
    """Server with the seats that are held. It makes its exchange for the first request.

    Args:
        name: Its name.
        settings: Settings of the server.
        former: Server of that name before. It ends before this one begins, because both may save.
    """

    def __init__(self, name: str, settings: DiLoCoSettings, former: SeatedServer | None = None) -> None:
        self._name, self._settings, self._former = name, settings, former
        self._seats: dict[str, int] = {}
        """Seats that each gang holds."""
        self._to_come: dict[str, int] = {}
        """Ranks of each gang that have not taken their seats yet."""
        self._pools: set[str] = set()
        """Pools of all gangs that had seats."""
        self._numbers: dict[str, int] = {}
        """Number of each gang with seats, from 0: the lowest one that is free when it comes."""
        self._left_at: float | None = None
        self._is_abandoned = False
        """Whether a seat was left without a goodbye since the first of these gangs came: the call may restart."""
        self._making = threading.Lock()
        self._server: PoolServer | None = None

    @property
    def is_left(self) -> bool:
        """Return whether nobody holds a seat, and no rank of a gang is still to come."""
        return not self._seats

    @property
    def is_done(self) -> bool:
        """Return whether all have left with a goodbye."""
        return not self._seats and not self._is_abandoned

    @property
    def is_given_up(self) -> bool:
        """Return whether the seats were left without a goodbye, and no restart has come."""
        patience_s = self._settings.heartbeat_timeout or _PATIENCE_S
        return self._left_at is not None and time.monotonic() - self._left_at > patience_s

    @property
    def has_ended(self) -> bool:
        """Return whether nothing of it runs, and nothing of servers before it."""
        is_first = self._former is None or self._former.has_ended
        return is_first and (self._server is None or self._server.has_ended)

    def sit(self, gang: str, ranks: int) -> int:
        """Take one of the seats of a gang's ranks, and return the number of the gang."""
        self._is_abandoned = self._is_abandoned and not self.is_left
        self._pools.add(gang.partition(" ")[0])
        free = min(set(range(len(self._numbers) + 1)) - set(self._numbers.values()))
        self._numbers.setdefault(gang, free)
        self._seats[gang] = self._seats.get(gang, 0) + 1
        self._to_come[gang] = self._to_come.get(gang, ranks) - 1
        self._left_at = None
        return self._numbers[gang]

    def leave(self, gang: str, *, says_goodbye: bool) -> None:
        """Leave a seat. A gang without a goodbye has lost a rank, and all others end with that one."""
        self._is_abandoned = self._is_abandoned or not says_goodbye
        self._seats[gang] -= 1
        if not says_goodbye:
            self._to_come[gang] = 0
        if not self._seats[gang] and not self._to_come[gang]:
            del self._seats[gang], self._to_come[gang], self._numbers[gang]
        if not self._seats:
            self._left_at = time.monotonic()

    def made(self, workers: int) -> PoolServer:
        """Return the server, and make it for the first request.

        Raises:
            UsageError: The save is of another model.
            MissingDependency: This program lacks a library.
            TimeoutError: The server before still writes its last state.
        """
        with self._making:
            if self._server is None:
                self._stop_former(_FORMER_S)
                try:
                    from .pool_server import PoolServer
                except ModuleNotFoundError as error:
                    raise MissingDependency(
                        f"{error.name}: not installed in the pool's program, which is the server; "
                        "run `pip install 'skyward[diloco]'` there",
                        name=error.name,
                    ) from error
                settings = self._settings.for_call(workers)
                self._server = PoolServer(
                    settings,
                    is_over=lambda: _drop_given_up(self._name, self),
                    ended=self._note_end,
                )
                _log.info("server %s runs in this program, for %d workers", self._name, settings.num_workers)
            return self._server

    def evict(self, worker: str) -> None:
        """Remove a worker whose process is gone, if it has not left. Its round waits for it no longer."""
        if self._server is not None:
            self._server.evict(worker)

    def stop(self, timeout_s: float) -> None:
        """Save the last state, and end all requests. Idempotent.

        Args:
            timeout_s: Longest wait for each server, in seconds.

        Raises:
            TimeoutError: The state is still being written. The server ends once the disk goes on.
        """
        with self._making:
            self._stop_former(timeout_s)
            if self._server is not None and not self._server.stop(timeout_s):
                raise TimeoutError(
                    f"server={self._name!r}: still writes its last state after {timeout_s:g} s; check the disk of "
                    f"save_dir={self._settings.save_dir!r}"
                )

    def has_served(self, pool: str) -> bool:
        """Return whether a call of a pool, by its `job_id`, has held a seat."""
        return pool in self._pools

    def unsaved(self, problem: str, failure: Exception) -> CheckpointSaveFailed:
        """Return the error of a last state that is not saved."""
        error = CheckpointSaveFailed(
            f"save_dir={self._settings.save_dir!r}: the last state of server {self._name!r} {problem}: {failure}; "
            "check the disk and its space"
        )
        error.__cause__ = failure
        return error

    def _note_end(self, failure: Exception | None) -> None:
        """Keep a failure of the last save for the end of a pool."""
        if failure is not None:
            with _lock:
                _unsaved.append((frozenset(self._pools), self.unsaved("could not be saved", failure)))
        _forget_ended(self._name)

    def _stop_former(self, timeout_s: float) -> None:
        if self._former is not None:
            self._former.stop(timeout_s)
            self._former = None


def _hold_seat(channel: TaskChannel, hello: Mapping[str, Any]) -> None:
    name, gang = hello["server"], hello["gang"]
    with _lock:
        server = _seated(name, is_restart=hello["restart"] > 0)
        number = None if server is None else server.sit(gang, hello["ranks"])
    if server is None:
        problem = "the pool's program has no function with sky.integrations.diloco of that name"
        channel.send(json.dumps({"error": f"server={name!r}: {problem}; decorate it at the top of a module"}).encode())
        return
    worker, says_goodbye = f"call-{number}-rank-{hello['rank']}", False
    try:
        channel.send(json.dumps({"worker": worker}).encode())
        channel.receive()
        says_goodbye = True
    finally:
        server.evict(worker)  # before another process gets its name
        with _lock:
            server.leave(gang, says_goodbye=says_goodbye)
            is_over = server.is_done and _retire(name, server)
        if is_over:
            _end(name, server)
    channel.send(b"{}")


def _retire(name: str, server: SeatedServer) -> bool:
    """Let no new seat be at a server. Return whether it was the one of its name. The lock is held."""
    if _running.get(name) is not server:
        return False
    _ending[name] = _running.pop(name)
    return True


def _end(name: str, server: SeatedServer) -> None:
    try:
        server.stop(_LAST_SAVE_S)
    except TimeoutError as error:
        _log.error("%s; the next server of that name waits for it", error)
    _forget_ended(name)


def _forget_ended(name: str) -> None:
    """Forget a server that has ended, and with it the parameters."""
    with _lock:
        if name in _ending and _ending[name].has_ended:
            del _ending[name]


def _seated(name: str, *, is_restart: bool) -> SeatedServer | None:
    """Return the server for a new seat. A call that is restarted goes on with the one that it left."""
    server = _running.get(name)
    if server is not None and (is_restart or not server.is_left):
        return server
    if name not in _declared:
        return None
    _running[name] = SeatedServer(name, _declared[name], former=server or _ending.get(name))
    return _running[name]


def _drop_given_up(name: str, server: SeatedServer) -> bool:
    """Forget a server whose call has failed and does not restart. Return whether it should end."""
    with _lock:
        is_over = server.is_left and server.is_given_up
        if is_over:
            _retire(name, server)
        return is_over


def _answer(channel: TaskChannel, head: Mapping[str, Any]) -> None:
    with _lock:
        server = _running.get(head["server"])
    if server is None:
        refuse(channel, 503, ENDED)
        return
    try:
        made = server.made(head["workers"])
    except SkywardError as error:
        refuse(channel, 400, str(error))
        return
    except TimeoutError as error:
        refuse(channel, 503, str(error))
        return
    made.answer(channel, head)
