"""Checkpoints of a run: every part declares which ranks share it; what is committed is whole on all of them.

    from skyward.training.checkpoint import CheckpointCoordinator, RNGState, SharingPattern, StateComponent

    coordinator = CheckpointCoordinator(
        [
            StateComponent("model", model, SharingPattern.REPLICATED, validate_replication=True),
            StateComponent("optimizer", optimizer, SharingPattern.REPLICATED),
            StateComponent("rng", RNGState(), SharingPattern.PER_RANK, required=False),
        ],
        output_dir="out",
    )
    coordinator.save_checkpoint(checkpoint_id="100")
    coordinator.load_checkpoint()

Names are loaded when they are first used: importing this imports no framework.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

_MODULES = {
    "callback": ("CheckpointCallback",),
    "coordinator": ("CheckpointCoordinator", "LoadReport", "components_of", "process_groups_of"),
    "files": ("Checkpoints", "FileCheckpoints"),
    "inspecting": ("Difference", "differences", "problems"),
    "layout": ("checkpoints_in", "latest_checkpoint"),
    "manager": ("CheckpointManager", "RunTerminated"),
    "manifest": ("FileEntry", "Manifest"),
    "migrate": ("export_checkpoint", "migrate_checkpoint"),
    "patterns": ("SharingPattern", "StateComponent", "ValidationLevel"),
    "retention": ("best_of", "delete_checkpoint", "prune"),
    "rng": ("RNGState", "seed_everything"),
    "sharded": ("ModelState", "OptimizerState"),
}

_WHERE = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_WHERE)  # noqa: PLE0605  # all are strings


def __getattr__(name: str) -> _Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
