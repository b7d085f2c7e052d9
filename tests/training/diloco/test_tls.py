"""Servers and workers with TLS."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyward.errors import UsageError
from skyward.training.diloco import DiLoCoServer
from skyward.training.diloco.client import DiLoCoClient
from skyward.training.diloco.transport import ServerUnreachable
from tests.training.diloco.certificates import write_certificate
from tests.training.diloco.runs import are_equal, make_model, serving, state_of, train, worker_of


@pytest.fixture
def cert(tmp_path: Path) -> Path:
    """Return a file with a certificate for 127.0.0.1 and its key."""
    return write_certificate(tmp_path, "127.0.0.1")[1]


def test_workers_train_over_tls_with_the_certificate_of_the_server(cert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = make_model(), make_model()
    with serving(make_model(), cert=cert) as server:
        assert server.address.startswith("https://127.0.0.1:")
        monkeypatch.setenv("DILOCO_CA", str(cert))
        train(server, model, "a", 6)
        train(server.address.removeprefix("https://"), make_model(), "b", 3)
        assert server.status()["round"] == 3
    with serving(make_model()) as server:
        train(server, expected, "a", 6)
    assert are_equal(state_of(model), state_of(expected))


def test_a_certificate_that_is_not_trusted_is_refused(cert: Path, tmp_path: Path) -> None:
    with serving(make_model(), cert=cert) as server:
        with pytest.raises(UsageError, match="its certificate is not trusted: self-signed certificate; set DILOCO_CA"):
            worker_of(server, make_model(), None, "a").start()
        other = tmp_path / "other"
        other.mkdir()
        for ca, address, problem in (
            (write_certificate(other, "127.0.0.1")[0], server.address, "DILOCO_CA=.*other.*; copy the server's"),
            (cert, server.address.replace("127.0.0.1", "localhost"), "not valid for 'localhost'; use a name that is"),
        ):
            with pytest.raises(UsageError, match=problem):
                DiLoCoClient(address, ca=f"{ca}").ask("/status")
        with pytest.raises(ServerUnreachable, match="use https:// if it has a certificate"):
            DiLoCoClient(server.address.replace("https", "http")).ask("/status")
    with serving(make_model()) as server, pytest.raises(ServerUnreachable, match="it has no certificate, so use http:"):
        DiLoCoClient(server.address.replace("http", "https")).ask("/status")


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(UsageError, match=r"cert=.*broken.pem.*: has no certificate, or not its key; name a PEM file"):
        DiLoCoServer(make_model(), port=0, cert=broken).start()
    with pytest.raises(UsageError, match=r"host='192.0.2.1': not an address of this machine"):
        DiLoCoServer(make_model(), host="192.0.2.1", cert=broken).start()
    with pytest.raises(UsageError, match=r"save_dir=.*broken.pem.*; name a folder"):
        DiLoCoServer(make_model(), save_dir=broken)
    monkeypatch.setenv("DILOCO_CA", str(tmp_path / "missing.pem"))
    with pytest.raises(UsageError, match=r"DILOCO_CA=.*missing.pem.*: cannot be read: .*; name a PEM file"):
        worker_of("127.0.0.1:1", make_model(), None, "a")
