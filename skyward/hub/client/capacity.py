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


def quotas() -> list[Row]:
    """Return quotas of jobs with their use: those of this project and user, or all with an owner's token.

    Returns:
        A row for each quota: `holder` ("project" or "user"), `name`, `quota`, and the use `devices` by kind, `nodes`,
        `jobs`, `today_usd` and `month_usd`.
    """
    with HubConnection(needed_address("quotas")) as connection:
        return list(connection.json("GET", "/v1/job-quotas")["quotas"])


def set_quota(name: str, *, is_user: bool = False, **limits: Any) -> None:
    """Set what the jobs of a project or user may use. Needs an owner's token.

    A new quota replaces the one before. Without limits it is removed. Running jobs go on, also above a new limit,
    except that spent money ends them.

    Args:
        name: Name of the project or the user.
        is_user: It is a user.
        limits: Fields of `skyward.hub.model.quotas.JobQuotaSpec`, such as weight, devices and usd_per_day.

    Raises:
        HubError: A field is illegal, or the token is not an owner's.

    Example:
        >>> set_quota("research", weight=2, devices={"A100": 16}, usd_per_month=5000)  # doctest: +SKIP
    """
    with HubConnection(needed_address("quotas")) as connection:
        connection.json("PUT", path_of("v1", "users" if is_user else "projects", name, "job-quota"), limits)
