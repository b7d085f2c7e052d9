"""Commands as jobs: the fields of a job's YAML, and the spec that they make. Its JSON has the units in the names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .jobs import JobSpec

STRATEGIES = ("ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3")
RDMA = ("auto", "enabled", "disabled")

FIELDS: Mapping[str, tuple[str, ...]] = {
    "": (
        *("name", "type", "image", "command", "operation", "params", "env", "secrets"),
        *("resources", "distributed", "storage", "schedule"),
        *("priority", "region", "labels", "retries", "budget_usd", "key", "is_held", "notify", "notify_wait_s"),
    ),
    "resources": ("gpus", "gpu_type", "memory_gib", "cpu"),
    "distributed": ("strategy", "num_nodes", "gpus_per_node", "backend", "gang_scheduling", "rdma", "sharding"),
    "storage": ("datasets", "checkpoints"),
    "schedule": (
        *("max_duration_s", "checkpoint_interval_s", "preemptible", "keep_s"),
        *("after", "after_is", "max_wait_s", "cron"),
    ),
}
"""Section of the form -> its fields."""

_STRATEGY_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "ddp": {},
    "fsdp": {"ACCELERATE_USE_FSDP": "true"},
    "deepspeed_zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
    "deepspeed_zero3": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
}
"""Strategy -> variables by which Accelerate, and with it the Trainer of transformers, choose it.

Source: `accelerate/utils/launch.py` of Accelerate 1.15.
"""


def command_spec(
    command: Sequence[str],
    *,
    image: str | Mapping[str, Any] = "",
    env: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
    resources: Mapping[str, Any] | None = None,
    distributed: Mapping[str, Any] | None = None,
    storage: Mapping[str, Any] | None = None,
    schedule: Mapping[str, Any] | None = None,
    **others: Any,
) -> JobSpec:
    """Make the spec of a command.

    Args:
        command: Program and arguments. No shell reads them.
        image: Image of a container, or fields of `sky.Image`.
        env: Variables.
        secrets: Names of variables whose values the launcher has.
        resources: Machines; see `FIELDS`.
        distributed: Nodes, and how the processes on them work together.
        storage: Places of data sets and checkpoints, which become variables.
        schedule: Limits of time.
        others: Further fields of `JobSpec`.

    Example:
        >>> spec = command_spec(["python", "train.py"], distributed={"num_nodes": 2, "strategy": "fsdp"})
        >>> spec.nodes, spec.on, spec.image["env"]["ACCELERATE_USE_FSDP"]
        (2, 'all', 'true')
    """
    machines, gang, times = resources or {}, distributed or {}, schedule or {}
    if isinstance(image, str):
        image = {"container": image} if image else {}
    fields = dict(image)
    variables = {**_variables(gang, storage or {}, times), **fields.get("env", {}), **(env or {})}
    ranks = gang.get("gpus_per_node") or 1
    devices = machines.get("gpus") or gang.get("gpus_per_node")
    return JobSpec(
        command=list(command),
        on="all" if gang.get("num_nodes", 1) > 1 else "one",
        nodes=gang.get("num_nodes", 1),
        ranks_per_node=ranks,
        accelerator=machines.get("gpu_type") or "",
        devices=devices or None,
        vcpus=math.ceil(machines.get("cpu") or 0),
        memory_gib=machines.get("memory_gib") or 0.0,
        image={**fields, **({"env": variables} if variables else {})},
        secrets=list(secrets),
        is_preemptible=bool(times.get("preemptible")),
        keep_s=times.get("keep_s"),
        checkpoint_interval_s=times.get("checkpoint_interval_s"),
        after=list(times.get("after") or ()),
        after_is=times.get("after_is") or "success",
        max_wait_s=times.get("max_wait_s"),
        cron=times.get("cron") or "",
        **{"max_duration_s": times["max_duration_s"]} if times.get("max_duration_s") else {},
        **others,
    )


def _variables(gang: Mapping[str, Any], storage: Mapping[str, Any], times: Mapping[str, Any]) -> dict[str, str]:
    made: dict[str, str] = {}
    if strategy := gang.get("strategy"):
        made |= {"SKYWARD_STRATEGY": strategy, **_STRATEGY_VARIABLES[strategy]}
    if sharding := gang.get("sharding"):
        made |= {"FSDP_SHARDING_STRATEGY": sharding.upper()}
    if backend := gang.get("backend"):
        made |= {"SKYWARD_BACKEND": backend}
    if (rdma := gang.get("rdma") or "auto") != "auto":
        made |= {"NCCL_IB_DISABLE": "1" if rdma == "disabled" else "0"}
    if checkpoints := storage.get("checkpoints"):
        made |= {"SKYWARD_CHECKPOINT_DIR": checkpoints}
    if datasets := storage.get("datasets"):
        made |= {"SKYWARD_DATASETS": datasets}
    if interval := times.get("checkpoint_interval_s"):
        made |= {"SKYWARD_CHECKPOINT_INTERVAL_S": f"{interval:g}"}
    return made
