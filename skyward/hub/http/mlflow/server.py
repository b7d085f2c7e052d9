"""Handlers about the server itself: health, version, capabilities and workspaces."""

from __future__ import annotations

from ...model.names import check_name
from ...model.refusal import Reason, Refusal
from ...services.access import DEFAULT_PROJECT
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
    return wire.WorkspacesAnswer([wire.Workspace(project.name) for project in projects])


async def workspace(call: Call, _request: Empty) -> wire.WorkspaceAnswer:
    name = check_name("workspace_name", call.path["name"])
    projects = await call.hub.people.projects(call.actor)
    if name not in {project.name for project in projects}:
        raise Refusal(Reason.MISSING, f"Workspace '{name}' not found", field="workspace_name")
    return wire.WorkspaceAnswer(wire.Workspace(name))


async def create_workspace(call: Call, request: wire.Workspace) -> wire.WorkspaceAnswer:
    if request.name == DEFAULT_PROJECT:
        raise Refusal(Reason.INVALID, f"name={request.name}: is reserved; choose another name", field="name")
    project = await call.hub.people.create_project(call.actor, request.name)
    return wire.WorkspaceAnswer(wire.Workspace(project.name))
