"""Choice of the tests that prove the main promises: those of `make test`. All others run in `make test-all`."""

from __future__ import annotations

import pytest

# All tests in these folders and files, except those marked `slow` or `hosts`. Each group is a process of its own.
POOLS = (
    "tests/calls",
    "tests/pool",
    "tests/values",
    "tests/test_accelerators.py",
    "tests/test_mistakes.py",
    "tests/test_public.py",
    "tests/test_typing.py",
)
# Tests of values that stay on the nodes between calls. They are as long as the other tests of tests/pool.
KEPT = tuple(
    f"tests/pool/test_{name}.py"
    for name in (
        "actors",
        "actors_in_tasks",
        "arrays",
        "files",
        "graphs",
        "kept_faults",
        "lent_values",
        "mounted_volumes",
        "pull",
        "refs",
        "store_volumes",
        "task_values",
        "volume_faults",
        "volumes",
    )
)
# Tests of machines that come and go while a pool lives, and of what they cost.
CHANGES = tuple(
    f"tests/pool/test_{name}.py"
    for name in ("cost", "elastic", "events", "machines", "place", "replacement", "replacements", "scarcity")
)
COMMANDS = (
    "tests/cli",
    "tests/console",
    "tests/lifecycle/test_client_dies.py",
)
ENGINE = (
    "tests/core",
    "tests/errors",
    "tests/events",
    "tests/engine",
    "tests/node",
    "tests/schedule",
    "tests/state",
    "tests/test_architecture.py",
    "tests/test_private_names.py",
    "tests/test_project.py",
    "tests/wire",
)
FRAMEWORKS = (
    "tests/integrations/test_joblib.py",
    "tests/integrations/test_torch.py",
    "tests/training/checkpoint/test_coordinator.py",
    "tests/training/checkpoint/test_manifest.py",
    "tests/training/checkpoint/test_two_ranks.py",
    "tests/training/control/test_control.py",
    "tests/training/evaluation/test_evaluator.py",
    "tests/training/evaluation/test_gate.py",
    "tests/training/test_bus.py",
    "tests/training/test_jsonlog.py",
    "tests/training/test_metrics.py",
)
HUB = (
    "tests/hub/client/test_spool.py",
    "tests/hub/http/test_edge.py",
    "tests/hub/http/test_matrix.py",
    "tests/hub/http/test_mlflow_runs.py",
    "tests/hub/http/test_people.py",
    "tests/hub/model",
    "tests/hub/services/test_tracking.py",
)


def is_promise(item: pytest.Item) -> bool:
    """Return whether a test belongs to `make test`. Otherwise it belongs to `make test-all`."""
    if item.get_closest_marker("slow") or item.get_closest_marker("hosts"):
        return False
    if "[postgresql" in item.nodeid:  # not on every machine
        return False
    paths = (*POOLS, *KEPT, *CHANGES, *COMMANDS, *ENGINE, *FRAMEWORKS, *HUB)
    return any(item.nodeid.startswith((f"{path}/", f"{path}::")) for path in paths)
