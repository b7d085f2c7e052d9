"""Artifacts of runs: files under names, whose bytes are blobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterator

from ..model.access import Actor, Right
from ..model.names import check_artifact_key
from ..model.quotas import Limit, Quota
from ..model.refusal import Reason, Refusal
from ..model.runs import Artifact
from ..store import artifacts, quotas
from ..store.blobs import Blobs
from ..store.transaction import ReadSnapshot, Transaction
from .calls import Service, need_active_run, need_logged_model, need_run
from .receiving import receive_blob

MODELS = "models/"
"""Beginning of the owner of artifacts that belong to a logged model. No run has a slash in its id."""


class Artifacts(Service):
    """Calls about artifacts."""

    async def put_artifact(
        self, actor: Actor, run_id: str, key: str, stream: AsyncIterable[bytes], size: int | None = None
    ) -> Artifact:
        """Store a file of a run. One of the same key is replaced.

        Args:
            actor: Who asks.
            run_id: A run that is not in the bin, or `models/` and the id of a logged model.
            key: Relative path with forward slashes.
            stream: Its bytes.
            size: Their number, where it is known. Another number is refused.
        """
        actor.require(Right.WRITE)
        check_artifact_key(key)
        room = await self.database.read(_room_for_artifact, actor, run_id)
        sha256, length = await receive_blob(self._need_blobs(), stream, None, size, room)
        return await self.database.write(self._put, actor, run_id, Artifact(key, length, sha256))

    async def put_blob(
        self, actor: Actor, run_id: str, sha256: str, stream: AsyncIterable[bytes], size: int | None = None
    ) -> int:
        """Store bytes that an artifact of a run will name, and return their number. They must have this SHA-256."""
        actor.require(Right.WRITE)
        room = await self.database.read(self._room_for_blob, actor, run_id, sha256.lower())
        _, length = await receive_blob(self._need_blobs(), stream, sha256, size, room)
        await self.database.write(_keep_blob, actor.project, sha256.lower(), length)
        return length

    async def artifact(self, actor: Actor, run_id: str, key: str) -> Artifact:
        """Return a file's size and SHA-256."""
        actor.require(Right.READ)
        check_artifact_key(key)
        return await self.database.read(_need_artifact, actor, run_id, key)

    async def open_artifact(
        self, actor: Actor, run_id: str, key: str, start: int = 0, end: int | None = None
    ) -> tuple[Artifact, Iterator[bytes]]:
        """Return a file and its bytes from `start` to `end`, exclusive. The iterator blocks: run it on a thread."""
        actor.require(Right.READ)
        check_artifact_key(key)
        artifact = await self.database.write(self._read_artifact, actor, run_id, key)
        blobs = self._need_blobs()
        return artifact, await asyncio.to_thread(blobs.open, artifact.sha256, start, end)

    async def presigned_artifact(self, actor: Actor, run_id: str, key: str) -> tuple[Artifact, str | None]:
        """Return a file and a URL that gives its bytes for 15 minutes. None means: use `open_artifact`."""
        actor.require(Right.READ)
        check_artifact_key(key)
        artifact = await self.database.write(self._read_artifact, actor, run_id, key)
        return artifact, await asyncio.to_thread(self._need_blobs().presigned, artifact.sha256)

    async def artifacts(self, actor: Actor, run_id: str, prefix: str = "") -> list[Artifact]:
        """List the files and folders that lie directly in a folder of a run. An empty prefix is its root."""
        actor.require(Right.READ)
        if prefix:
            check_artifact_key(prefix)
        return await self.database.read(_list, actor, run_id, prefix)

    async def delete_artifact(self, actor: Actor, run_id: str, key: str) -> None:
        """Delete a file, or a folder with all below it."""
        actor.require(Right.WRITE)
        check_artifact_key(key)
        await self.database.write(self._delete_artifact, actor, run_id, key)

    def _need_blobs(self) -> Blobs:
        if self.blobs is None:
            raise Refusal(Reason.UNSUPPORTED, "artifacts: this hub keeps none; configure a place for blobs")
        return self.blobs

    def _room_for_blob(self, snapshot: ReadSnapshot, actor: Actor, run_id: str, sha256: str) -> Limit | None:
        need_active_run(snapshot, actor, run_id)
        if artifacts.knows_blob(snapshot, actor.project, sha256):
            return None
        return quotas.find_limit(snapshot, actor.project, Quota.ARTIFACT_BYTES)

    def _put(self, tx: Transaction, actor: Actor, run_id: str, artifact: Artifact) -> Artifact:
        owner = _need_active_owner(tx, actor, run_id)
        artifacts.add_blob(tx, actor.project, artifact.sha256, artifact.size)
        artifacts.set_artifact(tx, owner, artifact)
        detail = {"key": artifact.key, "sha256": artifact.sha256, "size": artifact.size}
        self.on_change(tx, actor, "artifact.put", _resource(run_id), detail)
        return artifact

    def _read_artifact(self, tx: Transaction, actor: Actor, run_id: str, key: str) -> Artifact:
        artifact = _need_artifact(tx, actor, run_id, key)
        self.on_change(tx, actor, "artifact.read", _resource(run_id), {"key": key, "sha256": artifact.sha256})
        return artifact

    def _delete_artifact(self, tx: Transaction, actor: Actor, run_id: str, key: str) -> None:
        owner = _need_active_owner(tx, actor, run_id)
        if not artifacts.delete_artifacts(tx, owner, key):
            raise _no_artifact(key)
        self.on_change(tx, actor, "artifact.delete", _resource(run_id), {"key": key})


def _need_owner(snapshot: ReadSnapshot, actor: Actor, owner: str) -> int:
    """Return the number under which artifacts of a run, or of a logged model, are kept."""
    if owner.startswith(MODELS):
        return -need_logged_model(snapshot, actor, owner.removeprefix(MODELS)).pk
    return need_run(snapshot, actor, owner).pk


def _need_active_owner(snapshot: ReadSnapshot, actor: Actor, owner: str) -> int:
    if owner.startswith(MODELS):
        return _need_owner(snapshot, actor, owner)
    return need_active_run(snapshot, actor, owner).pk


def _room_for_artifact(snapshot: ReadSnapshot, actor: Actor, owner: str) -> Limit | None:
    """Check that an artifact may be added, and return the project's limit. None: there is none."""
    _need_active_owner(snapshot, actor, owner)
    return quotas.find_limit(snapshot, actor.project, Quota.ARTIFACT_BYTES)


def _resource(owner: str) -> str:
    return f"logged_model/{owner.removeprefix(MODELS)}" if owner.startswith(MODELS) else f"run/{owner}"


def _keep_blob(tx: Transaction, project: int, sha256: str, size: int) -> None:
    artifacts.add_blob(tx, project, sha256, size)


def _list(snapshot: ReadSnapshot, actor: Actor, run_id: str, prefix: str) -> list[Artifact]:
    return artifacts.list_artifacts(snapshot, _need_owner(snapshot, actor, run_id), prefix.rstrip("/"))


def _need_artifact(snapshot: ReadSnapshot, actor: Actor, run_id: str, key: str) -> Artifact:
    artifact = artifacts.find_artifact(snapshot, _need_owner(snapshot, actor, run_id), key)
    if artifact is None:
        raise _no_artifact(key)
    return artifact


def _no_artifact(key: str) -> Refusal:
    return Refusal(
        Reason.MISSING, f"key={key[:80]!r}: No such artifact; list the artifacts of the run first", field="key"
    )
