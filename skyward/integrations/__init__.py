"""Frameworks: one file and one line in the stub for each integration, imported on first use.

>>> import skyward as sky
>>> @sky.compute
... @sky.integrations.torch
... def train() -> None: ...
"""

import sys as _sys
from types import ModuleType as _ModuleType

from .._lazy import lazy_names as _lazy_names

_OTHER_EXTRAS = {
    "JoblibPool": "joblib",
    "ScikitLearnPool": "sklearn",
    "joblib_backend": "joblib",
    "sklearn_backend": "sklearn",
}
"""The extra that a name needs, where it is not called by that name."""

__getattr__, _, _names = _lazy_names(__name__, __file__, extra=_OTHER_EXTRAS)

REGISTRY: dict[str, str] = {name: _OTHER_EXTRAS.get(name, name) for name in _names}
"""Name -> the extra that it needs."""

__all__ = ["REGISTRY", *_names]  # noqa: PLE0604  # all are strings


def __dir__() -> list[str]:
    return list(__all__)


class _Package(_ModuleType):
    """Importing the file `torch.py` makes Python set the attribute `torch` of this package to that module. The name
    is the decorator's, whichever is imported first: a rank imports the file before the user's code.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in REGISTRY and isinstance(value, _ModuleType)):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package
