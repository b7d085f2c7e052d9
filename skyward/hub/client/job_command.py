"""Submission of commands as jobs."""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...values.image import Image
from .connection import HubConnection
from .job_code import image_fields, packed_code, secret_names
from .job_file import job_request, read_job_file
from .job_handle import Job
from .job_request import upload_file
from .jobs import job_address

_BETWEEN_WORDS = re.compile(r"[\s=;&|()<>'\"]+")


def submit_command(form: str | os.PathLike[str] | Mapping[str, Any], *, project: str | None = None) -> Job[Any]:
    """Hand a command to the hub, with the Python modules of the working folder and the files that the command names.

    It runs on each of its nodes. No shell reads it. Its processes have RANK, WORLD_SIZE, MASTER_ADDR and the other
    variables of torchrun. Its value is 0, in a list if it has several nodes.

    Args:
        form: File of YAML, or a mapping with the same fields; see the guide "A command as a job".
        project: Project of the hub. None: the form's, or the token's.

    Returns:
        The job. `result()` raises `CommandFailed` if the command ended with another status than 0.

    Raises:
        UsageError: A field is unknown or illegal, with the nearest known one.
        HubError: The hub refuses the job, or does not answer.

    Example:
        from skyward import hub

        job = hub.submit_command({"command": ["python", "train.py"], "schedule": {"max_duration": "48h"}})
        print(job.id)
    """
    fields = dict(form) if isinstance(form, Mapping) else read_job_file(Path(form))
    address = job_address(project or fields.pop("project", None))
    request = job_request(fields)
    image = _image_of(request.get("image"))
    here = os.getcwd()
    path = sys.path
    if here not in path and "" not in path:
        sys.path = [here, *path]  # so that the folder's modules travel, as they do for a script in it
    try:
        with (
            packed_code(image, _files_named(request.get("command") or ())) as (code, _),
            HubConnection(address) as connection,
        ):
            upload_file(connection, code.file)
            answer = connection.json(
                "POST",
                "/v1/jobs",
                {
                    "name": _name_of(request),
                    # Of each submission its own: the answer may be lost, and the request is sent again.
                    "key": uuid.uuid4().hex,
                    **request,
                    "image": image_fields(image),
                    "secrets": [*request.get("secrets", []), *secret_names(image)],
                    "blobs": {"code": code.file.sha256},
                    "code_path": list(code.path),
                    "code_folder": code.folder,
                },
            )
    finally:
        sys.path = path
    return Job(address, answer)


def submit_operation(
    operation: str, params: Mapping[str, Any] | None = None, *, project: str | None = None, **form: Any
) -> Job[Any]:
    """Hand a named operation to the hub, such as `checkpoint.verify`. `hub.operations()` lists them.

    Args:
        operation: Its name.
        params: Its parameters. The hub checks them against the schema of the operation.
        project: Project of the hub. None: the token's.
        form: Further fields of a job's YAML, such as `resources` and `schedule`.

    Raises:
        UsageError: A field is unknown.
        HubError: The hub knows no such operation, or a parameter is wrong, with the nearest known one.

    Example:
        from skyward import hub

        job = hub.submit_operation("checkpoint.verify", {"path": "/data/run/checkpoint-100"})
        print(job.result()["problems"])
    """
    return submit_command({**form, "operation": operation, "params": dict(params or {})}, project=project)


def operations(*, project: str | None = None) -> list[dict[str, Any]]:
    """Return the named operations of the hub: `name`, `text`, `type` and `schema`, the JSON schema of the parameters.

    Example:
        from skyward import hub

        print([operation["name"] for operation in hub.operations()])
    """
    with HubConnection(job_address(project)) as connection:
        return list(connection.json("GET", "/v1/operations")["operations"])


def _name_of(request: Mapping[str, Any]) -> str:
    if not request.get("command"):
        return str(request["operation"])[:200]
    return str(request["command"][0]).rpartition("/")[2][:200] or "command"


def _files_named(command: Sequence[str]) -> list[str]:
    """Return the files below the working folder that a command names: as an argument, after "=", or for a shell."""
    words = {word for argument in command for word in (argument, *_BETWEEN_WORDS.split(argument))}
    paths = {os.path.normpath(word) for word in words if word and os.path.isfile(word)}
    return sorted(path for path in paths if not path.startswith((os.sep, "..")))


def _image_of(value: Any) -> Image | None:
    if value is None or isinstance(value, str):
        return Image(container=value) if value else None
    if not isinstance(value, Mapping):
        raise UsageError(f"image={value!r}: neither text nor a mapping; write a container's name, or pip: [torch]")
    return Image(**value)
