"""`skyward hub import`: copy the runs and models of an MLflow database, server or folder into a hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .hub_data import add_place, blobs_of, settings_of
from .hub_people import add_action, tell

if TYPE_CHECKING:
    from ..hub.model.foreign import ForeignRuns

    _Actions = argparse._SubParsersAction[argparse.ArgumentParser]


def add_import(actions: _Actions) -> None:
    own = add_action(
        actions,
        "import",
        "copy runs and models of MLflow into a hub; repeat it to add what is new",
        "hub import sqlite:////home/ada/mlflow.db --data ./hub",
        _import,
    )
    own.add_argument("source", help="address of MLflow's database (2.x, 3.x) or server, or an mlruns folder")
    add_place(own)
    own.add_argument("--project", default="default", help="project of the hub (default: default)")
    own.add_argument("--workspace", default="default", help="workspace of MLflow 3 (default: default)")
    own.add_argument("--artifacts", metavar="FOLDER", help="folder in which MLflow's server keeps its artifacts")


def _import(arguments: argparse.Namespace) -> int:
    from ..hub.services.hub import owner_of
    from ..hub.store.database import Database
    from ..hub.store.importing import KINDS, import_runs
    from .screen import table

    source = _source(arguments)
    try:
        settings = settings_of(arguments)
        database = Database(settings.database.url)
        try:
            actor = owner_of(database, settings.auth.owner, arguments.project)
            outcome = import_runs(source, database, blobs_of(settings), actor)
        finally:
            database.close()
    finally:
        source.close()
    rows = [[kind.replace("_", " "), str(outcome.source[kind]), str(outcome.hub[kind])] for kind in KINDS]
    facts = {"source": dict(outcome.source), "hub": dict(outcome.hub), "problems": outcome.problems}
    tell(arguments, facts, [*table(["", "source", "hub"], rows, right=[1, 2]), *outcome.problems])
    return 0 if outcome.is_complete else 1


def _source(arguments: argparse.Namespace) -> ForeignRuns:
    from ..hub.store.mlflow_database import MlflowDatabase
    from ..hub.store.mlflow_folder import MlflowFolder
    from ..hub.store.mlflow_server import MlflowServer

    root = Path(arguments.artifacts).absolute() if arguments.artifacts else None
    if arguments.source.startswith(("http://", "https://")):
        return MlflowServer(arguments.source, root, arguments.workspace)
    if "://" in arguments.source:
        return MlflowDatabase(arguments.source, root, arguments.workspace)
    return MlflowFolder(Path(arguments.source).absolute(), root)
