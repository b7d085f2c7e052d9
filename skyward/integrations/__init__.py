"""Frameworks: one file and one line here for each integration; each is imported when it is first used.

>>> import skyward as sky
>>> @sky.compute
... @sky.integrations.torch
... def train() -> None: ...
"""

import sys as _sys
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from .accelerate import accelerate as accelerate
    from .jax import jax as jax
    from .joblib import joblib_backend as joblib_backend
    from .joblib import sklearn_backend as sklearn_backend
    from .keras import keras as keras
    from .lightning import lightning as lightning
    from .pools import JoblibPool as JoblibPool
    from .pools import ScikitLearnPool as ScikitLearnPool
    from .tensorflow import tensorflow as tensorflow
    from .torch import torch as torch
    from .transformers import transformers as transformers

REGISTRY: dict[str, str] = {
    "JoblibPool": "skyward.integrations.pools:JoblibPool [joblib]",
    "ScikitLearnPool": "skyward.integrations.pools:ScikitLearnPool [sklearn]",
    "accelerate": "skyward.integrations.accelerate:accelerate [accelerate]",
    "jax": "skyward.integrations.jax:jax [jax]",
    "joblib_backend": "skyward.integrations.joblib:joblib_backend [joblib]",
    "keras": "skyward.integrations.keras:keras [keras]",
    "lightning": "skyward.integrations.lightning:lightning [lightning]",
    "sklearn_backend": "skyward.integrations.joblib:sklearn_backend [sklearn]",
    "tensorflow": "skyward.integrations.tensorflow:tensorflow [tensorflow]",
    "torch": "skyward.integrations.torch:torch [torch]",
    "transformers": "skyward.integrations.transformers:transformers [transformers]",
}
"""Name -> where it is and the extra that it needs, written as an entry point is: "module:attribute [extra]"."""

__all__ = ["REGISTRY", *sorted(REGISTRY)]  # noqa: PLE0604  # all are strings


def __getattr__(name: str) -> _Any:
    if name not in REGISTRY:
        from ..spellings import advice

        hint = advice("integrations", name, REGISTRY, shown="{}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {hint}")
    where, _, extra = REGISTRY[name].partition(" ")
    module, _, attribute = where.partition(":")
    try:
        value = getattr(_import_module(module), attribute)
    except ModuleNotFoundError as error:
        from ..errors import MissingDependency

        raise MissingDependency(
            f"sky.integrations.{name} needs {error.name}: pip install 'skyward{extra}'", name=error.name
        ) from error
    globals()[name] = value
    return value


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
