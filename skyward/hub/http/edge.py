"""Entry of every request: host, route, identity, limits, errors, figures. Nothing is reachable beside it."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from ..model.access import Right
from ..model.refusal import Reason, Refusal
from . import bodies, pages
from .credentials import Credentials
from .faults import HttpRefusal, MlflowFault, WireFault, mlflow_fault, v1_fault
from .reply import JSON, Bytes, HttpReply
from .routing import Call, NoSuchPath, Route, Table

if TYPE_CHECKING:
    from ..services.hub import Hub
    from .figures import Figures

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

logger = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_BARE = (b"x-content-type-options", b"nosniff")
_NO_STORE = (b"cache-control", b"no-store")
FOREIGN = re.compile(
    r"/(?:ajax-)?api/\d\.0/mlflow/(?:traces|gateway|prompts|prompt-optimization|scorers|webhooks|assessments|jobs"
    r"|issues|label-schemas|review-queues|datasets|endpoints|secrets|budgets|demo|assistant|invocations)\b"
)
"""Parts of MLflow's API that are not the hub's."""


class Edge:
    """ASGI application of all routes.

    Args:
        hub: Services, opened.
        table: Routes.
        credentials: Translates headers to an actor.
        hosts: Names by which clients may address this server, without port. `*` allows all.
    """

    def __init__(
        self, hub: Hub, table: Table, credentials: Credentials, hosts: frozenset[str], figures: Figures | None
    ) -> None:
        self._hub = hub
        self._table = table
        self._credentials = credentials
        self._hosts = hosts
        self._good_hosts: set[bytes] = set()
        self._figures = figures

    async def __call__(self, scope: Scope, receive: bodies.Receive, send: Send) -> None:
        started = time.perf_counter()
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = os.urandom(8).hex().encode()
        route: Route | None = None
        try:
            route, status = await self._answer(scope, headers, receive, send, request_id)
        except bodies.ClientGone:
            route, status = None, 499
        if self._figures is not None:
            self._figures.observe(route, status, time.perf_counter() - started)
        if logger.isEnabledFor(logging.DEBUG):
            extra = {
                "request": request_id.decode(),
                "method": scope["method"],
                "route": route.path if route else "",
                "status": status,
                "ms": round((time.perf_counter() - started) * 1e3, 2),
            }
            logger.debug("request answered", extra=extra)

    async def _answer(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: bodies.Receive, send: Send, request_id: bytes
    ) -> tuple[Route | None, int]:
        route: Route | None = None
        path: str = scope["path"]
        try:
            self._check_host(headers)
            method: str = scope["method"]
            try:
                route, names = self._table.match("GET" if method == "HEAD" else method, path)
            except Refusal as refusal:
                if isinstance(refusal, NoSuchPath) and pages.is_missing_page(method, path, headers):
                    page = pages.missing(headers)
                    await _send_reply(page, request_id, send, without_body=False)
                    return None, page.status
                # A stranger learns nothing about which paths exist.
                await self._credentials.actor(scope, headers, path, Right.READ)
                raise
            actor = await self._credentials.actor(scope, headers, path, route.right)
            actor.require(route.right)
            size = bodies.length_of(headers, route.body_limit)
            call = Call(
                hub=self._hub,
                actor=actor,
                path=names,
                query=scope["query_string"],
                headers=headers,
                chunks=bodies.stream(receive, route.body_limit),
                origin=f"{scope.get('scheme', 'http')}://{headers.get(b'host', b'').decode('latin-1')}",
                size=size,
            )
            request = await _request(route, method, headers, receive, call)
            answer = await route.handler(call, request)
        except Refusal as refusal:
            return route, await _refuse(refusal, path, request_id, send)
        except bodies.ClientGone:
            raise
        except Exception:
            logger.exception("request failed", extra={"request": request_id.decode(), "path": path})
            fault = Refusal(Reason.UNAVAILABLE, "hub: internal error; give the request id to an administrator")
            return route, await _refuse(fault, path, request_id, send, status=500)
        if isinstance(answer, HttpReply):
            await _send_reply(answer, request_id, send, without_body=scope["method"] == "HEAD")
            return route, answer.status
        await _send(route.status, _encode(answer), request_id, send)
        return route, route.status

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse foreign names of this server, so that a page elsewhere cannot rebind its name to this address."""
        host = headers.get(b"host", b"")
        if host in self._good_hosts:
            return
        name = host.decode("latin-1").lower()
        bare = name.rpartition(":")[0] if re.search(r":\d+$", name) else name
        if "*" not in self._hosts and bare.strip("[]") not in self._hosts:
            raise Refusal(
                Reason.FORBIDDEN, "host: not a name of this hub; add it to server.allowed_hosts", field="host"
            )
        if len(self._good_hosts) < 1000:
            self._good_hosts.add(host)


async def _request(
    route: Route, method: str, headers: Mapping[bytes, bytes], receive: bodies.Receive, call: Call
) -> Any:
    if route.request is Bytes:
        return None
    if method in {"GET", "HEAD"} or (method == "DELETE" and not call.size):
        return bodies.decode_query(call.query, route.request)
    body = await bodies.read(receive, route.body_limit)
    if body and not headers.get(b"content-type", b"").startswith(b"application/json"):
        # A form of a foreign page cannot send this type without asking first.
        raise Refusal(Reason.INVALID, "content-type: not application/json; send JSON", field="content-type")
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding != b"identity":
        # Unpacked, a small body could fill the memory.
        raise HttpRefusal(
            Reason.INVALID, "content-encoding: not taken here; send the body as it is", 415, field="content-encoding"
        )
    return bodies.decode(body, route.request)


async def _refuse(refusal: Refusal, path: str, request_id: bytes, send: Send, status: int | None = None) -> int:
    body: MlflowFault | WireFault
    if path.startswith(("/api/", "/ajax-api/")):
        natural, body = mlflow_fault(refusal)
        if isinstance(refusal, NoSuchPath):
            natural, body = _no_such_endpoint(path)
        if status is not None:
            body.error_code = "INTERNAL_ERROR"
    else:
        natural, body = v1_fault(refusal)
        if status is not None:
            body.error.code = "internal"
    if isinstance(refusal, HttpRefusal):
        natural = refusal.http_status
    extra = []
    if refusal.reason is Reason.UNAUTHENTICATED:
        # Basic is MLflow's way. On the pages' own calls it would make a browser ask for a password.
        ways = b'Bearer realm="skyward"'
        if path.startswith(("/api/", "/ajax-api/")):
            ways += b', Basic realm="skyward"'
        extra.append((b"www-authenticate", ways))
    if refusal.reason is Reason.TOO_LARGE:
        # The rest of the body is not read: the connection cannot carry a second request.
        extra.append((b"connection", b"close"))
    if refusal.reason in {Reason.LIMITED, Reason.UNAVAILABLE} and status is None:
        extra.append((b"retry-after", b"1"))
    await _send(status or natural, _encode(body), request_id, send, extra)
    return status or natural


def _no_such_endpoint(path: str) -> tuple[int, MlflowFault]:
    if FOREIGN.match(path):
        text = "skyward.hub has no traces, gateway, prompts, scorers or webhooks; MLflow's own server has them."
        return 501, MlflowFault("NOT_IMPLEMENTED", text)
    return 404, MlflowFault("ENDPOINT_NOT_FOUND", "No such route on this server.")


async def _send(
    status: int, body: bytes, request_id: bytes, send: Send, extra: list[tuple[bytes, bytes]] | None = None
) -> None:
    headers = [
        (b"content-type", JSON),
        (b"content-length", str(len(body)).encode()),
        _NO_STORE,
        _BARE,
        (b"x-request-id", request_id),
    ]
    if extra:
        headers += extra
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_reply(reply: HttpReply, request_id: bytes, send: Send, *, without_body: bool) -> None:
    headers = [(b"content-type", reply.content_type), _BARE, (b"x-request-id", request_id), *reply.headers.items()]
    if b"cache-control" not in reply.headers:
        headers.append(_NO_STORE)
    if isinstance(reply.body, bytes):
        headers.append((b"content-length", str(len(reply.body)).encode()))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    if isinstance(reply.body, bytes) or without_body:
        body = reply.body if isinstance(reply.body, bytes) and not without_body else b""
        await send({"type": "http.response.body", "body": body})
        return
    async with aclosing(reply.body) as pieces:
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
