"""Projects, users, members and tokens, as their admins change them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..model.access import Actor, Right, Role
from ..model.names import check_name, check_text
from ..model.refusal import Reason, Refusal
from ..model.tokens import NewToken, new_token
from ..store import identities
from ..store.identities import AccountRow, TokenRow
from . import audit
from .access import Access, existing_account, make_code, unknown_project
from .jobs.life import cancel_project

if TYPE_CHECKING:
    from ..store.database import Database
    from ..store.transaction import ReadSnapshot, Transaction


DESCRIPTION_LENGTH = 5_000
"""Characters of a project's description."""


@dataclass(frozen=True, slots=True)
class Project:
    """A project: what belongs together and is seen by the same people."""

    id: int
    name: str
    created_at: int
    description: str | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A user's place in a project."""

    user: str
    kind: str
    role: Role
    created_at: int


@dataclass(frozen=True, slots=True)
class Token:
    """A token, without its secret."""

    id: str
    user: str
    name: str
    kind: str
    project: str | None
    role: Role | None
    run: str | None
    created_at: int
    expires_at: int | None
    used_at: int | None


class People:
    """Changes projects, users, members and tokens. Each change is audited."""

    def __init__(self, database: Database, access: Access) -> None:
        self._database = database
        self._access = access

    async def projects(self, actor: Actor) -> list[Project]:
        """List the projects that the actor may read."""
        return await self._database.read(_projects, actor)

    async def create_project(self, actor: Actor, name: str, description: str | None = None) -> Project:
        """Create a project. Only owners may."""
        actor.require(Right.OWN)
        return await self._database.write(_create_project, actor, name, description)

    async def describe_project(self, actor: Actor, name: str, description: str) -> None:
        """Set the description of a project. Only owners may."""
        actor.require(Right.OWN)
        await self._database.write(_describe_project, actor, name, description)

    async def delete_project(self, actor: Actor, name: str, *, only_empty: bool = False) -> None:
        """Hide a project and all that is in it, until `gc` deletes it. Its name is free again. Only owners may.

        Its jobs are cancelled.

        Args:
            actor: Who asks.
            name: Name of the project.
            only_empty: Refuse a project that holds anything.
        """
        actor.require(Right.OWN)
        await self._database.write(_delete_project, actor, name, only_empty)
        self._access.forget()

    async def members(self, actor: Actor, project: str) -> list[Member]:
        return await self._database.read(_members, actor, project)

    async def set_member(self, actor: Actor, project: str, user: str, role: Role) -> None:
        """Give a user a role in a project."""
        await self._database.write(_set_member, actor, project, user, role)
        self._access.forget()

    async def remove_member(self, actor: Actor, project: str, user: str) -> None:
        await self._database.write(_remove_member, actor, project, user)
        self._access.forget()

    async def users(self, actor: Actor) -> list[AccountRow]:
        actor.require(Right.OWN)
        return await self._database.read(identities.accounts, actor.organization)

    async def create_user(
        self, actor: Actor, name: str, *, is_service: bool = False, is_owner: bool = False
    ) -> str | None:
        """Create a user or a service account.

        Returns:
            A code that signs the user in once. A service account has none: it uses tokens.
        """
        actor.require(Right.OWN)
        return await self._database.write(_create_user, actor, name, is_service, is_owner)

    async def sign_in_code(self, actor: Actor, user: str) -> str:
        """Make a further code for a user, who has lost the session."""
        actor.require(Right.OWN)
        return await self._database.write(_code_for, actor, user)

    async def disable_user(self, actor: Actor, name: str) -> None:
        """Disable a user for good: sessions and tokens end at once, runs keep the name."""
        actor.require(Right.OWN)
        await self._database.write(_disable_user, actor, name)
        self._access.forget()

    async def tokens(self, actor: Actor, *, everybody: bool = False) -> list[Token]:
        """List the actor's tokens, or those of everybody, which only owners may."""
        if everybody:
            actor.require(Right.OWN)
        return await self._database.read(_tokens, actor, everybody)

    async def create_token(
        self,
        actor: Actor,
        name: str,
        *,
        user: str | None = None,
        project: str | None = None,
        role: Role | None = None,
        expires_at: int | None = None,
    ) -> NewToken:
        """Make a token. Its text is in the answer and nowhere else.

        Args:
            actor: Who asks.
            name: Text by which its user knows it.
            user: Whose token. None: the actor's own. Only owners make those of others.
            project: The only project for which it is good. None: all of the user's.
            role: Greatest role that it gives.
            expires_at: Milliseconds since 1970.
        """
        return await self._database.write(_create_token, actor, name, user, project, role, expires_at)

    async def create_run_token(self, actor: Actor, run_id: str) -> NewToken:
        """Make a token that can write to one run only and ends with it."""
        actor.require(Right.WRITE)
        return await self._database.write(_create_run_token, actor, run_id)

    async def revoke_token(self, actor: Actor, token: str) -> None:
        """Revoke a token by its id: one's own, or any as an owner."""
        await self._database.write(_revoke_token, actor, token)
        self._access.forget()

    async def prepare(self, owner: str) -> None:
        """Make `owner` the first user of an empty hub. Later calls add the account only if it is missing."""
        await self._database.write(_prepare, owner)


def no_run_token(actor: Actor) -> None:
    """Refuse the token of a run, which must not outlive itself by making others."""
    if actor.run is not None:
        raise Refusal(Reason.FORBIDDEN, "token: a run's token may not do this; use one of a user", field="token")


def _projects(snapshot: ReadSnapshot, actor: Actor) -> list[Project]:
    own = _token_of(snapshot, actor)
    only = None if own is None else own.project
    sees_all = actor.role is Role.OWNER or only is not None
    account = None if sees_all else existing_account(snapshot, actor.user).id
    found = [Project(*row) for row in identities.projects(snapshot, actor.organization, account)]
    return [project for project in found if only in (None, project.id)]


def _token_of(snapshot: ReadSnapshot, actor: Actor) -> TokenRow | None:
    """Return the token that the actor came with, if it was one."""
    return None if actor.token is None else identities.find_token(snapshot, actor.token)


def _create_project(tx: Transaction, actor: Actor, name: str, description: str | None) -> Project:
    if description is not None:
        _check_description(description)
    number = identities.add_project(tx, actor.organization, check_name("project", name), description)
    if number is None:
        raise Refusal(Reason.EXISTS, f"project={name}: exists; choose another name", field="project")
    audit.record(tx, actor, "project.create", name)
    return Project(number, name, tx.now, description)


def _check_description(description: str) -> None:
    check_text("description", description)
    if len(description) > DESCRIPTION_LENGTH:
        problem = f"has {len(description)} characters; use at most {DESCRIPTION_LENGTH}"
        raise Refusal(Reason.INVALID, f"description: {problem}", field="description")


def _describe_project(tx: Transaction, actor: Actor, name: str, description: str) -> None:
    number = identities.project_named(tx, actor.organization, name)
    if number is None:
        raise unknown_project(name)
    _check_description(description)
    identities.describe_project(tx, number, description)
    audit.record(tx, actor, "project.describe", name)


def _delete_project(tx: Transaction, actor: Actor, name: str, only_empty: bool) -> None:
    number = identities.project_named(tx, actor.organization, name)
    if number is None:
        raise unknown_project(name)
    if number == 1:
        raise Refusal(Reason.INVALID, "project=default: cannot be deleted; delete its experiments", field="project")
    if only_empty and identities.is_used(tx, number):
        problem = "still has experiments, models or pools; delete it with mode=CASCADE"
        raise Refusal(Reason.CONFLICT, f"project={name}: {problem}", field="project")
    cancel_project(tx, number)
    identities.delete_project(tx, number)
    audit.record(tx, actor, "project.delete", name)


def authorized(snapshot: ReadSnapshot, actor: Actor, project: str, right: Right) -> int:
    """Return the id of a project in which the actor has `right`, whichever project the request named."""
    no_run_token(actor)
    number = identities.project_named(snapshot, actor.organization, project)
    if number is None:
        raise unknown_project(project)
    role = actor.role
    if number != actor.project and role is not Role.OWNER:
        own = identities.role_in(snapshot, number, existing_account(snapshot, actor.user).id)
        if own is None or actor.token is not None:  # a token may be bound to the project that it named
            raise unknown_project(project)
        role = own
    Actor(actor.user, actor.organization, number, role).require(right)
    return number


def _members(snapshot: ReadSnapshot, actor: Actor, project: str) -> list[Member]:
    number = authorized(snapshot, actor, project, Right.READ)
    return [Member(name, kind, Role(role), at) for name, kind, role, at in identities.members(snapshot, number)]


def _set_member(tx: Transaction, actor: Actor, project: str, user: str, role: Role) -> None:
    number = authorized(tx, actor, project, Right.MANAGE)
    if role is Role.OWNER:
        raise Refusal(Reason.INVALID, "role=owner: not of a project; choose viewer, researcher or admin", field="role")
    identities.set_member(tx, number, existing_account(tx, user).id, role)
    audit.record(tx, actor, "member.set", f"{project}/{user}", {"role": role.name.lower()})


def _remove_member(tx: Transaction, actor: Actor, project: str, user: str) -> None:
    number = authorized(tx, actor, project, Right.MANAGE)
    if not identities.remove_member(tx, number, existing_account(tx, user).id):
        raise Refusal(Reason.MISSING, f"user={user}: not a member; see the list of members", field="user")
    audit.record(tx, actor, "member.remove", f"{project}/{user}")


def _create_user(tx: Transaction, actor: Actor, name: str, is_service: bool, is_owner: bool) -> str | None:
    kind = "service" if is_service else "person"
    if identities.add_account(tx, actor.organization, check_name("user", name), kind, is_owner) is None:
        raise Refusal(Reason.EXISTS, f"user={name}: exists; choose another name", field="user")
    audit.record(tx, actor, "user.create", name, {"kind": kind, "owner": is_owner})
    return None if is_service else make_code(tx, name)


def _code_for(tx: Transaction, actor: Actor, user: str) -> str:
    if existing_account(tx, user).kind == "service":
        raise Refusal(Reason.INVALID, f"user={user}: a service account; make a token for it", field="user")
    audit.record(tx, actor, "user.link", user)
    return make_code(tx, user)


def _disable_user(tx: Transaction, actor: Actor, name: str) -> None:
    account = existing_account(tx, name)
    if account.is_owner and identities.count_owners(tx, actor.organization) == 1:
        raise Refusal(Reason.CONFLICT, f"user={name}: the only owner; make another one first", field="user")
    identities.disable_account(tx, account.id)
    audit.record(tx, actor, "user.disable", name)


def _tokens(snapshot: ReadSnapshot, actor: Actor, everybody: bool) -> list[Token]:
    no_run_token(actor)
    account = None if everybody else existing_account(snapshot, actor.user).id
    return [_token(*row) for row in identities.tokens(snapshot, actor.organization, account)]


def _token(
    number: str,
    user: str,
    name: str,
    kind: str,
    project: str | None,
    role: int | None,
    run: str | None,
    *times: int | None,
) -> Token:
    created_at, expires_at, used_at = times
    assert created_at is not None
    return Token(
        number, user, name, kind, project, None if role is None else Role(role), run, created_at, expires_at, used_at
    )


def _create_token(
    tx: Transaction,
    actor: Actor,
    name: str,
    user: str | None,
    project: str | None,
    role: Role | None,
    expires_at: int | None,
) -> NewToken:
    no_run_token(actor)
    if user is not None and user != actor.user:
        actor.require(Right.OWN)
    account = existing_account(tx, user or actor.user)
    number = None
    own = _token_of(tx, actor)
    if own is not None and own.kind == "job":
        raise Refusal(Reason.FORBIDDEN, "token: a job's token may not make others; use one of a user", field="token")
    if own is not None and own.project is not None and project is None:
        number = own.project  # the token of one project makes no token for others
    if own is not None and own.kind == "token" and own.expires_at is not None:
        expires_at = own.expires_at if expires_at is None else min(own.expires_at, expires_at)
    if project is not None:
        number = identities.project_named(tx, actor.organization, project)
        is_member = number is not None and (account.is_owner or identities.role_in(tx, number, account.id) is not None)
        is_beyond = own is not None and own.project not in (None, number)
        if not is_member or is_beyond:
            raise unknown_project(project)
    if user in (None, actor.user) and actor.token is not None and role is None:
        role = actor.role  # a token makes no token that can do more than itself
    if role is not None and role > actor.role:
        raise Refusal(Reason.FORBIDDEN, f"role={role.name.lower()}: above your own; choose a lower one", field="role")
    if not 1 <= len(name) <= 200:
        raise Refusal(Reason.INVALID, "name: empty or too long; use 1 to 200 characters", field="name")
    token = new_token()
    identities.add_token(
        tx,
        token.id,
        token.sha256,
        kind="token",
        account=account.id,
        name=name,
        project=number,
        role=None if role is None else int(role),
        run=None,
        expires_at=expires_at,
    )
    audit.record(tx, actor, "token.create", token.id, {"user": account.name, "name": name})
    return token


def _create_run_token(tx: Transaction, actor: Actor, run_id: str) -> NewToken:
    no_run_token(actor)
    row = tx.execute("SELECT 1 FROM run WHERE project = ? AND id = ?", (actor.project, run_id)).fetchone()
    if row is None:
        raise Refusal(Reason.MISSING, f"run_id={run_id[:64]}: not found; create the run first", field="run_id")
    token = new_token()
    identities.add_token(
        tx,
        token.id,
        token.sha256,
        kind="run",
        account=existing_account(tx, actor.user).id,
        name=f"run {run_id[:64]}",
        project=actor.project,
        role=int(Role.RESEARCHER),
        run=run_id,
        expires_at=None,
    )
    audit.record(tx, actor, "token.create", token.id, {"run": run_id})
    return token


def _revoke_token(tx: Transaction, actor: Actor, token: str) -> None:
    no_run_token(actor)
    row = identities.find_token(tx, token)
    if row is None or row.organization != actor.organization or row.kind not in {"token", "run"}:
        raise _unknown_token(token)
    if row.user != actor.user and actor.role is not Role.OWNER:
        raise _unknown_token(token)
    identities.delete_token(tx, token)
    audit.record(tx, actor, "token.revoke", token, {"user": row.user})


def _unknown_token(token: str) -> Refusal:
    return Refusal(Reason.MISSING, f"token={token[:40]}: not found; see `skyward hub token list`", field="token")


def _prepare(tx: Transaction, owner: str) -> None:
    if identities.find_account(tx, 1, owner) is None:
        identities.add_account(tx, 1, owner, "person", True)
