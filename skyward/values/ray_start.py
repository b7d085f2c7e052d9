"""Facts about `ray start` for everything that starts Ray: its command, its patience, its token."""

from __future__ import annotations

from typing import Final

STARTED: Final = "Ray runtime started"
"""Line that `ray start` prints when its node belongs to the cluster."""
PATIENCE: Final = {
    "RAY_NUM_REDIS_GET_RETRIES": "90",
    "RAY_agent_register_timeout_ms": "90000",
    "RAY_raylet_start_wait_time_s": "90",
}
"""How long Ray's processes wait for each other when they start. Ray's own 20 to 30 s are too few on a busy machine."""
NO_REPORTS: Final = {"RAY_USAGE_STATS_ENABLED": "0"}
NO_METRICS: Final = {"RAY_enable_metrics_collection": "0"}
"""Keeps Ray from looking for an agent of metrics where there is none: only `ray[default]` brings one."""
TOKEN: Final = {"RAY_AUTH_MODE": "token"}
AGENTS: Final = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
"""Ray's agents on a node. If one looks for a port itself, the node ends unless that is quick, in 15 s."""


def start_command(python: str, *arguments: str) -> list[str]:
    """Return the command that starts Ray on a node. With "--block" it lasts as long as Ray does."""
    return [python, "-m", "ray.scripts.scripts", "start", *arguments, "--disable-usage-stats"]
