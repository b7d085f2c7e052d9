"""A backend of matplotlib for tasks: `plt.show()` sends the figures to the client, and closes them.

Chosen when a task imports matplotlib; see `displays`. A slot runs many calls, so each shows the figures that it made.
"""

from __future__ import annotations

from typing import Any

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from .displays import display
from .runtime import call_endings, current_call


def _task() -> int:
    call = current_call()
    return 0 if call is None else call.task


class FigureManager(FigureManagerBase):
    """Manager of one figure of pyplot."""

    def __init__(self, canvas: Any, num: Any) -> None:
        super().__init__(canvas, num)
        self._task = _task()
        if self._task:  # a figure that stays open would be the current one of the next call
            call_endings.setdefault(self._task, []).append(lambda _: Gcf.destroy(self))

    def show(self) -> None:
        """Show the figure; `figure.show()` and `plt.show()` call it."""
        display(self.canvas.figure)

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:
        """Show the figures of this task and close them, as a notebook does."""
        for manager in Gcf.get_all_fig_managers():
            if isinstance(manager, cls) and manager._task == _task():
                manager.show()
                Gcf.destroy(manager)


class FigureCanvas(FigureCanvasAgg):
    """Canvas that draws into memory."""

    manager_class = FigureManager
