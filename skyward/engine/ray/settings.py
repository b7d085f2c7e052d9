"""Settings of the Ray that a pool raises: its version, its options, and the variables of all its processes.

Secrets are in files of the private folder of Ray on each node. Variables name the files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from ...values.ray_start import NO_METRICS, NO_REPORTS, PATIENCE, TOKEN

RAY_VERSION: Final = "2.60.0"
OPTIONS: Final = (
    "--num-cpus=0",
    "--num-gpus=0",
    f"--object-store-memory={256 << 20}",
    "--include-log-monitor=false",
    "--min-worker-port=0",
    "--max-worker-port=0",
)
HEAD_OPTIONS: Final = ("--head", "--port=0", "--include-dashboard=false", "--no-monitor")
_HEALTH: Final = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
"""A dead node is known after 2.5 s, and one that is cut off after 8.5 s. Ray's own 14.6 and 64.5 s are too long."""
_PATIENT: Final = {"RAY_health_check_failure_threshold": "12", "RAY_gcs_rpc_server_reconnect_timeout_s": "40"}
"""Without a client nobody starts Ray again on a node that was only slow. The links find silent nodes themselves."""
NICENESS: Final = {"RAY_worker_niceness": "0"}
"""Ray's own 15 is for processes that compute. Ours is the bridge: what it carries, and its start, would wait for all
that the node computes, for minutes.
"""
_RESTS: Final = {
    "RAY_debug_dump_period_milliseconds": "0",
    "RAY_core_worker_internal_heartbeat_ms": "10000",
    "RAY_event_stats": "0",
    "RAY_event_stats_print_interval_ms": "0",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_io_context_event_loop_lag_collection_interval_ms": "0",
    "RAY_io_context_monitor_probe_interval_ms": "60000",
    "RAY_kill_idle_workers_interval_ms": "10000",
    "RAY_local_fs_monitor_interval_ms": "10000",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_object_manager_rpc_threads_num": "1",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_raylet_check_gc_period_milliseconds": "10000",
    "RAY_raylet_check_for_unexpected_worker_disconnect_interval_ms": "5000",
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_report_worker_backlog_interval_ms": "60000",
    "RAY_task_events_report_interval_ms": "0",
}
"""What Ray looks at several times a second, for tasks and an autoscaler that a pool does not have. It runs a few actors
that need no resources. Seldom or never takes a quarter of its processor time while nothing is called.
"""
SLACK_S: Final = 0.1
"""How late the waits of Ray's own threads may end, so that they end together. What arrives wakes them at once."""
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
"""Variables that would lead Ray's connections away from the pool's network."""

FILES: Final = ("token", "ca.crt", "node.crt", "node.key")
"""Files with secrets."""


def ray_variables(folder: str, root: str, before: Mapping[str, str], *, is_patient: bool = False) -> dict[str, str]:
    """Return the environment of Ray's processes on a node.

    Args:
        folder: Ray's folder there.
        root: Folder of skyward's packages there.
        before: Environment of the login.
        is_patient: Whether silent nodes get more time.
    """
    token, ca, certificate, key = (os.path.join(folder, name) for name in FILES)
    kept = {
        name: value
        for name, value in before.items()
        if not name.startswith(("RAY_", "PYTHON")) and name.lower() not in _PROXIES
    }
    return {
        **kept,
        **PATIENCE,
        **NO_REPORTS,
        **NO_METRICS,
        **TOKEN,
        **NICENESS,
        **_RESTS,
        **_HEALTH,
        **(_PATIENT if is_patient else {}),
        "RAY_AUTH_TOKEN_PATH": token,
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": ca,
        "RAY_TLS_SERVER_CERT": certificate,
        "RAY_TLS_SERVER_KEY": key,
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
        "PYTHONPATH": root,
    }
