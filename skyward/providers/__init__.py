"""Sources of machines: this machine, SSH hosts, clouds; one file and one line here for each.

Other packages add theirs as an entry point of the group `skyward.providers`: `slurm = "skyward_slurm:Slurm"`.
"""

from __future__ import annotations

from importlib import import_module

from ..errors import MissingDependency, UsageError
from .base import Provider

__all__ = ["PROVIDERS", "is_provider", "load", "provider_names"]

PROVIDERS: dict[str, str] = {
    "aws": "skyward.providers.aws:AWS",
    "local": "skyward.providers.local:Local",
    "ray_cluster": "skyward.providers.ray_cluster:RayCluster",
    "ssh": "skyward.providers.ssh:SSH",
}
"""Import path of each built-in provider class, by provider name."""


def provider_names() -> list[str]:
    """Return the names of all providers: the built-in ones, then those of other installed packages.

    Example:
        >>> provider_names()[:4]
        ['aws', 'local', 'ray_cluster', 'ssh']
    """
    return list(dict.fromkeys([*PROVIDERS, *sorted(_installed())]))


def is_provider(name: str) -> bool:
    """Return whether a provider has this name.

    Example:
        >>> is_provider("local")
        True
    """
    return name in PROVIDERS or name in _installed()


def load(name: str) -> type[Provider]:
    """Import the provider class registered under a name.

    Args:
        name: one of `provider_names()`.

    Raises:
        UsageError: no provider has this name.
        MissingDependency: an optional package is not installed; the message names the extra that brings it.

    Example:
        >>> load("local")()
        Local(lease_s=5.0)
    """
    path = PROVIDERS.get(name) or _installed().get(name)
    if path is None:
        names = ", ".join(map(repr, provider_names()))
        raise UsageError(f"provider={name!r}: unknown; use one of {names}", field="provider", value=name)
    module, _, attribute = path.partition(":")
    try:
        provider: type[Provider] = getattr(import_module(module), attribute)
    except ImportError as error:
        fix = f"run `pip install 'skyward[{name}]'`" if name in PROVIDERS else f"install what {module!r} needs"
        raise MissingDependency(
            f"provider={name!r}: needs an optional package ({error}); {fix}",
            name=error.name,
        ) from error
    return provider


def _installed() -> dict[str, str]:
    """Return import paths of the classes that other packages bring, by provider name."""
    from importlib.metadata import entry_points  # takes milliseconds, which most programs need not wait for

    return {entry.name: entry.value for entry in entry_points(group="skyward.providers")}
