"""Sources of an import, made from the assets that MLflow itself wrote."""

from __future__ import annotations

import gzip
import sqlite3
import tarfile
from pathlib import Path

from skyward.hub.model.foreign import ForeignRuns
from skyward.hub.store.mlflow_database import MlflowDatabase
from skyward.hub.store.mlflow_folder import MlflowFolder

ASSETS = Path(__file__).parents[1] / "assets"
PLACEHOLDER = "/mlflow-assets/"
"""Folder in the assets in place of that of the machine that made them."""
NAMES = ("2.22.0", "3.17.2", "mlruns", "mlruns-3")


def unpack(name: str, folder: Path) -> None:
    with tarfile.open(ASSETS / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")


def mlflow_database(version: str, folder: Path) -> str:
    """Make an MLflow database from its asset, and return its address."""
    unpack(f"artifacts-{version}", folder)
    sql = gzip.decompress((ASSETS / f"mlflow-{version}.sql.gz").read_bytes()).decode()
    path = folder / f"{version}.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(sql.replace(PLACEHOLDER, f"{folder}/"))
    connection.close()
    return f"sqlite:///{path}"


def open_source(name: str, folder: Path) -> ForeignRuns:
    """Open one of NAMES, unpacked in a folder."""
    if name.startswith("mlruns"):
        unpack(name, folder)
        return MlflowFolder(folder / name)
    return MlflowDatabase(mlflow_database(name, folder))
