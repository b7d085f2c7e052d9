"""A webhook on loopback that keeps what it was sent."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer


class Receiver:
    """A webhook that answers with a status, and keeps what it was sent."""

    def __init__(self) -> None:
        self.status, self.requests = 204, list[tuple[dict[str, str], bytes]]()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.requests.append((dict(self.headers), body))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def target(self, **fields: object) -> dict[str, object]:
        return {"url": f"http://{self.host}/hook?of=lab", "secret": "LAB", **fields}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
