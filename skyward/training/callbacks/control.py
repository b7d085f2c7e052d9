"""Control is a package of its own; its callback is found here, too."""

from ..control.callback import TrainerControlCallback

__all__ = ["TrainerControlCallback"]
