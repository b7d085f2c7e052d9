"""What `__init__.py` loads when it is first used, as imports: for checkers and editors."""

from .coordinator import CheckpointCoordinator as CheckpointCoordinator
from .coordinator import LoadReport as LoadReport
from .coordinator import components_of as components_of
from .coordinator import process_groups_of as process_groups_of
from .files import Checkpoints as Checkpoints
from .files import FileCheckpoints as FileCheckpoints
from .layout import checkpoints_in as checkpoints_in
from .layout import latest_checkpoint as latest_checkpoint
from .manifest import FileEntry as FileEntry
from .manifest import Manifest as Manifest
from .patterns import SharingPattern as SharingPattern
from .patterns import StateComponent as StateComponent
from .patterns import ValidationLevel as ValidationLevel
from .rng import RNGState as RNGState
from .rng import seed_everything as seed_everything

__all__ = [
    "CheckpointCoordinator",
    "Checkpoints",
    "FileCheckpoints",
    "FileEntry",
    "LoadReport",
    "Manifest",
    "RNGState",
    "SharingPattern",
    "StateComponent",
    "ValidationLevel",
    "checkpoints_in",
    "components_of",
    "latest_checkpoint",
    "process_groups_of",
    "seed_everything",
]
