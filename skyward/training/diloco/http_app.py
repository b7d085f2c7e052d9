"""HTTP API of a server: each route is a question to the `DeltaExchange`, or a delta for it.

    POST /join /leave                     JSON: worker, session, ...
    POST /heartbeat                       JSON: the same; with wait_s it is answered once the worker is in a round
    GET  /parameters?worker=&tag=&offset= a frame
    PUT  /parameters?worker=&session=     a frame, from the first worker
    GET  /updates?worker=&session=&base_round=&number=&upload=    JSON: whether the delta is known; bytes of the upload
    PUT  /updates?worker=&session=&base_round=&number=&upload=&offset=
    GET  /answers?worker=&session=&base_round=&number=&wait_s=&tag=&offset=
    GET  /                                the page; it needs no token
    GET  /status                          JSON
    GET  /history?first=                  JSON: the facts about the last rounds, and the server's start (see `origin`)
    POST /control/save /control/kick /control/stop
    GET  /tokens                          JSON: workers, and whether the token of each is accepted
    POST /tokens/add /tokens/revoke       JSON: worker

An upload is answered when it has arrived, and not when its round closes. A worker then asks for the answer, and asks
again until there is one. So a connection that breaks costs no transfer that has ended. If it breaks in an upload, the
worker asks how much of that `upload` has come, and sends the rest. If it breaks in a frame for the worker, that asks
for the rest by the frame's `tag`, which is its ETag. A question that waits is a life sign of its worker while its
connection stands.

204: not yet. 206: the rest of a frame. 401: no token that is accepted. 403: not with this token. 404: the delta, or its
beginning, is unknown here, send it. 409: refused, with the kind of the refusal. 429: too many requests, send fewer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import IO, Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import SkywardError, UsageError
from .examination import Shaped
from .exchange import DeltaExchange
from .facts import MOST_FIGURES
from .frame_response import frame_response
from .frames import decode, largest_frame
from .page_file import page_file
from .refusal import WorkerRefused
from .replies import GlobalParameters, Standing
from .request_rate import REQUESTS_PER_S, RequestRate
from .rounds import UpdateKey
from .tokens import ServerTokens, TokenRefused
from .transport import UNKNOWN
from .uploads import Uploads, spool

MOST_JSON_BYTES = 32 * 2**20
"""Largest JSON body: the shapes of about 100,000 arrays."""
MOST_MODEL_BYTES = 2**40
"""Largest frame before there is a model. Afterwards the limit is that of its shapes."""
MOST_WAIT_S = 30.0
"""Longest wait for an answer in one request. The worker then asks again."""
LIFE_SIGN_S = 1.0
"""Time between two life signs of a worker whose question waits."""
MOST_SAVE_S = 20.0
"""Longest wait for the last save in the request that stops the server."""
_DISCARDED_BYTES = 2**28
"""Most bytes beyond the limit of a body that are read and discarded. A connection that is closed while bytes arrive is
reset, and the answer may be lost with it."""

_SCOPE, _BEARER = "skyward.worker", b"Bearer "
_STRANGER = " "
"""Holder of all requests without a token. No worker has such a name."""

_NO_FURTHER = "this request with a delta is taken no further; ask for the delta's answer, or send it again"

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class _NotTaken(Exception):
    """A body that the server takes no further."""

    status: int
    kind: str


class _TooLarge(_NotTaken):
    """A body over its limit."""

    status, kind = 413, "too_large"


class _Superseded(_NotTaken):
    """A delta of which another request brings the rest, or whose worker was evicted meanwhile."""

    status, kind = 503, "superseded"


class _Forbidden(TokenRefused):
    """A request that its token does not cover."""


class _Changes:
    """Changes of the exchange, as an event of the event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Wake all that wait. From any thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._wake)

    def next(self) -> asyncio.Event:
        """Return an event that the next change sets."""
        self._loop = asyncio.get_running_loop()
        return self._event

    def _wake(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


class DiLoCoApp:
    """Starlette application around an exchange.

    Args:
        exchange: The exchange.
        tokens: Tokens, of which each request needs one; None: everyone may ask.
        stop: Called when an operator asks the server to stop.
        spool_dir: Folder for deltas that arrive; None: the system's temporary folder.
    """

    def __init__(
        self,
        exchange: DeltaExchange,
        *,
        tokens: ServerTokens | None,
        stop: Callable[[], None],
        spool_dir: str | None = None,
    ) -> None:
        self._exchange, self._tokens, self._stop, self._spool_dir = exchange, tokens, stop, spool_dir
        self._changes = _Changes()
        self._uploads = Uploads(spool_dir)
        self.is_stopping = False
        exchange.watch(self._changes.tell)
        routes = [
            Route("/join", _guarded(self._join), methods=["POST"]),
            Route("/leave", _guarded(self._leave), methods=["POST"]),
            Route("/heartbeat", _guarded(self._heartbeat), methods=["POST"]),
            Route("/parameters", _guarded(self._parameters), methods=["GET"]),
            Route("/parameters", _guarded(self._offer), methods=["PUT"]),
            Route("/updates", _guarded(self._received), methods=["GET"]),
            Route("/updates", _guarded(self._update), methods=["PUT"]),
            Route("/answers", _guarded(self._answer), methods=["GET"]),
            Route("/status", _guarded(self._status), methods=["GET"]),
            Route("/history", _guarded(self._history), methods=["GET"]),
            Route("/control/{command}", _guarded(self._control), methods=["POST"]),
        ]
        if tokens is None:  # neither a browser nor a stranger reaches the channels of a pool
            self.asgi: ASGIApp = Starlette(routes=routes)
        else:
            routes += [
                Route("/", _page, methods=["GET"]),
                Route("/tokens", _guarded(partial(self._list_tokens, tokens)), methods=["GET"]),
                Route("/tokens/{command}", _guarded(partial(self._change_tokens, tokens)), methods=["POST"]),
            ]
            self.asgi = _TokenCheck(Starlette(routes=routes), tokens)

    def end_waits(self) -> None:
        """Answer all requests that wait, because the server stops. From any thread."""
        self.is_stopping = True
        self._changes.tell()

    def close(self) -> None:
        """Forget what has come of deltas. The event loop has ended."""
        self._uploads.keep_only(())

    # Workers ----------------------------------------------------------------------------------------------------------

    async def _join(self, request: Request) -> Response:
        body = await _json(request)
        figures = _figures(body)
        layout = {name: Shaped(tuple(shape)) for name, shape in body.get("layout", {}).items()}
        base_round = body.get("base_round")
        worker = _speaker(request, body["worker"])
        standing = await run_in_threadpool(
            self._exchange.join,
            *(worker, str(body["session"])),
            base_round=None if base_round is None else int(base_round),
            layout=layout or None,
            num_fragments=int(body.get("num_fragments", 1)),
            host=str(body.get("host", "")),
            figures=figures,
        )
        if self._tokens is not None:
            try:  # it may have been revoked between the check and the join
                self._tokens.check(_bearer(request.scope))
            except TokenRefused:
                await run_in_threadpool(self._exchange.evict, worker)
                raise
        return _standing(standing)

    async def _leave(self, request: Request) -> Response:
        body = await _json(request)
        worker, session = _speaker(request, body["worker"]), str(body["session"])
        has_ended = body.get("has_ended") is True
        await run_in_threadpool(self._exchange.leave, worker, session, has_ended=has_ended)
        return Response(status_code=204)

    async def _heartbeat(self, request: Request) -> Response:
        body = await _json(request)
        figures = _figures(body)
        worker, session = _speaker(request, body["worker"]), str(body["session"])
        standing = await self._await_answer(
            request,
            lambda: self._exchange.hear(worker, session, figures),
            is_final=lambda standing: standing.is_awaited,
            wait_s=float(body.get("wait_s", 0)),
        )
        return _standing(standing)

    async def _parameters(self, request: Request) -> Response:
        worker = request.query_params.get("worker", "")
        if worker:
            _speaker(request, worker)
        parameters = await run_in_threadpool(self._exchange.parameters)
        return Response(status_code=204) if parameters is None else self._sent(request, parameters, worker)

    async def _offer(self, request: Request) -> Response:
        limit = MOST_MODEL_BYTES
        with spool(self._spool_dir) as file:
            await _receive(request, file, limit)
            file.seek(0)
            content = bytearray(file.read())
        await run_in_threadpool(lambda: self._exchange.offer(decode(content)))
        return Response(status_code=204)

    async def _update(self, request: Request) -> Response:
        key, session = _key(request), request.query_params["session"]
        # Asked before the body is read: a refused worker need not send it all.
        await run_in_threadpool(self._exchange.find, key, session)
        shapes = self._exchange.shapes()
        workers = [entry["worker"] for entry in (await run_in_threadpool(self._exchange.status))["workers"]]
        self._uploads.keep_only({*workers, key.worker})
        offset = int(request.query_params.get("offset", 0))
        upload = self._uploads.begin(key, request.query_params.get("upload", ""), offset=offset)
        if upload is None:
            return _unknown("the beginning of this delta is not here; send it whole")
        limit = MOST_MODEL_BYTES if shapes is None else largest_frame(shapes.values())
        number, brought = upload.requests, 0
        try:
            async for piece in _pieces(request, limit - offset):
                if upload.requests != number:
                    raise _Superseded(_NO_FURTHER)
                upload.file.write(piece)
                upload.size += len(piece)
                brought += len(piece)
            if upload.requests != number:
                raise _Superseded(_NO_FURTHER)
        except ClientDisconnect:
            if not upload.name:
                self._uploads.drop(upload)
            raise
        except _Superseded:  # the file is another request's, or closed
            raise
        except BaseException:
            self._uploads.drop(upload)
            raise
        finally:
            self._exchange.count_traffic(key.worker, received=brought)
        outcome = await run_in_threadpool(self._exchange.submit, key, session, self._uploads.take(upload))
        return JSONResponse({"outcome": outcome})

    async def _received(self, request: Request) -> Response:
        key, session = _key(request), request.query_params["session"]
        is_known = await run_in_threadpool(self._exchange.find, key, session) != "unknown"
        received = self._uploads.received(key, request.query_params["upload"])
        return JSONResponse({"is_known": is_known, "received": received})

    async def _answer(self, request: Request) -> Response:
        key, session = _key(request), request.query_params["session"]
        answer = await self._await_answer(
            request,
            lambda: self._exchange.find(key, session),
            is_final=lambda answer: answer != "open",
            wait_s=float(request.query_params.get("wait_s", 0)),
        )
        if answer == "unknown":
            return _unknown("this delta is unknown; send it")
        if isinstance(answer, GlobalParameters):
            return self._sent(request, answer, key.worker)
        return Response(status_code=204)

    async def _await_answer(
        self, request: Request, ask: Callable[[], T], *, is_final: Callable[[T], bool], wait_s: float
    ) -> T:
        """Ask the exchange until its answer is final, the time is over, or the server stops. Return the last answer.

        It asks after each change, and at least every `LIFE_SIGN_S`, because the exchange hears the worker each time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_s, MOST_WAIT_S)
        while True:
            change = self._changes.next()  # before the question, so that no change is missed
            answer = await run_in_threadpool(ask)
            left = deadline - loop.time()
            if is_final(answer) or left <= 0 or self.is_stopping or await request.is_disconnected():
                return answer
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(change.wait(), min(left, LIFE_SIGN_S))

    def _sent(self, request: Request, parameters: GlobalParameters, worker: str) -> Response:
        def count(size: int) -> None:
            if worker:
                self._exchange.count_traffic(worker, sent=size)

        server_id = str(self._exchange.origin["id"])
        return frame_response(parameters, request.query_params, server_id=server_id, count=count)

    # People -----------------------------------------------------------------------------------------------------------

    async def _status(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self._exchange.status))

    async def _history(self, request: Request) -> Response:
        first = int(request.query_params.get("first", 0))
        rounds = await run_in_threadpool(self._exchange.history, first)
        return JSONResponse({**self._exchange.origin, "rounds": rounds})

    async def _control(self, request: Request) -> Response:
        _check_operator(request)
        command, body = request.path_params["command"], await _json(request)
        if command == "save":
            return JSONResponse({"path": await run_in_threadpool(self._exchange.save)})
        if command == "kick":
            worker = str(body["worker"])
            return JSONResponse({"was_present": await run_in_threadpool(self._exchange.evict, worker)})
        if command == "stop":
            try:
                problem = await self._save_at_last()
            finally:
                self._stop()
            return JSONResponse({"problem": problem})
        raise UsageError(f"command={command!r}: unknown; use save, kick or stop")

    async def _save_at_last(self) -> str:
        """Save before the server stops, and return why that failed, or ""."""
        saving = asyncio.ensure_future(run_in_threadpool(self._exchange.save))
        done, _ = await asyncio.wait([saving], timeout=MOST_SAVE_S)
        if not done:
            return f"its last save takes longer than {MOST_SAVE_S:g} s; it ends with that, and its log says how"
        error = saving.exception()
        return "" if error is None else f"its last state could not be saved: {error}"

    async def _list_tokens(self, tokens: ServerTokens, request: Request) -> Response:
        _check_operator(request)
        return JSONResponse({"workers": tokens.workers(), "are_kept": tokens.are_kept})

    async def _change_tokens(self, tokens: ServerTokens, request: Request) -> Response:
        _check_operator(request)
        command, worker = request.path_params["command"], str((await _json(request))["worker"])
        if command == "add":
            token = await run_in_threadpool(tokens.issue, worker)
            return JSONResponse({"token": token, "are_kept": tokens.are_kept})
        if command == "revoke":
            await run_in_threadpool(tokens.revoke, worker)  # first, so that the worker cannot join again
            return JSONResponse({"was_present": await run_in_threadpool(self._exchange.evict, worker)})
        raise UsageError(f"command={command!r}: unknown; use add or revoke")


async def _page(_request: Request) -> Response:
    page = page_file()
    return Response(page.content, headers=dict(page.headers))


class _TokenCheck:
    """Refuses requests without a token, except for the page, and too many, before anything of their bodies is read."""

    def __init__(self, app: ASGIApp, tokens: ServerTokens) -> None:
        self._app, self._tokens, self._rate = app, tokens, RequestRate()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http":
            holder: str | None = _STRANGER
            try:
                if scope["path"] != "/":
                    scope[_SCOPE] = holder = self._tokens.check(_bearer(scope))
            except TokenRefused as refusal:
                app = _refused_token(refusal)
            delay = self._rate.delay(holder, now=asyncio.get_running_loop().time())
            if delay is None:
                text = f"requests: over {REQUESTS_PER_S:g} in a second with one token; send fewer"
                app = JSONResponse({"kind": "rate", "message": text}, status_code=429)
            elif delay:
                await asyncio.sleep(delay)
        await app(scope, receive, send)


def _bearer(scope: Scope) -> bytes:
    given: bytes = dict(scope["headers"]).get(b"authorization", b"")
    return given.removeprefix(_BEARER) if given.startswith(_BEARER) else b""


def _refused_token(refusal: TokenRefused) -> Response:
    status = 403 if isinstance(refusal, _Forbidden) else 401
    return JSONResponse({"kind": "token", "message": str(refusal)}, status_code=status)


def _speaker(request: Request, worker: object) -> str:
    """Return the worker that a request speaks for. The token of another worker does not cover it."""
    holder = request.scope.get(_SCOPE)
    if holder is not None and holder != worker:
        raise _Forbidden(
            f"worker={worker!r}: the token is that of worker {holder!r}; set worker_id={holder!r}, or DILOCO_WORKER_ID"
        )
    return str(worker)


def _check_operator(request: Request) -> None:
    holder = request.scope.get(_SCOPE)
    if holder is not None:
        raise _Forbidden(f"token: that of worker {holder!r} exchanges deltas only; use the operator's token")


def _guarded(handler: Handler) -> Handler:
    """Return a handler whose errors become answers."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except WorkerRefused as refusal:
            return JSONResponse({"kind": refusal.kind.value, "message": refusal.message}, status_code=409)
        except TokenRefused as refusal:
            return _refused_token(refusal)
        except _NotTaken as error:
            return JSONResponse({"kind": error.kind, "message": str(error)}, status_code=error.status)
        except SkywardError as error:  # some are a ValueError, too
            return JSONResponse({"kind": "bad_request", "message": str(error)}, status_code=400)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"request: {type(error).__name__}: {error}; use a version of skyward that fits the server's"
            return JSONResponse({"kind": "bad_request", "message": text}, status_code=400)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except OSError as error:
            return JSONResponse({"kind": "disk", "message": f"server: {error.strerror}"}, status_code=507)

    return answered


async def _json(request: Request) -> Mapping[str, Any]:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_JSON_BYTES:
            raise _TooLarge(f"body: has over {MOST_JSON_BYTES} bytes; send less")
    content = json.loads(body or b"{}")
    if not isinstance(content, dict):
        raise UsageError("body: must be a JSON object; send one")
    return content


def _figures(body: Mapping[str, Any]) -> Mapping[str, Any]:
    figures = body.get("figures", {})
    if not isinstance(figures, dict) or len(figures) > MOST_FIGURES:
        raise UsageError(f"figures: must be a table of at most {MOST_FIGURES} numbers; send fewer")
    return figures


async def _receive(request: Request, file: IO[bytes], limit: int) -> None:
    """Write a body to a file."""
    async for piece in _pieces(request, limit):
        file.write(piece)


async def _pieces(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Return the pieces of a body, and refuse one that is too large once it has been read."""
    received = 0
    async for piece in request.stream():
        received += len(piece)
        if received <= limit:
            yield piece
        elif received > limit + _DISCARDED_BYTES:
            break
    if received > limit:
        raise _TooLarge(f"frame: has over {limit} bytes, more than the model; send this model's parameters only")


def _unknown(message: str) -> Response:
    return JSONResponse({"kind": UNKNOWN, "message": message}, status_code=404)


def _key(request: Request) -> UpdateKey:
    query = request.query_params
    worker = _speaker(request, query["worker"])
    return UpdateKey(worker=worker, base_round=int(query["base_round"]), number=int(query["number"]))


def _standing(standing: Standing) -> Response:
    return JSONResponse(asdict(standing))
