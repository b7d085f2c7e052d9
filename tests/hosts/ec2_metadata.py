"""The metadata service of one instance: 169.254.169.254, on the loopback of its host."""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import secrets
import socket
import socketserver
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.hosts.bed import ip

__all__ = ["Metadata"]

ADDRESS = "169.254.169.254"
_CLONE_NEWNET = 0x40000000


class Metadata:
    """Server that runs in threads of this process. Only its socket is in the host's network. `close` ends it."""

    def __init__(self, netns: str, instance: Any, public_key: str) -> None:
        self.instance = instance
        self.public_key = public_key
        self.token = secrets.token_urlsafe(32)
        self.notice: dict[str, str] | None = None
        ip("addr", "add", f"{ADDRESS}/32", "dev", "lo", netns=netns)
        self._server = _Server(self, _socket_in(netns))
        threading.Thread(target=self._server.serve_forever, args=[0.1], daemon=True).start()

    def announce(self, in_s: float) -> None:
        """Report from now on that the instance is being reclaimed."""
        when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=in_s)
        self.notice = {"action": "terminate", "time": when.strftime("%Y-%m-%dT%H:%M:%SZ")}

    def answer(self, path: str) -> str | None:
        """Return the contents of a path below /latest/, or None."""
        instance = self.instance
        values = {
            "meta-data/instance-id": instance.id,
            "meta-data/instance-type": instance.instance_type,
            "meta-data/ami-id": instance.image_id,
            "meta-data/local-ipv4": instance.private_ip,
            "meta-data/public-ipv4": instance.public_ip,
            "meta-data/hostname": instance.private_dns_name,
            "meta-data/placement/availability-zone": instance.availability_zone,
            "meta-data/placement/region": instance.region_name,
            "meta-data/instance-life-cycle": instance.lifecycle or "on-demand",
            "meta-data/public-keys/0/openssh-key": self.public_key,
        }
        if self.notice is not None:
            values["meta-data/spot/instance-action"] = json.dumps(self.notice)
            values["meta-data/spot/termination-time"] = self.notice["time"]
        return values.get(path)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_PUT(self) -> None:
        if self.path == "/latest/api/token" and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers:
            self._send(HTTPStatus.OK, self.server.metadata.token)
        else:
            self._send(HTTPStatus.BAD_REQUEST, "")

    def do_GET(self) -> None:
        metadata = self.server.metadata
        token = self.headers.get("X-aws-ec2-metadata-token")
        needs_token = metadata.instance.metadata_options.http_tokens == "required"
        if token != metadata.token and (token or needs_token):
            self._send(HTTPStatus.UNAUTHORIZED, "")
            return
        found = metadata.answer(self.path.removeprefix("/latest/").rstrip("/"))
        self._send(HTTPStatus.NOT_FOUND if found is None else HTTPStatus.OK, found or "")

    def _send(self, status: HTTPStatus, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, metadata: Metadata, listening: socket.socket) -> None:
        super().__init__((ADDRESS, 80), _Handler, bind_and_activate=False)
        self.metadata = metadata
        self.socket.close()
        self.socket = listening


def _socket_in(netns: str) -> socket.socket:
    """Return a listening socket in that namespace. A separate thread enters it, and ends."""
    made: list[socket.socket] = []

    def make() -> None:
        with open(f"/run/netns/{netns}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), netns)
        made.append(socket.create_server((ADDRESS, 80)))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]
