"""Pickles of our own plain data, and nothing else: a head has no module of the user's, and imports none."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

from ...errors import InternalError

_OURS = "skyward"


class _OwnUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        root = module.partition(".")[0]
        if root != _OURS and root not in sys.stdlib_module_names:
            raise InternalError(f"head: refuses {module}.{name}, which is not its own; report this bug")
        return super().find_class(module, name)


def load_plain(data: bytes) -> Any:
    """Unpickle what another process of skyward has made of its own values.

    Raises:
        InternalError: There is something of the user's in it.
    """
    return _OwnUnpickler(io.BytesIO(data)).load()


def dump_plain(value: Any) -> bytes:
    """Pickle plain data."""
    return pickle.dumps(value, protocol=5)
