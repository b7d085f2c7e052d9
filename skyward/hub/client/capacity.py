"""Machine sets of a hub: listed, declared, drained and removed over its API."""

from __future__ import annotations

from typing import Any

from .connection import HubConnection, path_of
from .reading import needed_address

Row = dict[str, Any]


def machine_sets() -> list[Row]:
    """Return the machine sets of the hub: `name`, `machines`, `is_draining`, `full_until`, `used_nodes` and `jobs`.

    Raises:
        HubError: The hub refuses, or does not answer.
    """
    with HubConnection(needed_address("capacity")) as connection:
        return list(connection.json("GET", "/v1/capacity")["sets"])


def declare(name: str, provider: Row, **facts: Any) -> None:
    """Declare a machine set, or change the one of that name. Needs an owner's token.

    Args:
        name: Its name.
        provider: Provider as data, such as `{"type": "ssh", "hosts": ["a", "b"]}`, without credentials.
        facts: Further fields of `skyward.hub.model.capacity.MachineSetSpec`, such as nodes and accelerator.

    Raises:
        HubError: A field is illegal, or the token is not an owner's.
    """
    with HubConnection(needed_address("capacity")) as connection:
        connection.json("POST", "/v1/capacity", {"name": name, "provider": provider, **facts})


def drain(name: str, *, is_draining: bool = True) -> None:
    """Let running jobs end on a machine set and begin none, or let jobs begin there again. Needs an owner's token."""
    with HubConnection(needed_address("capacity")) as connection:
        connection.json("POST", path_of("v1", "capacity", name, "drain"), {"is_draining": is_draining})


def remove(name: str) -> None:
    """Remove a machine set that no job uses. Needs an owner's token."""
    with HubConnection(needed_address("capacity")) as connection:
        connection.json("DELETE", path_of("v1", "capacity", name))
