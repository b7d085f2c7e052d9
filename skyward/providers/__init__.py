"""Sources of machines: this machine, SSH hosts, clouds; one file and one line here for each."""

from __future__ import annotations

from importlib import import_module

from ..errors import MissingDependency, UsageError
from .base import Provider

__all__ = ["PROVIDERS", "load"]

PROVIDERS: dict[str, str] = {
    "aws": "skyward.providers.aws:AWS",
    "local": "skyward.providers.local:Local",
    "ssh": "skyward.providers.ssh:SSH",
}
"""Name -> where the class is."""


def load(name: str) -> type[Provider]:
    """The provider class of that name. Raises UsageError for an unknown one, MissingDependency naming the extra."""
    try:
        module, _, attribute = PROVIDERS[name].partition(":")
    except KeyError:
        raise UsageError(f"provider: {name!r} is not known; there are {', '.join(sorted(PROVIDERS))}") from None
    try:
        provider: type[Provider] = getattr(import_module(module), attribute)
    except ImportError as error:
        raise MissingDependency(f"provider {name!r} needs `pip install skyward[{name}]`: {error}") from error
    return provider
