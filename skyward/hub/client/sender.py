"""Thread that sends the spool of a run to its hub, and collects the run's commands.

Training never waits for it. It sends the first records after 50 ms, so that a page shows a run at once, and then every
second, or sooner if a MiB has gathered. While the hub is away it tries again, for as long as the process lives.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...errors import HubError
from .connection import HubConnection, path_of
from .settings import Address
from .spool import SpoolBatch, SpoolLog, SpoolWriter, logs_in

_log = logging.getLogger(__name__)

LINGER_S, BATCH_S, BATCH_BYTES = 0.05, 1.0, 1 << 20
HEARTBEAT_S, COMMANDS_S = 10.0, 1.0
"""Seconds between two heartbeats; of a run that takes commands, which it should carry out within 2 s."""
BACKOFF_S, LONGEST_BACKOFF_S = 0.25, 30.0
_REFUSED = frozenset({400, 413, 422})
"""Statuses that blame what was sent, so that sending it again is useless."""
_NOTHING = b'["h",0]'
"""Record in the place of one that the hub refuses, because numbers must not have gaps."""


@dataclass(frozen=True, slots=True)
class RunCommand:
    """Order from the hub: `save`, `stop` or `abort`."""

    number: int
    action: str


class LogSender:
    """Sends logs of one run. Use it from one thread; it raises `HubError` and can then be called again.

    Args:
        run_id: id of the run.
        folder: the run's folder.
        address: the hub.
        keeps_files: keep the bytes of artifacts that the hub has.
        kind: "runs", or "pools" for the records of a pool.
    """

    def __init__(
        self,
        run_id: str,
        folder: Path,
        address: Address,
        *,
        keeps_files: bool = False,
        kind: Literal["runs", "pools"] = "runs",
    ) -> None:
        self.run_id, self.folder, self._kind = run_id, folder, kind
        self._keeps_files = keeps_files
        self._connection = HubConnection(address)
        self.commands: Callable[[Sequence[RunCommand]], None] = lambda _: None
        self._beat_client = os.urandom(16).hex()

    def close(self) -> None:
        self._connection.close()

    def send(self, log: SpoolLog) -> bool:
        """Send one batch. Return whether the log may have more.

        Raises:
            HubError: the hub does not answer, or refuses the run as a whole.
        """
        batch = log.read(BATCH_BYTES)
        if batch is None:
            return False
        self._deliver(log, batch)
        return True

    def resume(self, log: SpoolLog) -> None:
        """Go to the first record that this hub lacks. The log may have been sent to another hub before."""
        accepted = self._post(log.client, log.number + 1, [])
        if accepted != log.number:
            log.rewind(accepted)

    def beat(self, client: str | None = None, first: int = 1) -> None:
        """Send a batch without records, which is a heartbeat."""
        self._post(client or self._beat_client, first, [])

    def _deliver(self, log: SpoolLog, batch: SpoolBatch) -> None:
        middle = batch.before_files()
        if middle:
            # The hub takes bytes of a run that it knows, so the record that makes the run goes first.
            for part in batch.split(middle):
                self._deliver(log, part)
            return
        try:
            self._put_files(batch)
            accepted = self._post(log.client, batch.first, batch.records)
        except (HubError, FileNotFoundError) as error:
            if isinstance(error, HubError) and error.status not in _REFUSED:
                raise
            if len(batch.records) > 1:
                for half in batch.halves():
                    self._deliver(log, half)
                return
            self._set_aside(batch, error)
            accepted = self._post(log.client, batch.first, [_NOTHING])
        if accepted < batch.last:
            log.rewind(accepted)
            raise HubError(
                f"records={batch.last}: the hub has {accepted} only; wait until the rest is sent again", retryable=True
            )
        log.acknowledge(batch.last, batch.end)
        if not self._keeps_files:
            self._drop_files(batch)

    def _post(self, client: str, first: int, records: list[bytes]) -> int:
        # The records are JSON already. Parsing them here would take CPU from training.
        body = b'{"client":"%b","first":%d,"records":[%b]}' % (client.encode(), first, b",".join(records))
        answer = self._connection.json("POST", path_of("v1", self._kind, self.run_id, "batches"), body)
        commands = [RunCommand(int(row["number"]), str(row["action"])) for row in answer.get("commands") or ()]
        if commands:
            self.commands(commands)
        return int(answer.get("accepted", 0))

    def _put_files(self, batch: SpoolBatch) -> None:
        for digest in batch.files():
            with (self.folder / "files" / digest).open("rb") as file:
                self._connection.upload("PUT", path_of("v1", "blobs", digest), file, query={"run": self.run_id})

    def _drop_files(self, batch: SpoolBatch) -> None:
        for digest in batch.files():
            (self.folder / "files" / digest).unlink(missing_ok=True)

    def _set_aside(self, batch: SpoolBatch, error: Exception) -> None:
        """Keep a record that the hub never takes in a file, so that it does not hold up those behind it."""
        _log.warning("run %s: the hub refused a record, which is kept in refused.jsonl: %s", self.run_id, error)
        text = b'{"error":%b,"record":%b}\n' % (json.dumps(str(error)).encode(), batch.records[0])
        with contextlib.suppress(OSError), (self.folder / "refused.jsonl").open("ab") as file:
            file.write(text)


class SenderThread:
    """Sender of a run that lives in this process.

    Args:
        sender: the sender.
        own: what this process writes.
    """

    def __init__(self, sender: LogSender, own: SpoolWriter) -> None:
        self.error: HubError | None = None
        """Last failure, until a batch succeeds."""
        self.heartbeat_s = HEARTBEAT_S
        self._sender, self._own = sender, own
        self._log = SpoolLog(own.path)
        self._others: list[SpoolLog] = []
        self._is_idle = False
        self._wake, self._hurry = threading.Event(), threading.Event()
        self._is_closing = False
        self._flushed = threading.Condition()
        self._sent_at = self._looked_at = -1e9
        self._beat_at = time.monotonic()  # the hub refuses a heartbeat of a run that it does not know yet
        self._backoff_s = 0.0
        self._thread = threading.Thread(target=self._run, name="skyward-hub-sender", daemon=True)
        self._thread.start()

    # Called by the threads of training --------------------------------------------------------------------------------

    def notice(self) -> None:
        """Note that a record was written."""
        if self._is_idle:
            self._wake.set()
        elif self._own.size - self._log.offset > BATCH_BYTES:
            self._hurry.set()

    def hurry(self) -> None:
        """Send now."""
        self._hurry.set()
        self._wake.set()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was written is acknowledged. Return whether it is."""
        goal = self._own.size
        deadline = time.monotonic() + timeout_s
        self.hurry()
        with self._flushed:
            while self._log.offset < goal or self._own.held:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._thread.is_alive():
                    return False
                self._flushed.wait(min(left_s, 0.5))
        return True

    def close(self, timeout_s: float) -> bool:
        """Send the rest and end. Return whether the hub has everything."""
        is_complete = self.flush(timeout_s)
        self._is_closing = True
        self.hurry()
        self._thread.join(min(timeout_s, 5.0) if is_complete else 0.2)
        return is_complete

    @property
    def is_failing(self) -> bool:
        return self.error is not None

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._wait()
                self._hurry.clear()
                self._send_all()
                self._succeeded()
            except HubError as error:
                self._failed(error)
            except Exception as error:
                _log.warning("run %s: cannot send now", self._sender.run_id, exc_info=error)
                self._failed(HubError(str(error)))
        with contextlib.suppress(HubError):
            self._send_others()
        self._sender.close()
        for log in (self._log, *self._others):
            log.close()

    def _wait(self) -> None:
        if self._backoff_s:
            self._hurry.wait(self._backoff_s * random.uniform(0.7, 1.3))
            return
        self._is_idle = True
        if self._own.size <= self._log.offset:
            self._wake.wait(max(0.0, self._beat_at + self.heartbeat_s - time.monotonic()))
        self._is_idle = False
        self._wake.clear()
        if self._own.size > self._log.offset:
            self._hurry.wait(max(LINGER_S, self._sent_at + BATCH_S - time.monotonic()))

    def _send_all(self) -> None:
        self._own.flush()
        now = time.monotonic()
        if now - self._looked_at > HEARTBEAT_S:
            self._looked_at = now
            self._send_others()
        began = self._log.offset
        while self._sender.send(self._log):
            self._sent_at = self._beat_at = time.monotonic()
            if self._is_closing:
                break
        if self._log.offset == began and time.monotonic() - self._beat_at >= self.heartbeat_s:
            self._sender.beat(self._log.client, self._log.number + 1)
            self._beat_at = time.monotonic()

    def _send_others(self) -> None:
        """Send the rest of processes of this run that are gone, such as a killed one that this one resumes."""
        known = {self._log.path, *(log.path for log in self._others)}
        for path in logs_in(self._sender.folder):
            if path not in known:
                try:
                    log = SpoolLog(path)
                except FileNotFoundError:  # its own process sent the rest meanwhile, and removed it
                    continue
                if log.try_lock():
                    self._others.append(log)
                else:
                    log.close()
        for log in list(self._others):
            while self._sender.send(log):
                pass
            self._others.remove(log)
            log.remove()

    def _succeeded(self) -> None:
        if self.error is not None:
            _log.info("run %s: the hub answers again", self._sender.run_id)
        self.error, self._backoff_s = None, 0.0
        with self._flushed:
            self._flushed.notify_all()

    def _failed(self, error: HubError) -> None:
        if self.error is None or self.error.status != error.status:
            _log.warning("run %s: records wait in %s: %s", self._sender.run_id, self._sender.folder, error)
        self.error = error
        longest = LONGEST_BACKOFF_S if error.retryable or error.status is None else 2 * LONGEST_BACKOFF_S
        self._backoff_s = min(longest, 2 * self._backoff_s or BACKOFF_S)
        with self._flushed:
            self._flushed.notify_all()
