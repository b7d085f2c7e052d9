"""`skyward hub status | check | gc | migrate | backup | restore`: care for the data of a hub."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .hub_people import add_action, fields, period_s, tell

if TYPE_CHECKING:
    from ..hub.http.settings import Settings
    from ..hub.model.status import HubStatus
    from ..hub.store.blobs import Blobs

    _Actions = argparse._SubParsersAction[argparse.ArgumentParser]


def add_data(actions: _Actions) -> None:
    """Add the actions that look at the data of a hub."""
    status = add_action(
        actions, "status", "show version, runs, points and bytes of a hub", "hub status --data ./hub", _status
    )
    add_place(status, "(default: the hub that SKYWARD_HUB_URL names)")
    check = add_action(actions, "check", "verify a hub's rows, bytes and audit", "hub check --data ./hub", _check)
    add_place(check)
    gc = add_action(actions, "gc", "delete for good what was deleted long ago", "hub gc --dry-run", _gc)
    add_place(gc)
    gc.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    gc.add_argument(
        "--older-than", type=period_s, default="30d", metavar="PERIOD", help="time in the bin (default: 30d)"
    )
    migrate = add_action(actions, "migrate", "bring an older database to this version", "hub migrate", _migrate)
    add_place(migrate)
    backup = add_action(
        actions, "backup", "write a hub to one file, also while it runs", "hub backup hub.backup", _backup
    )
    add_place(backup)
    backup.add_argument("file", help="file to write")
    restore = add_action(
        actions, "restore", "read a backup into an empty hub", "hub restore hub.backup --config hub.yaml", _restore
    )
    add_place(restore)
    restore.add_argument("file", help="file of `skyward hub backup`")


def add_place(parser: argparse.ArgumentParser, default: str = "(default: $XDG_DATA_HOME/skyward/hub)") -> None:
    """Add `--data` and `--config`, which name a hub's data."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--data", metavar="DIR", help=f"folder of a hub {default}")
    place.add_argument("--config", metavar="FILE", help="configuration of a hub, as for `skyward hub serve`")


def _status(arguments: argparse.Namespace) -> int:
    from ..hub.client import people
    from ..hub.client.sync import unsent_records
    from .screen import as_json

    found = _status_of_files(arguments) if arguments.data or arguments.config else people.status()
    facts = {**fields(found), "unsent": unsent_records()}
    if arguments.json:
        print(as_json(facts))
        return 0
    facts["unsent"] = f"{facts['unsent']} records on this machine"
    width = max(map(len, facts)) + 2
    print("\n".join(f"{name.replace('_', ' '):<{width}}{value}" for name, value in facts.items()))
    return 0


def _status_of_files(arguments: argparse.Namespace) -> HubStatus:
    from ..hub.store.census import count_everything
    from ..hub.store.snapshots import snapshot_of

    with snapshot_of(settings_of(arguments).database.url) as snapshot:
        return count_everything(snapshot)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Read where a hub's data are: `--config`, `--data`, or the folder of `skyward hub up`."""
    from ..hub.http.settings import data_folder, local_settings, read_settings

    if arguments.config:
        return read_settings(Path(arguments.config), os.environ)
    return local_settings(Path(arguments.data).absolute() if arguments.data else data_folder())


def _check(arguments: argparse.Namespace) -> int:
    from ..hub.store.check import check_hub
    from ..hub.store.snapshots import snapshot_of
    from .screen import table

    settings = settings_of(arguments)
    with snapshot_of(settings.database.url) as snapshot:
        findings = list(check_hub(snapshot, blobs_of(settings)))
    lines = ["no findings"]
    if findings:
        lines = table(["kind", "resource", "problem"], [[row.kind, row.resource, row.problem] for row in findings])
    tell(arguments, [fields(row) for row in findings], lines)
    return 1 if findings else 0


def _gc(arguments: argparse.Namespace) -> int:
    from ..hub.store.database import Database
    from ..hub.store.retention import find_garbage, purge
    from ..hub.store.snapshots import snapshot_of

    settings = settings_of(arguments)
    before = int((time.time() - arguments.older_than) * 1000)
    with snapshot_of(settings.database.url) as snapshot:  # refuses a place without a hub, which is not to be made
        purged = find_garbage(snapshot, before)
    if not arguments.dry_run:
        database = Database(settings.database.url)
        try:
            purged = purge(database, blobs_of(settings), before)
        finally:
            database.close()
    word = "would delete" if arguments.dry_run else "deleted"
    rows = f"{purged.runs} runs, {purged.logged_models} logged models, {purged.experiments} experiments"
    blobs = f"{purged.blobs} blobs of {purged.bytes} bytes"
    return tell(arguments, fields(purged), [f"{word} {rows}, {purged.projects} projects, {blobs}"])


def _migrate(arguments: argparse.Namespace) -> int:
    from ..hub.store.database import Database
    from ..hub.store.schema import HEAD

    Database(settings_of(arguments).database.url).close()
    return tell(arguments, {"revision": HEAD}, [f"the database has revision {HEAD}"])


def _backup(arguments: argparse.Namespace) -> int:
    from ..hub.store.backup import backup

    settings = settings_of(arguments)
    content = backup(settings.database.url, blobs_of(settings), Path(arguments.file))
    return tell(arguments, fields(content), [f"wrote {sum(content.rows.values())} rows and {content.blobs} blobs"])


def _restore(arguments: argparse.Namespace) -> int:
    from ..hub.store.backup import restore

    settings = settings_of(arguments)
    content = restore(settings.database.url, blobs_of(settings), Path(arguments.file))
    return tell(arguments, fields(content), [f"restored {sum(content.rows.values())} rows and {content.blobs} blobs"])


def blobs_of(settings: Settings) -> Blobs:
    """Open where the bytes of artifacts are."""
    from ..hub.services.hub import open_blobs

    return open_blobs(settings.storage.place)
