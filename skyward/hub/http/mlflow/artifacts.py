"""Handlers of MLflow's artifacts: the list of a run's, and the proxy that clients up- and download through."""

from __future__ import annotations

import re
from dataclasses import dataclass

from msgspec import UNSET

from ...model.refusal import Reason, Refusal
from .. import files
from ..reply import Empty, HttpReply
from ..routing import Call
from . import values, wire

# Clients with a workspace put it in front: the service checks the project in any case.
_ADDRESS = re.compile(
    r"(?:workspaces/[^/]+/)?(?P<experiment>\d+)/(?P<owner>(?:models/)?[^/]+)/artifacts(?:/(?P<key>.*))?", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class ArtifactAddress:
    """Place of an artifact in a URI `mlflow-artifacts:/<experiment>/<run>/artifacts/<key>`.

    Attributes:
        run_id: Id of the run, or `models/` and the id of a logged model.
        key: Key of the artifact.
    """

    run_id: str
    key: str


def address_in(path: str) -> ArtifactAddress:
    """Split the path of an artifact.

    Raises:
        Refusal: It does not lead into a run.
    """
    match = _ADDRESS.fullmatch(path.strip("/"))
    if match is None:
        raise Refusal(Reason.INVALID, "Invalid path: not below '<experiment>/<run>/artifacts'", field="path")
    return ArtifactAddress(match["owner"], match["key"] or "")


async def list_of_run(call: Call, request: wire.ListArtifacts) -> wire.FilesAnswer:
    run = await call.hub.tracking.run(call.actor, request.run_id)
    found = await call.hub.tracking.artifacts(call.actor, request.run_id, request.path or "")
    return wire.FilesAnswer(run.artifact_uri, [values.file(artifact) for artifact in found])


async def list_below(call: Call, request: wire.ArtifactPath) -> wire.FilesAnswer:
    """List a folder. The client joins the paths with the folder itself, so they are names without it."""
    address = address_in(request.path or "")
    found = await call.hub.tracking.artifacts(call.actor, address.run_id, address.key)
    files = [values.file(artifact) for artifact in found]
    for file in files:
        file.path = file.path.rpartition("/")[2]
    return wire.FilesAnswer(UNSET, files)


async def upload(call: Call, _request: None) -> Empty:
    address = address_in(call.path["path"])
    await files.upload(call, address.run_id, address.key)
    return Empty()


async def download(call: Call, _request: None) -> HttpReply:
    address = address_in(call.path["path"])
    return await files.download(call, address.run_id, address.key)


async def delete(call: Call, _request: None) -> Empty:
    address = address_in(call.path["path"])
    await call.hub.tracking.delete_artifact(call.actor, address.run_id, address.key)
    return Empty()


async def get_of_run(call: Call, request: wire.ArtifactOfRun) -> HttpReply:
    """Answer `get-artifact` of MLflow's pages."""
    return await files.download(call, request.run_uuid or request.run_id, request.path)
