"""Warnings that name the user's line, however deep in here they are found."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

__all__ = ["warn_user"]

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def warn_user(text: str) -> None:
    """Warn at the innermost line that is not ours: a `with` statement's frames are ours or contextlib's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OURS, contextlib.__file__)):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
