"""Finding a run by its id, and asking it by HTTP: at its socket, or at its port from another machine."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...calls.control import Client
from ...errors import ControlFailed
from .endpoint import Endpoint, endpoint_of, endpoints, read_token

__all__ = ["HttpTransport", "SocketTransport", "find", "runs"]

_ANSWER_LIMIT = 8 << 20


@dataclass(frozen=True, kw_only=True)
class HttpTransport:
    """To a port. Each request is a connection of its own."""

    host: str
    port: int
    token: str | None = field(default=None, repr=False)

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        return _ask(connection, f"{self.host} port {self.port}", method, path, body, headers)


@dataclass(frozen=True, kw_only=True)
class SocketTransport:
    """To a socket of this machine. Each request is a connection of its own."""

    path: str

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        return _ask(_LocalConnection(self.path, timeout_s), self.path, method, path, body, {})


class _LocalConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _ask(
    connection: http.client.HTTPConnection,
    where: str,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    headers: dict[str, str],
) -> tuple[int, dict[str, Any]]:
    data = None if body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, body=data, headers={"Content-Type": "application/json", **headers})
        reply = connection.getresponse()
        answer = json.loads(reply.read(_ANSWER_LIMIT))
    except (ConnectionError, FileNotFoundError, http.client.RemoteDisconnected) as error:
        raise ControlFailed(f"nothing listens on {where}: {error}", is_gone=True) from error
    except TimeoutError as error:
        raise ControlFailed(f"{where} did not answer within {connection.timeout:g} s") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ControlFailed(f"{where} gave no answer that is one: {what}") from error
    finally:
        connection.close()
    if not isinstance(answer, dict):
        raise ControlFailed(f"{where} gave no answer that is one: {answer!r:.80}")
    return reply.status, answer


def find(job_id: str) -> Client:
    """The run of this user with that id, by the files that it has written (see `endpoint`).

    Raises: ControlFailed when there is none; UsageError for what is no job id.
    """
    endpoint = endpoint_of(job_id)
    if endpoint is None:
        known = ", ".join(endpoint.job_id for endpoint in endpoints()) or "none"
        raise ControlFailed(f"no run called {job_id!r} listens here; there: {known}", job_id=job_id, is_gone=True)
    return client_of(endpoint)


def runs() -> list[Endpoint]:
    """Where the runs of this user listen, oldest first; those of dead processes are not among them."""
    return endpoints()


def client_of(endpoint: Endpoint) -> Client:
    """Asks the run that listens there. Raises: ControlFailed where nothing leads to it from this machine."""
    if endpoint.socket is not None and endpoint.is_here:
        return Client(SocketTransport(path=endpoint.socket), endpoint.job_id)
    if endpoint.host is None or endpoint.port is None:
        raise ControlFailed(
            f"job_id={endpoint.job_id!r}: it runs on {endpoint.hostname} and listens only there; ask on that machine, "
            "or start it with TrainerControlCallback(enable_http=True, host=...)",
            job_id=endpoint.job_id,
        )
    token = read_token(endpoint.job_id)
    return Client(
        HttpTransport(host=_reachable(endpoint.host, endpoint), port=endpoint.port, token=token), endpoint.job_id
    )


def _reachable(host: str, endpoint: Endpoint) -> str:
    """An address that leads to what is bound to all addresses, or to another machine that shares the folder."""
    if host in ("0.0.0.0", "::", ""):
        if endpoint.is_here:
            return "127.0.0.1" if host != "::" else "::1"
        return endpoint.hostname
    return host
