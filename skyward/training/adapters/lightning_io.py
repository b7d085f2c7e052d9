"""The documented module path of `lightning_checkpoint_io`."""

from ..frameworks.lightning.checkpoint_io import lightning_checkpoint_io

__all__ = ["lightning_checkpoint_io"]
