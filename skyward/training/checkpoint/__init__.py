"""What a checkpoint is made of, and who writes it."""

from .components import SharingPattern, StateComponent
from .files import Checkpoints, FileCheckpoints
from .rng import RNGState

__all__ = ["Checkpoints", "FileCheckpoints", "RNGState", "SharingPattern", "StateComponent"]
