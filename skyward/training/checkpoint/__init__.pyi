"""What `__init__.py` loads when it is first used, as imports: for checkers and editors."""

from .callback import CheckpointCallback as CheckpointCallback
from .coordinator import CheckpointCoordinator as CheckpointCoordinator
from .coordinator import LoadReport as LoadReport
from .coordinator import components_of as components_of
from .coordinator import process_groups_of as process_groups_of
from .files import Checkpoints as Checkpoints
from .files import FileCheckpoints as FileCheckpoints
from .inspecting import Difference as Difference
from .inspecting import differences as differences
from .inspecting import problems as problems
from .latest import latest_checkpoint as latest_checkpoint
from .layout import checkpoints_in as checkpoints_in
from .manager import CheckpointManager as CheckpointManager
from .manager import RunTerminated as RunTerminated
from .manifest import FileEntry as FileEntry
from .manifest import Manifest as Manifest
from .migrate import export_checkpoint as export_checkpoint
from .migrate import migrate_checkpoint as migrate_checkpoint
from .patterns import SharingPattern as SharingPattern
from .patterns import StateComponent as StateComponent
from .patterns import ValidationLevel as ValidationLevel
from .retention import best_of as best_of
from .retention import delete_checkpoint as delete_checkpoint
from .retention import prune as prune
from .rng import RNGState as RNGState
from .rng import seed_everything as seed_everything
from .sharded import ModelState as ModelState
from .sharded import OptimizerState as OptimizerState

__all__ = [
    "CheckpointCallback",
    "CheckpointCoordinator",
    "CheckpointManager",
    "Checkpoints",
    "Difference",
    "FileCheckpoints",
    "FileEntry",
    "LoadReport",
    "Manifest",
    "ModelState",
    "OptimizerState",
    "RNGState",
    "RunTerminated",
    "SharingPattern",
    "StateComponent",
    "ValidationLevel",
    "best_of",
    "checkpoints_in",
    "components_of",
    "delete_checkpoint",
    "differences",
    "export_checkpoint",
    "latest_checkpoint",
    "migrate_checkpoint",
    "problems",
    "process_groups_of",
    "prune",
    "seed_everything",
]
