"""The IPython shell that this program runs in, if any."""

from __future__ import annotations

import sys
from typing import Any


def ipython_shell() -> Any:
    """Return the IPython shell that this program runs in; None if there is none."""
    module = sys.modules.get("IPython")
    get = getattr(module, "get_ipython", None)
    return get() if get is not None else None


def is_notebook() -> bool:
    """Return whether this is the kernel of a notebook, which shows HTML and images."""
    return hasattr(ipython_shell(), "kernel")
