"""Warnings and errors that show the user's lines and not ours."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

from ..errors import InternalError
from .process import PACKAGE_ROOT

__all__ = ["drop_our_frames", "warn_user"]

_OURS = os.path.join(PACKAGE_ROOT, "skyward") + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (os.path.join(_STANDARD_LIBRARY, "site-packages"), os.path.join(_STANDARD_LIBRARY, "dist-packages"))


def warn_user(text: str) -> None:
    """Warn at the innermost line that is not ours: a `with` statement's frames are ours or contextlib's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OURS, contextlib.__file__)):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def drop_our_frames(error: BaseException) -> None:
    """Drop the traceback of an error if all of its frames are ours: the user's line then stands beside the message.

    To be followed by a bare `raise` where the user calls us, which adds no frame of its own. Frames that lead through
    the user's code stay, such as those of an iterator that was given as an argument, and so do those of a bug of ours.
    """
    frames = error.__traceback__
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        is_standard = file.startswith(_STANDARD_LIBRARY) and not file.startswith(_INSTALLED)
        if not (file.startswith(_OURS) or is_standard):
            return
        frames = frames.tb_next
    if not isinstance(error, InternalError):
        error.__traceback__ = None
