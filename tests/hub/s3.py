"""An S3 for the tests: moto's server in this process, on loopback, which can go away and come back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from skyward.hub.store.blobs import Bucket
from tests.hub.http.server_processes import free_port


class S3Server:
    """A server whose buckets survive `stop`."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._port = free_port()  # tests start it again on it
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def new_bucket(self, prefix: str = "") -> Bucket:
        """Make an empty bucket."""
        name = f"hub-{next(self._numbers)}"
        self.client().create_bucket(Bucket=name)
        return self.bucket_named(name, prefix)

    def bucket_named(self, name: str, prefix: str = "") -> Bucket:
        """Return a bucket as settings name it."""
        return Bucket(
            name=name,
            prefix=prefix,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key="test",
            secret_key="test",
        )

    def kept(self, bucket: Bucket) -> list[str]:
        """Return the keys of all objects, and of all unfinished uploads."""
        objects = self.client().list_objects_v2(Bucket=bucket.name).get("Contents", [])
        uploads = self.client().list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])
        return [item["Key"] for item in (*objects, *uploads)]


def run_server() -> Iterator[S3Server]:
    """Run a server until the session ends."""
    server = S3Server()
    yield server
    server.stop()
