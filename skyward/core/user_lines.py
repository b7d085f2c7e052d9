"""Warnings and errors that point to the user's lines instead of skyward's."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

from ..errors import InternalError
from .process import PACKAGE_ROOT

_OURS = os.path.join(PACKAGE_ROOT, "skyward") + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (os.path.join(_STANDARD_LIBRARY, "site-packages"), os.path.join(_STANDARD_LIBRARY, "dist-packages"))


def warn_user(text: str) -> None:
    """Warn at the innermost line outside skyward and contextlib, whose frames belong to a `with` statement."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OURS, contextlib.__file__)):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def drop_our_frames(error: BaseException) -> None:
    """Drop the traceback of an error if skyward raised all of it, so that the user's line stands next to the message.

    A bare `raise` must follow, in the method that the user calls; it adds no frame of its own. Frames that lead through
    the user's code stay, such as those of an iterator argument. So do those of bugs in skyward.
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
