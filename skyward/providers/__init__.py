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
"""Import path of each provider class, by provider name."""


def load(name: str) -> type[Provider]:
    """Import the provider class registered under a name.

    Args:
        name: a key of `PROVIDERS`.

    Raises:
        UsageError: no provider has this name.
        MissingDependency: an optional package is not installed; the message names the extra that brings it.

    Example:
        >>> load("local")()
        Local(lease_s=5.0)
    """
    try:
        module, _, attribute = PROVIDERS[name].partition(":")
    except KeyError:
        names = ", ".join(map(repr, sorted(PROVIDERS)))
        raise UsageError(f"provider={name!r}: unknown; use one of {names}", field="provider", value=name) from None
    try:
        provider: type[Provider] = getattr(import_module(module), attribute)
    except ImportError as error:
        raise MissingDependency(
            f"provider={name!r}: needs an optional package ({error}); run `pip install 'skyward[{name}]'`",
            name=error.name,
        ) from error
    return provider
