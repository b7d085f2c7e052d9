"""Credentials of a request: a token as bearer or as the password of Basic, or the cookie of the pages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from ..model.access import Actor, Right, Role
from ..model.refusal import Reason, Refusal

if TYPE_CHECKING:
    from ..services.access import Access

COOKIE = "skyward_hub_session"
NOBODY = Actor(user="", organization=0, project=0, role=Role.VIEWER)
"""Actor of routes that anybody may call. No project has its numbers."""

WORKSPACE_HEADER = b"x-mlflow-workspace"
PROJECT_HEADER = b"x-skyward-project"
_SAFE_METHODS = frozenset({"GET", "HEAD"})


class Credentials:
    """Finds the actor of a request.

    Args:
        access: Service that knows tokens and sessions.
        anonymous: Name of the user that a request without credentials acts as. None: such a request is refused.
    """

    def __init__(self, access: Access, anonymous: str | None = None) -> None:
        self._access = access
        self._anonymous = anonymous

    async def actor(
        self, scope: MutableMapping[str, Any], headers: Mapping[bytes, bytes], path: str, right: Right
    ) -> Actor:
        """Return the actor of a request, in the project that it names.

        Raises:
            Refusal: There is no valid credential, or the actor has no place in that project.
        """
        if right is Right.NONE:
            return NOBODY
        project = project_of(scope, headers)
        authorization = headers.get(b"authorization")
        if authorization is not None:
            return await self._access.actor_for(token_in(authorization), project)
        is_mlflow = path.startswith(("/api/", "/ajax-api/"))
        if not is_mlflow and b"cookie" in headers and is_own_page(scope, headers):
            session = session_in(headers[b"cookie"])
            if session is not None:
                return await self._access.actor_of_session(session, project)
        if self._anonymous is not None:
            if is_foreign_page(scope, headers):
                raise Refusal(Reason.FORBIDDEN, "origin: a foreign page; open the hub's own pages", field="origin")
            return await self._access.actor_named(self._anonymous, project)
        raise unauthenticated()


def unauthenticated() -> Refusal:
    return Refusal(
        Reason.UNAUTHENTICATED,
        "authorization: no valid token; send it as 'Authorization: Bearer sky_...' or as the password of Basic",
        field="authorization",
    )


def token_in(authorization: bytes) -> str:
    """Return the token of an `Authorization` header.

    Raises:
        Refusal: The header is neither Bearer nor Basic.
    """
    scheme, _, value = authorization.partition(b" ")
    match scheme.lower():
        case b"bearer":
            return value.strip().decode("latin-1")
        case b"basic":
            try:
                pair = base64.b64decode(value.strip(), validate=True).decode("latin-1")
            except (binascii.Error, ValueError):
                raise unauthenticated() from None
            return pair.partition(":")[2]
    raise unauthenticated()


def session_in(cookie: bytes) -> str | None:
    """Return the session of a `Cookie` header, if it has one."""
    try:
        morsel = SimpleCookie(cookie.decode("latin-1")).get(COOKIE)
    except CookieError:
        return None
    return morsel.value if morsel is not None else None


def is_own_page(scope: MutableMapping[str, Any], headers: Mapping[bytes, bytes]) -> bool:
    """Tell whether a page of this server sent the request.

    A browser sends `Origin` with each request that may change things. It leaves it out of reads of its own origin, for
    which `Sec-Fetch-Site` stands, where the browser knows it. `SameSite=Strict` covers the rest.
    """
    host = headers.get(b"host", b"")
    origin = headers.get(b"origin")
    if origin is not None:
        return is_own_origin(f"{scope.get('scheme', 'http')}://{host.decode('latin-1')}", headers)
    if scope["method"] not in _SAFE_METHODS:
        return False
    return headers.get(b"sec-fetch-site", b"same-origin") in {b"same-origin", b"none"}


def is_foreign_page(scope: MutableMapping[str, Any], headers: Mapping[bytes, bytes]) -> bool:
    """Tell whether a page of another server sent the request. Programs send neither of the two headers."""
    own = f"{scope.get('scheme', 'http')}://{headers.get(b'host', b'').decode('latin-1')}"
    return not is_own_origin(own, headers) or headers.get(b"sec-fetch-site", b"none") not in {b"same-origin", b"none"}


def is_own_origin(own: str, headers: Mapping[bytes, bytes]) -> bool:
    """Tell whether the header `Origin` is `own`, or missing: programs send none, browsers do when things may change."""
    origin = headers.get(b"origin")
    return origin is None or origin.decode("latin-1") == own


def project_of(scope: MutableMapping[str, Any], headers: Mapping[bytes, bytes]) -> str | None:
    """Return the name of the project that a request names: a header, or `?project=` on `/v1`."""
    name = headers.get(WORKSPACE_HEADER) or headers.get(PROJECT_HEADER)
    if name:
        return name.decode("latin-1")
    query: bytes = scope["query_string"]
    if b"project=" in query and scope["path"].startswith("/v1/"):
        values = parse_qs(query.decode("latin-1")).get("project")
        return values[0] if values else None
    return None
