"""`skyward hub status | token | user | project`: administration of a hub over its API."""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .layout import add_command

if TYPE_CHECKING:
    _Actions = argparse._SubParsersAction[argparse.ArgumentParser]

ROLES = ("viewer", "researcher", "admin")
LIMITS = ("runs", "artifact_bytes")
_AMOUNT = re.compile(r"([0-9]{1,15})(|KiB|MiB|GiB|TiB)")
_SIZES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS = {"h": 3600, "d": 86_400, "w": 604_800}
_PERIOD = re.compile(r"([1-9][0-9]{0,4})([hdw])")

Run = Callable[[argparse.Namespace], int]


def add_people(actions: _Actions) -> None:
    """Add the actions that ask a hub over HTTP. SKYWARD_HUB_URL and SKYWARD_HUB_TOKEN name it."""
    _add_tokens(_group(actions, "token", "make, list and revoke tokens", "hub token create laptop"))
    _add_users(_group(actions, "user", "add, list and remove users", "hub user add ada"))
    _add_projects(_group(actions, "project", "manage projects and their members", "hub project create vision"))


def amount(text: str) -> int | None:
    """Convert a number, or a size such as `200GiB`, to an integer, and `none` to None.

    Raises:
        argparse.ArgumentTypeError: It is neither.
    """
    if text == "none":
        return None
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: not an amount; write a number, a size such as 200GiB, or none")
    return int(match[1]) * _SIZES[match[2]]


def period_s(text: str) -> int:
    """Convert a period such as `30d`, `12h` or `2w` to seconds.

    Raises:
        argparse.ArgumentTypeError: It is not a period.
    """
    match = _PERIOD.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: not a period; write a number with h, d or w, such as 30d")
    return int(match[1]) * _UNITS[match[2]]


def add_action(actions: _Actions, name: str, text: str, example: str, run: Run) -> argparse.ArgumentParser:
    """Add one action with its help, an example and `--json`."""
    own = add_command(actions, name, text, example)
    own.add_argument("--json", action="store_true", help="print JSON")
    own.set_defaults(run=run)
    return own


def _group(actions: _Actions, name: str, text: str, example: str) -> _Actions:
    own = actions.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}. SKYWARD_HUB_URL and SKYWARD_HUB_TOKEN name the hub.",
        epilog=f"example: skyward {example}\nfrom Python: functions of skyward.hub.client.people",
    )
    own.set_defaults(run=None, parser=own)
    return own.add_subparsers(title="actions", metavar="ACTION")


def _add_tokens(actions: _Actions) -> None:
    create = add_action(actions, "create", "make a token, which is shown once", "hub token create ci", _create_token)
    create.add_argument("name", help="name by which you recognize it")
    create.add_argument("--user", help="user of the token (default: you); only owners may name others")
    create.add_argument("--project", help="the only project that it may use (default: all of the user's)")
    create.add_argument("--role", choices=ROLES, help="greatest role that it gives")
    create.add_argument("--expires-in", type=period_s, metavar="PERIOD", help="such as 12h, 30d or 4w (default: never)")
    listing = add_action(actions, "list", "list tokens without their secrets", "hub token list", _list_tokens)
    listing.add_argument("--all", action="store_true", help="tokens of all users; for owners")
    revoke = add_action(actions, "revoke", "end a token at once", "hub token revoke 3f2a9c01b7de", _revoke_token)
    revoke.add_argument("id", help="id of the token; see `skyward hub token list`")


def _add_users(actions: _Actions) -> None:
    add = add_action(actions, "add", "add a user and print a one-time sign-in link", "hub user add ada", _add_user)
    add.add_argument("name", help="lower-case name")
    add.add_argument("--owner", action="store_true", help="let the user manage projects and users")
    add.add_argument("--service", action="store_true", help="account of a program: tokens, no signing in")
    add_action(actions, "list", "list users", "hub user list", _list_users)
    link = add_action(actions, "link", "print another one-time sign-in link", "hub user link ada", _link_user)
    link.add_argument("name", help="name of the user")
    remove = add_action(actions, "remove", "disable a user for good", "hub user remove ada", _remove_user)
    remove.add_argument("name", help="name of the user")


def _add_projects(actions: _Actions) -> None:
    create = add_action(actions, "create", "create a project", "hub project create vision", _create_project)
    create.add_argument("name", help="lower-case name")
    add_action(actions, "list", "list your projects", "hub project list", _list_projects)
    remove = add_action(actions, "remove", "hide a project and its runs", "hub project remove vision", _remove_project)
    remove.add_argument("name", help="name of the project")
    limits = add_action(actions, "limits", "show limits and their use", "hub project limits vision", _limits)
    limits.add_argument("project", help="name of the project")
    limit = add_action(
        actions, "limit", "set a limit of a project", "hub project limit vision artifact_bytes 200GiB", _set_limit
    )
    limit.add_argument("project", help="name of the project")
    limit.add_argument("name", choices=LIMITS, help="what is limited: " + " or ".join(LIMITS))
    limit.add_argument("most", type=amount, help="a number, a size such as 200GiB, or none")
    members = add_action(actions, "members", "list members of a project", "hub project members vision", _members)
    members.add_argument("project", help="name of the project")
    add = add_action(
        actions, "add-member", "give a user a role in a project", "hub project add-member vision ada", _add_member
    )
    add.add_argument("project", help="name of the project")
    add.add_argument("user", help="name of the user")
    add.add_argument("--role", choices=ROLES, default="researcher", help="role (default: researcher)")
    leave = add_action(
        actions, "remove-member", "remove a member", "hub project remove-member vision ada", _remove_member
    )
    leave.add_argument("project", help="name of the project")
    leave.add_argument("user", help="name of the user")


def _create_token(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    period = arguments.expires_in
    made = people.create_token(
        arguments.name,
        user=arguments.user,
        project=arguments.project,
        role=arguments.role,
        expires_at=None if period is None else (int(time.time()) + period) * 1000,
    )
    return tell(arguments, made, [f"{made['token']}", "Store it now: it is not shown again."])


def _list_tokens(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    rows = people.tokens(everybody=arguments.all)
    return _show(arguments, rows, ("id", "name", "user", "kind", "project", "role", "expires_at", "used_at"))


def _revoke_token(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    people.revoke_token(arguments.id)
    return tell(arguments, {"revoked": arguments.id}, [f"revoked token {arguments.id}"])


def _add_user(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    link = people.create_user(arguments.name, is_service=arguments.service, is_owner=arguments.owner)
    return _tell_link(arguments, link)


def _link_user(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    return _tell_link(arguments, people.create_sign_in_link(arguments.name))


def _tell_link(arguments: argparse.Namespace, link: str | None) -> int:
    lines = [f"Give this link to {arguments.name}. It signs in once:", f"  {link}"]
    if link is None:
        lines = [f"Make a token for it: skyward hub token create NAME --user {arguments.name}"]
    return tell(arguments, {"user": arguments.name, "link": link}, lines)


def _list_users(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    return _show(arguments, people.users(), ("name", "kind", "is_owner", "created_at", "disabled_at"))


def _remove_user(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    people.remove_user(arguments.name)
    return tell(arguments, {"removed": arguments.name}, [f"removed user {arguments.name}"])


def _create_project(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    people.create_project(arguments.name)
    return tell(arguments, {"created": arguments.name}, [f"created project {arguments.name}"])


def _list_projects(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    return _show(arguments, people.projects(), ("name", "created_at"))


def _remove_project(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    people.remove_project(arguments.name)
    return tell(arguments, {"removed": arguments.name}, [f"removed project {arguments.name}"])


def _limits(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    return _show(arguments, people.limits(arguments.project), ("name", "most", "used"))


def _set_limit(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    people.set_limit(arguments.project, arguments.name, arguments.most)
    shown = "no limit" if arguments.most is None else f"at most {arguments.most}"
    facts = {"project": arguments.project, "name": arguments.name, "most": arguments.most}
    return tell(arguments, facts, [f"{arguments.project}: {arguments.name} has {shown}"])


def _members(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    return _show(arguments, people.members(arguments.project), ("user", "kind", "role", "created_at"))


def _add_member(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    people.set_member(arguments.project, arguments.user, arguments.role)
    facts = {"project": arguments.project, "user": arguments.user, "role": arguments.role}
    return tell(arguments, facts, [f"{arguments.user} is {arguments.role} of {arguments.project}"])


def _remove_member(arguments: argparse.Namespace) -> int:
    from ..hub.client import people

    people.remove_member(arguments.project, arguments.user)
    facts = {"project": arguments.project, "removed": arguments.user}
    return tell(arguments, facts, [f"removed {arguments.user} from {arguments.project}"])


def tell(arguments: argparse.Namespace, facts: Any, lines: Sequence[str]) -> int:
    """Print facts as JSON, or lines for people."""
    from .screen import as_json

    print(as_json(facts) if arguments.json else "\n".join(lines))
    return 0


def _show(arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> int:
    from .screen import as_json, table

    if arguments.json:
        print(as_json([dict(row) for row in rows]))
    else:
        titles = [f"{name.removesuffix('_at')} (UTC)" if name.endswith("_at") else name for name in columns]
        titles = [title.removeprefix("is_") for title in titles]
        print("\n".join(table(titles, [[_cell(name, row[name]) for name in columns] for row in rows])))
    return 0


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_at") and isinstance(value, int):
        return time.strftime("%Y-%m-%d %H:%M", time.gmtime(value / 1000))
    return str(value)


def fields(value: Any) -> dict[str, Any]:
    """Return a dataclass as a dict for `--json`."""
    return dataclasses.asdict(value)
