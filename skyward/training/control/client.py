"""Client of a run's control: find a run by its id, and send requests by HTTP to its socket or its port."""

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

_ANSWER_LIMIT = 8 << 20


@dataclass(frozen=True, kw_only=True)
class HttpTransport:
    """Transport to a port. Each request uses a connection of its own."""

    host: str
    port: int
    token: str | None = field(default=None, repr=False)

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        """Send a request; return the HTTP status and the answer's body. Raise ControlFailed if that fails."""
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        return _ask(connection, f"{self.host} port {self.port}", method, path, body, headers)


@dataclass(frozen=True, kw_only=True)
class SocketTransport:
    """Transport to a socket of this machine. Each request uses a connection of its own."""

    path: str

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        """Send a request; return the HTTP status and the answer's body. Raise ControlFailed if that fails."""
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
        raise ControlFailed(
            f"{where}: nothing listens there ({error}); see `skyward train list`", is_gone=True
        ) from error
    except TimeoutError as error:
        raise ControlFailed(f"{where}: no answer within {connection.timeout:g} s; try again") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ControlFailed(f"{where}: {_foreign(f'{type(error).__name__}: {error}')}") from error
    finally:
        connection.close()
    if not isinstance(answer, dict):
        raise ControlFailed(f"{where}: {_foreign(f'{answer!r:.80}')}")
    return reply.status, answer


def _foreign(answer: str) -> str:
    return f"not the answer of a run ({answer}); check that a run listens there, with `skyward train list`"


def find(job_id: str) -> Client:
    """Find a run of this user by its id, from the files that it has written (see `endpoint`).

    Args:
        job_id: id of the run, as `TrainerControlCallback(job_id=)` set it.

    Returns:
        A client of the run.

    Raises:
        ControlFailed: no such run listens, or none that this machine can reach.
        UsageError: `job_id` is not a valid id.

    Example:
        run = find("my-run")
        run.save_and_stop(wait_s=60)
    """
    endpoint = endpoint_of(job_id)
    if endpoint is None:
        known = ", ".join(endpoint.job_id for endpoint in endpoints())
        advice = f"use one of {known}" if known else "start one with a TrainerControlCallback"
        raise ControlFailed(
            f"job_id={job_id!r}: no run of this name listens here; {advice}", job_id=job_id, is_gone=True
        )
    return client_of(endpoint)


def runs() -> list[Endpoint]:
    """List where the living runs of this user listen, oldest first.

    Example:
        for run in runs():
            print(run.job_id, find(run.job_id).status().global_step)
    """
    return endpoints()


def client_of(endpoint: Endpoint) -> Client:
    """Return a client of the run that listens at an endpoint.

    Args:
        endpoint: one of `runs()`.

    Raises:
        ControlFailed: the run listens on another machine only.
        UsageError: the token of its port cannot be read.

    Example:
        print(client_of(runs()[0]).status().global_step)
    """
    if endpoint.socket is not None and endpoint.is_here:
        return Client(SocketTransport(path=endpoint.socket), endpoint.job_id)
    if endpoint.host is None or endpoint.port is None:
        raise ControlFailed(
            f"job_id={endpoint.job_id!r}: it runs on {endpoint.hostname} and listens only there; query it on that "
            "machine, or start it with TrainerControlCallback(enable_http=True, host=...)",
            job_id=endpoint.job_id,
        )
    token = read_token(endpoint.job_id)
    return Client(
        HttpTransport(host=_reachable(endpoint.host, endpoint), port=endpoint.port, token=token), endpoint.job_id
    )


def _reachable(host: str, endpoint: Endpoint) -> str:
    """Return an address that reaches a port bound to all addresses, here or on a machine that shares the folder."""
    if host in ("0.0.0.0", "::", ""):
        if endpoint.is_here:
            return "127.0.0.1" if host != "::" else "::1"
        return endpoint.hostname
    return host
