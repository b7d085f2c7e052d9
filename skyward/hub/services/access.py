"""Identities: who a token belongs to, and which role its user has in which project."""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..model.access import Actor, Role
from ..model.names import check_name
from ..model.refusal import Reason, Refusal
from ..model.tokens import new_token, secret_hash, token_id
from ..store import identities
from ..store.identities import AccountRow, TokenRow
from ..store.schema import ORGANIZATION, PROJECT
from . import audit
from .refused_sign_ins import RefusedSignIns

if TYPE_CHECKING:
    from ..store.database import Database
    from ..store.transaction import ReadSnapshot, Transaction
    from .leader import Write

CACHE_S = 1.0
"""Seconds for which an actor is remembered. Another server's change of rights takes this long to arrive here."""
CACHED = 10_000
TOUCH_MS = 60_000
"""Milliseconds between two updates of a token's last use."""
RUN_GRACE_MS = 60_000
"""Milliseconds for which a run's token outlives its run, so that the sender can send the rest."""
SESSION_MS = 30 * 24 * 3600 * 1000
CODE_MS = 15 * 60 * 1000
DEFAULT_PROJECT = "default"


class Identity(Protocol):
    """Seam for a source of identities. `Access` is the first, with local accounts; an OpenID provider may be next."""

    async def actor_for(self, token: str, project: str | None) -> Actor:
        """Return the actor of a token.

        Raises:
            Refusal: The token is not valid, or gives no role in the project.
        """


@dataclass(frozen=True, slots=True)
class PageSession:
    """A signed-in browser: the secret of its cookie, and when it ends."""

    secret: str
    user: str
    expires_at: int


class Access:
    """Finds actors, signs people in and out. Changes of people and projects are in `people.People`.

    Safe to use from one event loop only.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cache: dict[tuple[str, str, str | None], tuple[float, Actor]] = {}
        self._names: dict[tuple[str, int], str] = {}  # they never change
        self.refused_sign_ins = RefusedSignIns(database)

    def forget(self) -> None:
        """Drop remembered actors, after a change of rights."""
        self._cache.clear()

    async def actor_for(self, token: str, project: str | None) -> Actor:
        """Return the actor of a token.

        Args:
            token: Text of the token.
            project: Name of the project. None: the token's own, or the first that its user has.

        Raises:
            Refusal: UNAUTHENTICATED for a wrong token, MISSING for a project in which it gives no role.
        """
        return await self._cached("token", token, project)

    async def actor_of_session(self, session: str, project: str | None) -> Actor:
        """Return the actor of a cookie, as `actor_for` does for tokens. Neither is accepted for the other."""
        return await self._cached("session", session, project)

    async def actor_named(self, user: str, project: str | None) -> Actor:
        """Return the actor for a user, without any credential: for `--no-auth` and for local commands."""
        return await self._cached("user", user, project)

    async def _cached(self, kind: str, text: str, project: str | None) -> Actor:
        key = (kind, text, project)
        now = time.monotonic()
        if (known := self._cache.get(key)) is not None and known[0] > now:
            return known[1]
        if kind == "user":
            actor = await self._database.read(_actor_named, text, project)
        else:
            actor, needs_touch = await self._database.read(_actor_for, kind, text, project, self._database.clock())
            if needs_touch and actor.token is not None:
                await self._database.write(identities.touch_token, actor.token)
        if len(self._cache) >= CACHED:
            self._cache.clear()
        self._cache[key] = (now + CACHE_S, actor)
        return actor

    async def project_name(self, actor: Actor) -> str:
        """Return the name of the project that a request is about."""
        key = ("project", actor.project)
        if key not in self._names:
            self._names[key] = await self._database.read(identities.name_of_project, actor.project)
        return self._names[key]

    async def organization_name(self, actor: Actor) -> str:
        """Return the name of the actor's organization."""
        key = ("organization", actor.organization)
        if key not in self._names:
            self._names[key] = await self._database.read(identities.name_of_organization, actor.organization)
        return self._names[key]

    async def sign_in_code(self, user: str) -> str:
        """Make a code that signs `user` in once, within 15 minutes."""
        return await self._database.write(make_code, user)

    async def sign_in(self, code: str) -> PageSession:
        """Exchange a code for a session.

        Raises:
            Refusal: The code is wrong, used or too old.
        """
        try:
            return await self._database.write(_sign_in, code)
        except Refusal as refusal:
            if refusal.reason is Reason.UNAUTHENTICATED:
                await self.refused_sign_ins.add()
            raise

    async def sign_out(self, session: str) -> None:
        """End a session."""
        number = token_id(session)
        if number is not None:
            await self._database.write(_sign_out, number, secret_hash(session))
        self.forget()

    async def clean_up(self, *, write: Write | None = None) -> None:
        """Delete expired sessions, codes and tokens.

        Args:
            write: By default `Database.write`.
        """
        await (write or self._database.write)(identities.delete_expired)


def invalid_token() -> Refusal:
    return Refusal(
        Reason.UNAUTHENTICATED,
        "authorization: the token is wrong, expired or revoked; make one with `skyward hub token create`",
        field="authorization",
    )


def unknown_project(name: str | None) -> Refusal:
    shown = "" if name is None else f"={name[:100]}"
    return Refusal(Reason.MISSING, f"project{shown}: not found; ask its admin to make you a member", field="project")


def checked_token(snapshot: ReadSnapshot, kinds: frozenset[str], text: str, now: int) -> TokenRow:
    """Return the row of a token of one of `kinds`.

    Raises:
        Refusal: There is none, its secret differs, or it has expired.
    """
    number = token_id(text)
    row = identities.find_token(snapshot, number) if number else None
    if row is None or row.kind not in kinds or not hmac.compare_digest(row.sha256, secret_hash(text)):
        raise invalid_token()
    if row.expires_at is not None and row.expires_at <= now:
        raise invalid_token()
    if row.run is not None and row.run_ended_at is not None and row.run_ended_at + RUN_GRACE_MS < now:
        raise invalid_token()
    return row


_ACCEPTED = {"token": frozenset({"token", "run", "job"}), "session": frozenset({"session"})}


def _actor_for(snapshot: ReadSnapshot, kind: str, text: str, project: str | None, now: int) -> tuple[Actor, bool]:
    row = checked_token(snapshot, _ACCEPTED[kind], text, now)
    number = _project(snapshot, row.organization, row.account, bool(row.is_owner), project, row.project)
    role = Role.OWNER if row.is_owner else identities.role_in(snapshot, number, row.account)
    if role is None:
        raise unknown_project(project)
    if row.role is not None:
        role = min(role, Role(row.role))
    if row.project is not None:
        role = min(role, Role.ADMIN)  # a token of one project has no rights over the organization
    actor = Actor(row.user, row.organization, number, role, run=row.run, token=row.id)
    return actor, row.used_at is None or row.used_at + TOUCH_MS < now


def _actor_named(snapshot: ReadSnapshot, user: str, project: str | None) -> Actor:
    account = identities.find_account(snapshot, ORGANIZATION, user)
    if account is None or account.disabled_at is not None:
        raise Refusal(Reason.MISSING, f"user={user[:100]}: not found; see `skyward hub user list`", field="user")
    number = _project(snapshot, account.organization, account.id, bool(account.is_owner), project, None)
    role = Role.OWNER if account.is_owner else identities.role_in(snapshot, number, account.id)
    if role is None:
        raise unknown_project(project)
    return Actor(account.name, account.organization, number, role)


def _project(
    snapshot: ReadSnapshot, organization: int, account: int, is_owner: bool, name: str | None, of_token: int | None
) -> int:
    """Return the id of the project that a request is about."""
    if name is not None:
        found = identities.project_named(snapshot, organization, name)
        if found is None or of_token not in (None, found):
            raise unknown_project(check_name("project", name))
        return found
    if of_token is not None:
        if not identities.is_open(snapshot, organization, of_token):
            raise unknown_project(None)
        return of_token
    default = identities.project_named(snapshot, organization, DEFAULT_PROJECT)
    if default is not None and (is_owner or identities.role_in(snapshot, default, account) is not None):
        return default
    first = identities.first_project(snapshot, account)
    if first is None:
        raise unknown_project(None)
    return first


def make_code(tx: Transaction, user: str) -> str:
    """Make a sign-in code inside a transaction."""
    account = existing_account(tx, user)
    return _issue(tx, account.id, kind="code", name="sign-in code", lifetime_ms=CODE_MS)


def _issue(tx: Transaction, account: int, *, kind: str, name: str, lifetime_ms: int) -> str:
    """Make a secret that stands for an account in all its projects, and return its text."""
    token = new_token()
    identities.add_token(
        tx,
        token.id,
        token.sha256,
        kind=kind,
        account=account,
        name=name,
        project=None,
        role=None,
        run=None,
        expires_at=tx.now + lifetime_ms,
    )
    return token.text


def existing_account(snapshot: ReadSnapshot, user: str) -> AccountRow:
    """Return an account that is not disabled.

    Raises:
        Refusal: There is none of this name.
    """
    account = identities.find_account(snapshot, ORGANIZATION, user)
    if account is None or account.disabled_at is not None:
        raise Refusal(Reason.MISSING, f"user={user[:100]}: not found; see `skyward hub user list`", field="user")
    return account


def _sign_in(tx: Transaction, code: str) -> PageSession:
    try:
        row = checked_token(tx, frozenset({"code"}), code, tx.now)
    except Refusal:
        raise _wrong_code() from None
    if not identities.delete_token(tx, row.id):  # another server has taken it meanwhile
        raise _wrong_code()
    secret = _issue(tx, row.account, kind="session", name="browser", lifetime_ms=SESSION_MS)
    _record(tx, row, token_id(secret), "session.begin")
    return PageSession(secret, row.user, tx.now + SESSION_MS)


def _record(tx: Transaction, row: TokenRow, session: str | None, action: str) -> None:
    """Write to the audit of the first project: a session is of the organization, which has none of its own."""
    actor = Actor(row.user, row.organization, PROJECT, Role.VIEWER, token=session)
    audit.record(tx, actor, action, row.user)


def _wrong_code() -> Refusal:
    return Refusal(
        Reason.UNAUTHENTICATED,
        "code: wrong, used or too old; get a new link from `skyward hub up` or `skyward hub user link`",
        field="code",
    )


def _sign_out(tx: Transaction, number: str, sha256: str) -> None:
    row = identities.find_token(tx, number)
    if row is not None and row.kind == "session" and hmac.compare_digest(row.sha256, sha256):
        identities.delete_token(tx, number)
        _record(tx, row, number, "session.end")
