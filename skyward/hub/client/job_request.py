"""Request of a job that is a call: its options as the hub takes them, and the files that travel with it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ...accelerators import Accelerator
from ...calls.pending import PendingCompute
from ...errors import UsageError
from ...values.image import Image
from .connection import HubConnection, path_of
from .job_code import PackedCode, PackedFile, pack_call, packed_code
from .settings import Address

POOL_OPTIONS = frozenset(
    {"concurrency", "executor", "preload", "default_timeout_s", "allocation", "architecture", "cancel_grace_s"}
    | {"provision_timeout_s", "direct_transfers"}
)
"""Options of `sky.ComputePool` that a job takes beside its own, as plain data."""
LONGEST_S = 1e9
"""Longest time limit that a hub takes."""
_OF_DRIVER = ("sweep", "after", "after_is", "max_wait_s", "cron", "notify", "notify_wait_s")
"""Options of a sweep's job, where its trials are jobs. All others are theirs."""
_OF_MACHINES = ("accelerator", "devices", "vcpus", "memory_gib", "region", "labels")


def job_request(
    *, nodes: int, accelerator: str | Accelerator | None, on: str, pool: Mapping[str, Any], **others: Any
) -> dict[str, Any]:
    """Return the request of a job, as `model.jobs.JobSpec` has it, of the options of `submit`. Raises UsageError."""
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise UsageError(f"nodes={nodes!r}: not a whole number >= 1; a job has a fixed number", field="nodes")
    if on not in ("one", "all"):
        raise UsageError(f"on={on!r}: unknown; use 'one' (as >>) or 'all' (as @)", field="on", value=on)
    kind = Accelerator.from_name(accelerator) if isinstance(accelerator, str) else accelerator
    return {
        **others,
        "on": on,
        "nodes": nodes,
        "accelerator": "" if kind is None else kind.name,
        "devices": None if kind is None else kind.count,
        "pool": _pool_options(pool),
    }


def driver_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request of a sweep's driver, which has no machines: those of the request are its trials'.

    A launcher of such machines starts it, and it lives as long as its sweep.
    """
    trials = {name: value for name, value in request.items() if name not in _OF_DRIVER}
    own = {name: request[name] for name in (*_OF_DRIVER, *_OF_MACHINES)}
    return {**own, "nodes": 0, "max_duration_s": LONGEST_S, "trials": trials}


def _pool_options(options: Mapping[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in POOL_OPTIONS:
            raise UsageError(
                f"{name}: not an option of a job; see hub.submit, or use one of {', '.join(sorted(POOL_OPTIONS))}",
                field=name,
            )
    return dict(options)


def send_calls(
    address: Address,
    calls: Sequence[PendingCompute[Any]],
    request: Mapping[str, Any],
    body: Mapping[str, Any],
    image: Image | None,
) -> list[dict[str, Any]]:
    """Make a job of each call, and return the jobs as the API shows them. The user's modules travel once.

    Args:
        address: The hub.
        calls: The calls.
        request: Request from `job_request` or `driver_request`.
        body: Name, type, priority, is_held, key and retries, the same for all; None for those of each call.
        image: Environment of the nodes.
    """
    made = []
    with HubConnection(address) as connection, packed_code(image) as (code, folder):
        upload_file(connection, code.file)
        for call in calls:
            _check_stream(call, request)
            packed = pack_call(call, folder)
            upload_file(connection, packed)
            answer = connection.json("POST", "/v1/jobs", _new_job(call, code, packed, request, body))
            made.append(dict(answer))
    return made


def _check_stream(call: PendingCompute[Any], request: Mapping[str, Any]) -> None:
    """Refuse a stream of several nodes, and one as the objective of a sweep. Raises UsageError."""
    if not call.fn.is_generator:
        return
    if request["sweep"] is not None:
        raise UsageError(f"call={call.name}: yields items, and an objective has one value; return it", field="call")
    if request["on"] == "all":
        raise UsageError(f"on='all': {call.name} would make a stream on each node; use on='one'", field="on")


def _new_job(
    call: PendingCompute[Any],
    code: PackedCode,
    packed: PackedFile,
    request: Mapping[str, Any],
    body: Mapping[str, Any],
) -> dict[str, Any]:
    retries = call.options.retries if body["retries"] is None else body["retries"]
    of_call = {
        "retries": retries,
        "timeout_s": call.options.timeout_s,
        "code_path": list(code.path),
        "code_folder": code.folder,
        **({"is_stream": True} if call.fn.is_generator else {}),  # a hub of the version before takes it not
    }
    trials = request.get("trials")
    spec = {**request, **of_call} if trials is None else {**request, "trials": {**trials, **of_call}}
    return {
        "name": body["name"] or call.name,
        "type": body["type"],
        "priority": body["priority"],
        "is_held": body["is_held"],
        # Of each submission its own: the answer may be lost, and the request is sent again.
        "key": body["key"] or uuid.uuid4().hex,
        "blobs": {"code": code.file.sha256, "call": packed.sha256},
        "spec": spec,
    }


def upload_file(connection: HubConnection, file: PackedFile) -> None:
    """Upload a blob of a job."""
    with file.path.open("rb") as source:
        connection.upload("PUT", path_of("v1", "job-blobs", file.sha256), source)
