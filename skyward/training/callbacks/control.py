"""Re-export of the control callback, which lives in its own package."""

from ..control.callback import TrainerControlCallback

__all__ = ["TrainerControlCallback"]
