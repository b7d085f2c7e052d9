"""Servers and workers with TLS."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyward.errors import UsageError
from skyward.training.diloco import DiLoCoServer
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


def test_a_certificate_that_is_not_trusted_is_refused(cert: Path) -> None:
    with (
        serving(make_model(), cert=cert) as server,
        pytest.raises(UsageError, match="its certificate is not trusted: self-signed certificate; set DILOCO_CA"),
    ):
        worker_of(server, make_model(), None, "a").start()


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(UsageError, match=r"cert=.*broken.pem.*: cannot be used: .*; name a PEM file with its key"):
        DiLoCoServer(make_model(), port=0, cert=broken).start()
    monkeypatch.setenv("DILOCO_CA", str(tmp_path / "missing.pem"))
    with pytest.raises(UsageError, match=r"DILOCO_CA=.*missing.pem.*: cannot be read: .*; name a PEM file"):
        worker_of("127.0.0.1:1", make_model(), None, "a")
