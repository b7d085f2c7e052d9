"""An EC2 on this machine: moto's server in this process, on loopback, with credentials that give access to nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer

from skyward.providers.aws.clients import clients

__all__ = ["ec2_server"]

_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "MOTO_EC2_ENABLE_INSTANCE_TYPE_VALIDATION": "true",
    "MOTO_ENABLE_KEYPAIR_VALIDATION": "true",
}


@contextlib.contextmanager
def ec2_server() -> Iterator[str]:
    """Run the server. Yields its address. Everything made in it is gone when it ends."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        try:
            yield f"http://{host}:{port}"
        finally:
            clients.cache_clear()
            server.stop()
