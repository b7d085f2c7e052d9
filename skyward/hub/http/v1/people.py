"""Handlers of sessions, projects, members, users, tokens and the audit."""

from __future__ import annotations

import msgspec

from ...model.access import Role
from ...model.quotas import Limit, Quota
from ...model.refusal import Reason, Refusal
from ...services.people import Token
from ..credentials import COOKIE, is_own_origin, session_in
from ..reply import HttpReply
from ..routing import Call
from . import wire

SIGN_IN_PATH = "/sign-in#code="
"""Page that takes a code. Browsers send no fragment to servers, so that the code is in no log."""


async def me(call: Call, _request: wire.Nothing) -> wire.Me:
    access, actor = call.hub.access, call.actor
    return wire.Me(
        actor.user,
        actor.role.name.lower(),
        await access.project_name(actor),
        await access.organization_name(actor),
        call.hub.with_auth,
    )


async def sign_in(call: Call, request: wire.SignIn) -> HttpReply:
    _own_origin(call)
    session = await call.hub.access.sign_in(request.code)
    seconds = max((session.expires_at - call.hub.database.clock()) // 1000, 0)
    return HttpReply(msgspec.json.encode(wire.Done()), headers={b"set-cookie": _cookie(call, session.secret, seconds)})


async def sign_out(call: Call, _request: wire.Nothing) -> HttpReply:
    _own_origin(call)
    session = session_in(call.headers.get(b"cookie", b""))
    if session is not None:
        await call.hub.access.sign_out(session)
    return HttpReply(msgspec.json.encode(wire.Done()), headers={b"set-cookie": _cookie(call, "", 0)})


def _own_origin(call: Call) -> None:
    """Refuse requests of foreign pages: they must neither sign anybody in nor out."""
    if not is_own_origin(call.origin, call.headers):
        raise Refusal(Reason.FORBIDDEN, "origin: a foreign page; open the hub's own pages", field="origin")


def _cookie(call: Call, secret: str, seconds: int) -> bytes:
    secure = "; Secure" if call.origin.startswith("https:") else ""
    return f"{COOKIE}={secret}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}".encode()


async def projects(call: Call, _request: wire.Nothing) -> wire.Projects:
    found = await call.hub.people.projects(call.actor)
    return wire.Projects([wire.ProjectOut(project.name, project.created_at) for project in found])


async def create_project(call: Call, request: wire.NewProject) -> wire.ProjectOut:
    made = await call.hub.people.create_project(call.actor, request.name)
    return wire.ProjectOut(made.name, made.created_at)


async def delete_project(call: Call, _request: wire.Nothing) -> wire.Done:
    await call.hub.people.delete_project(call.actor, call.path["name"])
    return wire.Done()


async def limits(call: Call, _request: wire.Nothing) -> wire.Limits:
    return _limits(await call.hub.quotas.limits(call.actor, call.path["name"]))


async def set_limits(call: Call, request: wire.NewLimits) -> wire.Limits:
    changes = {quota: getattr(request, quota.value) for quota in Quota}
    changes = {quota: most for quota, most in changes.items() if most is not msgspec.UNSET}
    return _limits(await call.hub.quotas.set_limits(call.actor, call.path["name"], changes))


def _limits(found: list[Limit]) -> wire.Limits:
    return wire.Limits([wire.LimitOut(limit.quota.value, limit.most, limit.used) for limit in found])


async def members(call: Call, _request: wire.Nothing) -> wire.Members:
    found = await call.hub.people.members(call.actor, call.path["name"])
    return wire.Members(
        [wire.MemberOut(member.user, member.kind, member.role.name.lower(), member.created_at) for member in found]
    )


async def set_member(call: Call, request: wire.NewMember) -> wire.Members:
    await call.hub.people.set_member(call.actor, call.path["name"], request.user, Role[request.role.upper()])
    return await members(call, wire.Nothing())


async def remove_member(call: Call, _request: wire.Nothing) -> wire.Done:
    await call.hub.people.remove_member(call.actor, call.path["name"], call.path["user"])
    return wire.Done()


async def users(call: Call, _request: wire.Nothing) -> wire.UsersOut:
    found = await call.hub.people.users(call.actor)
    return wire.UsersOut(
        [wire.User(user.name, user.kind, bool(user.is_owner), user.created_at, user.disabled_at) for user in found]
    )


async def create_user(call: Call, request: wire.NewUser) -> wire.SignInLink:
    code = await call.hub.people.create_user(
        call.actor, request.name, is_service=request.is_service, is_owner=request.is_owner
    )
    return _link(call, request.name, code)


async def create_link(call: Call, _request: wire.Nothing) -> wire.SignInLink:
    name = call.path["name"]
    return _link(call, name, await call.hub.people.sign_in_code(call.actor, name))


def _link(call: Call, user: str, code: str | None) -> wire.SignInLink:
    return wire.SignInLink(user, None if code is None else f"{call.origin}{SIGN_IN_PATH}{code}")


async def disable_user(call: Call, _request: wire.Nothing) -> wire.Done:
    await call.hub.people.disable_user(call.actor, call.path["name"])
    return wire.Done()


async def tokens(call: Call, request: wire.TokensQuery) -> wire.Tokens:
    found = await call.hub.people.tokens(call.actor, everybody=request.everybody)
    return wire.Tokens([_token(token) for token in found])


def _token(token: Token) -> wire.TokenOut:
    return wire.TokenOut(
        id=token.id,
        user=token.user,
        name=token.name,
        kind=token.kind,
        project=token.project,
        role=None if token.role is None else token.role.name.lower(),
        run=token.run,
        created_at=token.created_at,
        expires_at=token.expires_at,
        used_at=token.used_at,
    )


async def create_token(call: Call, request: wire.TokenIn) -> wire.CreatedToken:
    if request.run is not None:
        made = await call.hub.people.create_run_token(call.actor, request.run)
    else:
        made = await call.hub.people.create_token(
            call.actor,
            request.name,
            user=request.user,
            project=request.project,
            role=None if request.role is None else Role[request.role.upper()],
            expires_at=request.expires_at,
        )
    return wire.CreatedToken(made.id, made.text)


async def revoke_token(call: Call, _request: wire.Nothing) -> wire.Done:
    await call.hub.people.revoke_token(call.actor, call.path["id"])
    return wire.Done()


async def audit(call: Call, request: wire.AuditQuery) -> wire.AuditPage:
    before = None
    if request.page_token:
        if not (request.page_token.isascii() and request.page_token.isdigit() and len(request.page_token) < 19):
            raise Refusal(Reason.INVALID, "page_token: not from this list; begin without", field="page_token")
        before = int(request.page_token)
    rows = await call.hub.audit.page(call.actor, limit=request.limit, before=before)
    entries = [
        wire.AuditEntry(
            row.id,
            row.at,
            row.actor,
            row.token,
            row.action,
            row.resource,
            msgspec.json.decode(row.detail),
            row.hash,
        )
        for row in rows
    ]
    more = str(rows[-1].id) if len(rows) == request.limit else None
    return wire.AuditPage(entries, more)
