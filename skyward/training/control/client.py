"""Finding a run by its id, and asking it by HTTP."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...control import Client
from ...errors import ControlFailed
from .endpoint import Endpoint, endpoint_of, endpoints, read_token

__all__ = ["HttpTransport", "find", "runs"]

_ANSWER_LIMIT = 8 << 20


@dataclass(frozen=True, kw_only=True)
class HttpTransport:
    """To one address. Each request is a connection of its own."""

    host: str
    port: int
    token: str | None = field(default=None, repr=False)

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body=data, headers=headers)
            reply = connection.getresponse()
            said = json.loads(reply.read(_ANSWER_LIMIT))
        except (ConnectionRefusedError, ConnectionResetError, http.client.RemoteDisconnected) as error:
            raise ControlFailed(f"nothing listens on {self.host} port {self.port}: {error}", is_gone=True) from error
        except TimeoutError as error:
            raise ControlFailed(f"{self.host} port {self.port} did not answer within {timeout_s:g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ControlFailed(f"{self.host} port {self.port} gave no answer that is one: {what}") from error
        finally:
            connection.close()
        if not isinstance(said, dict):
            raise ControlFailed(f"{self.host} port {self.port} gave no answer that is one: {said!r:.80}")
        return reply.status, said


def find(job_id: str) -> Client:
    """The run of this user with that id, by the files that it has written (see `endpoint`).

    Raises: ControlFailed when there is none; UsageError for what is no job id.
    """
    endpoint = endpoint_of(job_id)
    if endpoint is None:
        known = ", ".join(each.job_id for each in endpoints()) or "none"
        raise ControlFailed(f"no run called {job_id!r} listens here; there: {known}", job_id=job_id, is_gone=True)
    return client_of(endpoint)


def runs() -> list[Endpoint]:
    """Where the runs of this user listen, oldest first; those of dead processes are not among them."""
    return endpoints()


def client_of(endpoint: Endpoint) -> Client:
    """Asks the run that listens there."""
    transport = HttpTransport(host=_reachable(endpoint), port=endpoint.port, token=read_token(endpoint.job_id))
    return Client(transport, endpoint.job_id)


def _reachable(endpoint: Endpoint) -> str:
    """An address that leads to what is bound to all addresses, or to another machine that shares the folder."""
    if endpoint.host in ("0.0.0.0", "::", ""):
        if endpoint.owner.is_here:
            return "127.0.0.1" if endpoint.host != "::" else "::1"
        return endpoint.hostname
    return endpoint.host
