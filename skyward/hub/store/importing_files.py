"""Import of files: the artifacts of runs and of logged models."""

from __future__ import annotations

from ..model.access import Actor
from ..model.foreign import ForeignFile, ForeignFiles, Imported
from ..model.names import check_artifact_key
from ..model.refusal import Refusal
from ..model.runs import Artifact
from . import artifacts, journal
from .blobs import Blobs, put_blob
from .database import Database
from .transaction import Transaction


def import_files(
    files: ForeignFiles | None,
    owner: str,
    database: Database,
    blobs: Blobs,
    actor: Actor,
    number: int,
    outcome: Imported,
) -> bool:
    """Copy the files of one owner, and count them.

    Args:
        files: Files in the source. None is a problem of the outcome.
        owner: Name of the owner for messages, such as `run 0123`.
        database: An open database of the hub.
        blobs: Where the bytes are put.
        actor: Identity whose project gets the bytes.
        number: Number of the run; that of a logged model with a minus.
        outcome: Where files and problems are counted.

    Returns:
        Whether the files could be listed. The others are problems of the outcome.
    """
    if files is None:
        outcome.problems.append(f"{owner}: its artifacts are not on this machine; pass --artifacts FOLDER")
        return False
    try:
        for file in files():
            outcome.source["artifacts"] += 1
            try:
                _import_file(file, database, blobs, actor, number)
                outcome.hub["artifacts"] += 1
            except Refusal as refusal:
                outcome.problems.append(f"{owner}: artifact {file.key[:200]!r}: {refusal.message}")
    except Refusal as refusal:
        outcome.problems.append(f"{owner}: {refusal.message}")
        return False
    return True


def _import_file(file: ForeignFile, database: Database, blobs: Blobs, actor: Actor, number: int) -> None:
    check_artifact_key(file.key)
    known = database.read_and_wait(artifacts.find_artifact, number, file.key)
    if known is None or known.size != file.size:
        sha256, size = put_blob(blobs, file.read(), size=file.size)
        database.write_and_wait(_set_artifact, actor, number, Artifact(file.key, size, sha256))


def _set_artifact(tx: Transaction, actor: Actor, number: int, artifact: Artifact) -> None:
    artifacts.add_blob(tx, actor.project, artifact.sha256, artifact.size)
    artifacts.set_artifact(tx, number, artifact)


def record_import(tx: Transaction, actor: Actor, resource: str) -> None:
    """Write to the audit that a thing was imported."""
    action = f"{resource.partition('/')[0]}.import"
    journal.add_audit(tx, actor.organization, actor.project, actor.user, actor.token, action, resource, {})
