"""Sending of run folders to a hub, such as those that were copied from machines without a network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import HubUnreachable, UsageError
from .fluent import current_address
from .sender import LogSender
from .settings import URL, Address, address_of, spool_folder
from .spool import SpoolLog, logs_in

_RUN_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncedRun:
    """Outcome of one run's folder.

    Attributes:
        run_id: id of the run.
        folder: its folder.
        sent: number of records that were sent now.
        unsent: number of records that the hub still lacks, because a living process sends them itself.

    Example:
        from skyward import hub

        for synced in hub.sync("runs"):
            print(synced.run_id, synced.sent, synced.unsent)
    """

    run_id: str
    folder: Path
    sent: int
    unsent: int


def sync(
    folder: str | os.PathLike[str], url: str | None = None, token: str | None = None, project: str | None = None
) -> list[SyncedRun]:
    """Send run folders to a hub. Records that it has already are not sent again, so this can be repeated.

    Args:
        folder: a run's folder, or a folder of such folders.
        url: address of the hub; None: that of `connect`, or `SKYWARD_HUB_URL`.
        token: token; None: `SKYWARD_HUB_TOKEN`.
        project: project; None: `SKYWARD_HUB_PROJECT`, or the token's.

    Raises:
        UsageError: there is no run in the folder.
        HubUnreachable: no hub is named, or it does not answer.
        HubError: the hub refuses a run.

    Example:
        from skyward import hub

        hub.sync("copied/runs", url="http://127.0.0.1:8057")
    """
    address = address_of(url, token, project) if url else current_address()
    if address is None:
        raise HubUnreachable(f"sync: needs a hub, and none is named; pass url=, or set {URL}")
    return [_sync_run(run, address) for run in check_runs(folder)]


def check_runs(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the run folders in a folder.

    Raises:
        UsageError: there is none.
    """
    if runs := list(run_folders(folder)):
        return runs
    raise UsageError(f"folder={os.fspath(folder)!r}: has no run in it; pass the folder of a run, or of runs")


def unsent_records(folder: str | os.PathLike[str] | None = None) -> int:
    """Count the records of this machine's runs that no hub has acknowledged.

    Args:
        folder: Folder of runs. None: `SKYWARD_HUB_SPOOL`, or this user's state folder.
    """
    count = 0
    for run in run_folders(spool_folder(folder)):
        for path in logs_in(run):
            log = SpoolLog(path)
            count += log.unsent
            log.close()
    return count


def run_folders(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the run folders in a folder, or the folder itself if it is one."""
    root = Path(folder).expanduser().absolute()
    if _RUN_ID.fullmatch(root.name) and logs_in(root):
        yield root
    elif root.is_dir():
        for path in sorted(root.iterdir()):
            if _RUN_ID.fullmatch(path.name) and logs_in(path):
                yield path


def _sync_run(folder: Path, address: Address) -> SyncedRun:
    sender = LogSender(folder.name, folder, address, keeps_files=True)
    sent = unsent = 0
    try:
        for path in logs_in(folder):
            log = SpoolLog(path)
            try:
                if log.try_lock():
                    sender.resume(log)
                    began = log.number
                    while sender.send(log):
                        pass
                    sent += log.number - began
                else:
                    unsent += log.unsent
            finally:
                log.close()
    finally:
        sender.close()
    return SyncedRun(run_id=folder.name, folder=folder, sent=sent, unsent=unsent)
