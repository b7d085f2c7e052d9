"""Administration of a hub over its API: figures, users, tokens, projects and their members."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model.status import HubStatus
from .connection import HubConnection, path_of
from .reading import needed_address

Row = dict[str, Any]
"""A row of the API. Times are milliseconds since 1970."""


def status() -> HubStatus:
    """Return the size of this process's hub. Needs an owner's token.

    Raises:
        HubUnreachable: No hub is named, or it does not answer.
        HubError: The token is not an owner's.
    """
    return HubStatus(**_ask("GET", "v1", "status"))


def users() -> list[Row]:
    """Return all users and service accounts. Needs an owner's token."""
    return _list("users", "v1", "users")


def create_user(name: str, *, is_service: bool = False, is_owner: bool = False) -> str | None:
    """Create a user.

    Args:
        name: Lower-case name.
        is_service: Whether it is a program's account, which has tokens and cannot sign in.
        is_owner: Whether it manages projects and users.

    Returns:
        A link that signs the user in once; nobody has a password. None for a service account.
    """
    body = {"name": name, "is_service": is_service, "is_owner": is_owner}
    return _link(_ask("POST", "v1", "users", body=body))


def create_sign_in_link(user: str) -> str | None:
    """Make a further one-time link for a user who has lost the session."""
    return _link(_ask("POST", "v1", "users", user, "link", body={}))


def remove_user(name: str) -> None:
    """Disable a user for good: sessions and tokens end at once, runs keep the name."""
    _ask("DELETE", "v1", "users", name)


def tokens(*, everybody: bool = False) -> list[Row]:
    """Return one's tokens without their secrets, or those of everybody, which only owners may see."""
    return _list("tokens", "v1", "tokens", query={"everybody": "true"} if everybody else None)


def create_token(
    name: str,
    *,
    user: str | None = None,
    project: str | None = None,
    role: str | None = None,
    expires_at: int | None = None,
) -> Row:
    """Make a token.

    Args:
        name: Text by which its user knows it.
        user: Its user. None: oneself.
        project: The only project for which it is good. None: all of the user's.
        role: Greatest role that it gives: viewer, researcher or admin.
        expires_at: End, in milliseconds since 1970.

    Returns:
        Its `id` and its `token`, which no later call shows again.
    """
    body = {"name": name, "user": user, "project": project, "role": role, "expires_at": expires_at}
    return dict(_ask("POST", "v1", "tokens", body=body))


def revoke_token(token_id: str) -> None:
    """Revoke a token by its id. It ends at once."""
    _ask("DELETE", "v1", "tokens", token_id)


def projects() -> list[Row]:
    """Return one's projects."""
    return _list("projects", "v1", "projects")


def create_project(name: str) -> None:
    """Create a project. Needs an owner's token."""
    _ask("POST", "v1", "projects", body={"name": name})


def remove_project(name: str) -> None:
    """Hide a project and all that is in it. Needs an owner's token."""
    _ask("DELETE", "v1", "projects", name)


def limits(project: str) -> list[Row]:
    """Return the limits of a project: `name`, `most` (None: no limit) and `used`."""
    return _list("limits", "v1", "projects", project, "limits")


def set_limit(project: str, name: str, most: int | None) -> None:
    """Set a limit of a project. Needs an owner's token.

    Runs and artifacts stay, also above a new limit. The hub refuses further ones in words.

    Args:
        project: Name of the project.
        name: `runs`, those in the bin included, or `artifact_bytes`, of which equal ones count once.
        most: Greatest use. None removes the limit.
    """
    _ask("PATCH", "v1", "projects", project, "limits", body={name: most})


def members(project: str) -> list[Row]:
    """Return the members of a project and their roles."""
    return _list("members", "v1", "projects", project, "members")


def set_member(project: str, user: str, role: str) -> None:
    """Give a user a role in a project: viewer, researcher or admin."""
    _ask("POST", "v1", "projects", project, "members", body={"user": user, "role": role})


def remove_member(project: str, user: str) -> None:
    """Remove a member from a project, with the tokens for this project alone."""
    _ask("DELETE", "v1", "projects", project, "members", user)


def _ask(method: str, *parts: str, body: object = None, query: Mapping[str, str] | None = None) -> Row:
    with HubConnection(needed_address(parts[1])) as connection:
        answer: Row = connection.json(method, path_of(*(_quotable(part) for part in parts)), body, query=query)
    return answer


def _quotable(part: str) -> str:
    """Keep a name from becoming several parts of a path: names have no slash, so that the hub refuses this one."""
    return part.replace("/", "%")


def _list(plural: str, *parts: str, query: Mapping[str, str] | None = None) -> list[Row]:
    return list(_ask("GET", *parts, query=query)[plural])


def _link(answer: Row) -> str | None:
    link: str | None = answer["link"]
    return link
