"""Handlers about the server itself: health, version, capabilities and workspaces."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from ...model.names import check_name
from ...model.refusal import Reason, Refusal
from ...services.access import DEFAULT_PROJECT
from ...services.people import Project
from ..reply import Empty, HttpReply
from ..routing import Call
from . import wire

VERSION = "3.17.2"
"""Version of MLflow whose API this is. Clients compare it with their own."""

TEXT = b"text/plain; charset=utf-8"

INFO = wire.ServerInfo(
    store_type="SqlStore",
    workspaces_enabled=True,
    trace_archival_enabled=False,
    multipart_uploads_enabled=False,
    multipart_downloads_enabled=False,
    presigned_upload_run_id_supported=False,
    presigned_upload_model_id_supported=False,
    features_enabled={"gateway": False},
)
"""The same for everybody, because anybody may ask."""


async def health(_call: Call, _request: Empty) -> HttpReply:
    return HttpReply(b"OK", content_type=TEXT)


async def version(_call: Call, _request: Empty) -> HttpReply:
    return HttpReply(VERSION.encode(), content_type=TEXT)


async def info(_call: Call, _request: Empty) -> wire.ServerInfo:
    return INFO


async def workspaces(call: Call, _request: Empty) -> wire.WorkspacesAnswer:
    projects = await call.hub.people.projects(call.actor)
    return wire.WorkspacesAnswer([_workspace(project) for project in projects])


async def workspace(call: Call, _request: Empty) -> wire.WorkspaceAnswer:
    return wire.WorkspaceAnswer(_workspace(await _named(call)))


async def create_workspace(call: Call, request: wire.NewWorkspace) -> wire.WorkspaceAnswer:
    if request.name == DEFAULT_PROJECT:
        raise Refusal(Reason.INVALID, f"name={request.name}: is reserved; choose another name", field="name")
    _refuse_root(request.default_artifact_root)
    description = None if request.description is UNSET else request.description
    project = await call.hub.people.create_project(call.actor, request.name, description)
    return wire.WorkspaceAnswer(_workspace(project))


async def update_workspace(call: Call, request: wire.WorkspaceUpdate) -> wire.WorkspaceAnswer:
    name = check_name("workspace_name", call.path["name"])
    if request.description is UNSET and request.default_artifact_root is UNSET:
        raise Refusal(Reason.INVALID, "description: missing; a workspace update must have at least one key")
    _refuse_root(request.default_artifact_root)
    if request.description is not UNSET:
        await _named(call)
        await call.hub.people.describe_project(call.actor, name, request.description)
    return wire.WorkspaceAnswer(_workspace(await _named(call)))


async def delete_workspace(call: Call, request: wire.WorkspaceDeletion) -> HttpReply:
    name = check_name("workspace_name", call.path["name"])
    if name == DEFAULT_PROJECT:
        raise Refusal(Reason.INVALID, f"name={name}: is reserved; it cannot be deleted", field="workspace_name")
    if request.mode not in _MODES:
        raise Refusal(Reason.INVALID, f"mode={request.mode[:40]!r}: choose one of {', '.join(_MODES)}", field="mode")
    await _named(call)
    if request.mode == "SET_DEFAULT":
        problem = "the hub moves nothing between projects; choose RESTRICT or CASCADE"
        raise Refusal(Reason.UNSUPPORTED, f"mode=SET_DEFAULT: {problem}", field="mode")
    await call.hub.people.delete_project(call.actor, name, only_empty=request.mode == "RESTRICT")
    return HttpReply(status=204)


_MODES = ("SET_DEFAULT", "CASCADE", "RESTRICT")


async def _named(call: Call) -> Project:
    name = check_name("workspace_name", call.path["name"])
    for project in await call.hub.people.projects(call.actor):
        if project.name == name:
            return project
    raise Refusal(Reason.MISSING, f"Workspace '{name}' not found", field="workspace_name")


def _workspace(project: Project) -> wire.Workspace:
    return wire.Workspace(project.name, UNSET if project.description is None else project.description)


def _refuse_root(root: str | UnsetType) -> None:
    """Refuse a place for artifacts: the hub chooses it, so that no client names a folder of the server."""
    if root is not UNSET and root.strip():
        problem = "the hub keeps artifacts in its own store; leave it out"
        raise Refusal(Reason.INVALID, f"default_artifact_root: {problem}", field="default_artifact_root")
