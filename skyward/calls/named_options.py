"""Options of calls on their way to a process that has no class of the user's, and so compares classes by name."""

from __future__ import annotations

import functools
import pickle
from dataclasses import fields

from ..core.classes import class_path
from ..core.records import dataclass
from .options import CallOptions

_NAMES = tuple(field.name for field in fields(CallOptions) if field.name != "retry_on")
_KNOWN = 256


@dataclass(frozen=True, kw_only=True)
class NamedOptions(CallOptions):
    """Options of a call whose `retry_on` became names."""

    retry_names: tuple[str, ...] = ()
    """Full names of the classes of `retry_on`."""


@functools.lru_cache(maxsize=_KNOWN)  # most calls share their options
def pack_options(options: CallOptions) -> bytes:
    """Pickle the options of a call without the user's classes."""
    if options == CallOptions():
        return b""
    values = {name: getattr(options, name) for name in _NAMES}
    return pickle.dumps((values, tuple(map(class_path, options.retry_on))), protocol=5)


@functools.lru_cache(maxsize=_KNOWN)
def unpack_options(data: bytes) -> NamedOptions:
    """Return the options of `pack_options`."""
    values, names = pickle.loads(data) if data else ({}, ())
    return NamedOptions(**values, retry_names=names)
