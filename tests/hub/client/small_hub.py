"""A small real HTTP server that keeps the hub's batch contract in memory, and that can be told to misbehave."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.http.server_processes import free_port

TOKEN = "sky_1_secret"


@dataclass
class SmallHub:
    """Arrived records. `refuse(path, body)` may return a status and a message instead of an answer."""

    url: str = ""
    records: dict[str, list[tuple[str, list[Any]]]] = field(default_factory=dict)
    """Run id -> (client, record), each once, in the order of arrival."""
    accepted: dict[tuple[str, str], int] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    batches: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)
    commands: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    refuse: Callable[[str, bytes], tuple[int, str] | None] = lambda path, body: None
    connections: list[socket.socket] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, run_id: str, kind: str | None = None) -> list[list[Any]]:
        """Records of a run, without heartbeats."""
        with self.lock:
            found = [record for _, record in self.records.get(run_id, ()) if record[0] != "h"]
        return [record for record in found if kind in {None, record[0]}]

    def points(self, run_id: str, key: str) -> list[tuple[int, Any]]:
        return [(record[1], record[3][key]) for record in self.of(run_id, "m") if key in record[3]]

    def merged(self, run_id: str, kind: str) -> dict[str, str]:
        """Parameters ("p") or tags ("t") of a run."""
        return {key: value for record in self.of(run_id, kind) for key, value in record[1].items()}

    def command(self, run_id: str, number: int, action: str) -> None:
        with self.lock:
            self.commands.setdefault(run_id, []).append({"number": number, "action": action})

    def accept(self, run_id: str, batch: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.batches += 1
            client, first = batch["client"], batch["first"]
            last = self.accepted.get((run_id, client), 0)
            for number, record in enumerate(batch["records"], start=first):
                if number == last + 1:
                    self.records.setdefault(run_id, []).append((client, record))
                    last = number
                    if record[0] == "ack":
                        left = [row for row in self.commands.get(run_id, ()) if row["number"] != record[1]]
                        self.commands[run_id] = left
            self.accepted[run_id, client] = last
            return {"accepted": last, "state": "running", "commands": self.commands.get(run_id, [])}


@contextmanager
def small_hub(port: int = 0, hub: SmallHub | None = None) -> Iterator[SmallHub]:
    """Run a hub, perhaps one that ran before, until the block ends."""
    made = hub or SmallHub()
    server = ThreadingHTTPServer(("127.0.0.1", port or free_port()), handler_of(made))
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        for connection in list(made.connections):  # kept ones would go on answering
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def handler_of(hub: SmallHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            hub.connections.append(self.connection)

        def log_message(self, *args: object) -> None: ...

        def answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def act(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urlsplit(self.path).path
            hub.headers.append(dict(self.headers))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer(401, {"error": {"code": "unauthenticated", "message": "token=...: is unknown; make one"}})
                return
            refusal = hub.refuse(path, body)
            if refusal is not None:
                self.answer(refusal[0], {"error": {"code": "invalid", "message": refusal[1]}})
                return
            parts = [unquote(part) for part in path.strip("/").split("/")]
            if parts[:2] == ["v1", "blobs"]:
                assert hashlib.sha256(body).hexdigest() == parts[2]
                if parse_qs(urlsplit(self.path).query)["run"][0] not in hub.records:
                    self.answer(404, {"error": {"code": "missing", "message": "run_id=...: is unknown; make it"}})
                    return
                hub.blobs[parts[2]] = body
                self.answer(200, {})
            elif parts[:2] == ["v1", "runs"] and parts[3:] == ["batches"]:
                self.answer(200, hub.accept(parts[2], json.loads(body)))
            else:
                self.answer(404, {"error": {"code": "missing", "message": f"path={path!r}: is none; look it up"}})

        do_GET = do_POST = do_PUT = act

    return Handler
