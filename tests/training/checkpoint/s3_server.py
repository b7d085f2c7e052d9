"""An S3 on this machine: moto's server in its own process, which can kill a client at one of its requests.

`python -m tests.training.checkpoint.s3_server` prints its port, and ends when its standard input does. Requests that
change something (PUT, POST, DELETE) are counted. POST /_tests/plan sets the count to zero and names the process to
kill, and the request.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

__all__ = ["S3", "When", "s3_server"]

When = Literal["before", "within", "after"]
"""A request that is not carried out; one of whose body half was read; one that is, and whose answer is not seen."""

ROOT = Path(__file__).parents[3]


class S3:
    """The tests' access to the server. Its address and credentials are in this process's environment."""

    def __init__(self, address: str) -> None:
        self.address = address

    def bucket(self) -> str:
        """Return the URL of a new bucket."""
        import boto3

        name = f"bucket-{uuid.uuid4().hex[:12]}"
        boto3.client("s3").create_bucket(Bucket=name)
        return f"s3://{name}"

    def keys(self, url: str) -> list[str]:
        """Return the keys below a URL, as the server has them."""
        import boto3

        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        found = boto3.client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", [])
        return [each["Key"] for each in found]

    def uploads(self, url: str) -> list[str]:
        """Return the keys of unfinished multipart uploads."""
        import boto3

        found = boto3.client("s3").list_multipart_uploads(Bucket=url.removeprefix("s3://").partition("/")[0])
        return [each["Key"] for each in found.get("Uploads", [])]

    def kill(self, pid: int, at: int, when: When) -> None:
        """Kill a process at the request with this number, counted from now."""
        self._ask("plan", {"pid": pid, "at": at, "when": when})

    def refuse(self, at: int, *, is_carried_out: bool = False) -> None:
        """Refuse the requests from this number on, or carry them out and lose the answers."""
        self._ask("plan", {"from": at, "is_carried_out": is_carried_out})

    def count(self) -> int:
        """Return the number of requests that change something since the last reset."""
        return int(self._ask("count", {})["count"])

    def log(self) -> list[str]:
        """Return all requests since the last reset."""
        return list(self._ask("count", {})["log"])

    def forget(self) -> None:
        """Reset the count."""
        self._ask("plan", {})

    def refuse_strangers(self, is_refused: bool) -> None:
        """Set whether clients without a key of this server are refused."""
        body = b"0" if is_refused else b"inf"
        head = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.address}/moto-api/reset-auth", data=body, headers=head, method="POST")
        urllib.request.urlopen(request, timeout=60).close()

    def _ask(self, what: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"{self.address}/_tests/{what}", data=json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """Run the server. `folder` holds fsspec's settings, by which uploads have parts of 5 MiB, the minimum of S3."""
    (folder / "s3.json").write_text(json.dumps({"s3": {"default_block_size": 5 << 20}}))
    command = [sys.executable, "-m", "tests.training.checkpoint.s3_server"]
    server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdin is not None
        assert server.stdout is not None
        address = f"http://127.0.0.1:{int(server.stdout.readline())}"
        environment = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": address,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "FSSPEC_CONFIG_DIR": str(folder),
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            from fsspec import get_filesystem_class
            from fsspec.config import conf, set_conf_files

            set_conf_files(str(folder), conf)  # as it does when it is imported
            get_filesystem_class("s3").clear_instance_cache()  # clients of the module before know its server only
            yield S3(address)
            conf.pop("s3", None)
    finally:
        server.kill()
        server.communicate()


class _Application:
    """WSGI application in front of moto's own."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._plan: dict[str, Any] = {}
        self._count = 0
        self._log: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if path.startswith("/_tests/"):
            body = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            return self._control(path, body, start_response)
        with self._lock:
            self._log.append(f"{method} {path}")
            number = self._count
            is_counted = method in ("PUT", "POST", "DELETE")
            self._count += is_counted
            is_its_turn = is_counted and number == self._plan.get("at")
            is_refused = is_counted and number >= self._plan.get("from", number + 1)
        if is_refused:
            return self._refuse(environ, start_response)
        if not is_its_turn:
            return self._moto(environ, start_response)
        if self._plan["when"] == "after":
            answer = list(self._moto(environ, start_response))
            os.kill(self._plan["pid"], signal.SIGKILL)
            return answer
        if self._plan["when"] == "within":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
        os.kill(self._plan["pid"], signal.SIGKILL)
        start_response("500 Killed", [])
        return []

    def _refuse(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        if self._plan["is_carried_out"]:
            list(self._moto(environ, lambda *_: None))
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("403 Forbidden", [("Content-Type", "application/xml")])
        return [b"<Error><Code>AccessDenied</Code><Message>not now</Message></Error>"]

    def _control(self, path: str, body: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        with self._lock:
            if path == "/_tests/plan":
                self._plan, self._count, self._log = body, 0, []
            answer = {"count": self._count, "log": self._log}
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]


def _serve() -> None:
    import logging

    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = make_server("127.0.0.1", 0, _Application(), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
