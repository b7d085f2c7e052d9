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
    "ray_cluster": "ray",
    "sklearn_backend": "sklearn",
}
"""Extras whose name differs from that of the integration."""

__getattr__, _, _names = _lazy_names(__name__, __file__, extra=_OTHER_EXTRAS)

REGISTRY: dict[str, str] = {name: _OTHER_EXTRAS.get(name, name) for name in _names}
"""Extra that each name needs."""

__all__ = ["REGISTRY", *_names]  # noqa: PLE0604  # all are strings


def __dir__() -> list[str]:
    return list(__all__)


class _Package(_ModuleType):
    """Package whose names stay decorators when the modules of the same names are imported.

    Importing `torch.py` makes Python set the attribute `torch` of this package to that module. A rank does so before it
    loads the user's code, which expects the decorator there.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in REGISTRY and isinstance(value, _ModuleType)):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package
