"""Pools that are written down: `skyward.toml` in the working folder, on top of `~/.skyward/defaults.toml`.

[providers.here]
type = "local"

[pools.small]
provider = "here"
nodes = 2

[pools.small.image]
env = { OMP_NUM_THREADS = "1" }
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import UsageError
from .image import Image
from .providers import load

__all__ = ["pool_fields"]

T = TypeVar("T")


def pool_fields(name: str) -> dict[str, Any]:
    """The arguments of the pool of that name, its provider and image made. Raises UsageError."""
    config = _merged(_toml("~/.skyward/defaults.toml"), _toml("skyward.toml"))
    pools = config.get("pools", {})
    if name not in pools:
        known = ", ".join(sorted(pools)) or "none"
        raise UsageError(f"pool {name!r} is in neither ./skyward.toml nor ~/.skyward/defaults.toml; there: {known}")
    fields = dict(pools[name])
    provider = dict(config.get("providers", {}).get(fields.get("provider", ""), {"type": fields.get("provider")}))
    fields["provider"] = _from_table(load(str(provider.pop("type"))), provider, f"the provider of pool {name!r}")
    if "image" in fields:
        fields["image"] = _from_table(Image, fields["image"], f"the image of pool {name!r}")
    return fields


def _toml(path: str) -> dict[str, Any]:
    try:
        with open(os.path.expanduser(path), "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: {error}") from error


def _from_table(make: Callable[..., T], table: dict[str, Any], where: str) -> T:
    try:
        return make(**table)
    except TypeError as error:
        raise UsageError(f"{where}: {str(error).partition(') ')[2]}") from error


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
