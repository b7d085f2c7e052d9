"""Configuration of a server: the file, the environment that wins over it, secrets from files and variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyward.errors import UsageError
from skyward.hub.http.settings import Settings, read_settings
from skyward.hub.store.blobs import Bucket

FILE = """
server:
  port: 8100
  workers: 4
  allowed_hosts: [hub.example.org]
database:
  url: postgresql://hub:${DATABASE_PASSWORD}@db/hub
storage:
  bucket: runs
  prefix: team
  endpoint: https://s3.example.org
  access_key: key
  secret_key_file: SECRET
metrics: {enabled: true, path: /prometheus}
"""
PASSWORD = {"DATABASE_PASSWORD": "p:w"}


def read(tmp_path: Path, text: str, environment: dict[str, str]) -> Settings:
    secret = tmp_path / "secret"
    secret.write_text("of the file\n")
    config = tmp_path / "hub.yaml"
    config.write_text(text.replace("SECRET", str(secret)))
    return read_settings(config, environment)


def test_a_file_with_secrets_elsewhere_becomes_settings(tmp_path: Path) -> None:
    settings = read(tmp_path, FILE, PASSWORD)
    assert (settings.server.port, settings.server.workers) == (8100, 4)
    assert settings.server.allowed_hosts == ("hub.example.org",)
    assert settings.database.url == "postgresql://hub:p:w@db/hub"
    assert (settings.metrics.enabled, settings.metrics.path) == (True, "/prometheus")
    assert settings.storage.place == Bucket(
        name="runs", prefix="team", endpoint="https://s3.example.org", access_key="key", secret_key="of the file"
    )
    for secret in ("p:w", "of the file"):
        assert secret not in repr(settings)
        assert secret not in repr(settings.storage.place)


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    environment = {
        **PASSWORD,
        "SKYWARD_HUB_SERVER_PORT": "9000",
        "SKYWARD_HUB_SERVER_ALLOWED_HOSTS": "a.example,b.example",
        "SKYWARD_HUB_METRICS_ENABLED": "off",
        "SKYWARD_HUB_STORAGE_SECRET_KEY": "of the environment",
        "SKYWARD_HUB_TOKEN": "of a client on the same machine",
    }
    settings = read(tmp_path, FILE.replace("  secret_key_file: SECRET\n", ""), environment)
    assert settings.server.port == 9000
    assert settings.server.allowed_hosts == ("a.example", "b.example")
    assert not settings.metrics.enabled
    assert settings.storage.secret_key == "of the environment"


def test_the_environment_alone_is_enough() -> None:
    environment = {"SKYWARD_HUB_DATABASE_URL": "sqlite:////data/hub.db", "SKYWARD_HUB_STORAGE_FOLDER": "/data/blobs"}
    settings = read_settings(None, environment)
    assert settings.storage.place == Path("/data/blobs")
    assert settings.server.port == 8057


@pytest.mark.parametrize(
    ("text", "environment", "complaint"),
    [
        (FILE, {}, r"database\.url=\$\{DATABASE_PASSWORD\}: not in the environment; set DATABASE_PASSWORD"),
        (FILE.replace("SECRET", "/nowhere"), PASSWORD, r"storage\.secret_key_file: cannot be read"),
        (FILE.replace("workers: 4", "workers: many"), PASSWORD, r"server\.workers='many': not of type int"),
        (FILE.replace("workers", "wrokers"), PASSWORD, r"server\.wrokers=: no such key; choose one of \["),
        (FILE + "stream: {}\n", PASSWORD, r"stream=: no section of the configuration"),
        ("- a list", {}, "not a mapping; write sections"),
        ("a: [", {}, "cannot be read"),
        (FILE, {**PASSWORD, "SKYWARD_HUB_SERVER_PROT": "1"}, r"SKYWARD_HUB_SERVER_PROT=: no key of the configuration"),
        (FILE.replace("postgresql://hub:${DATABASE_PASSWORD}@db/hub", "sqlite:///x"), {}, "SQLite takes one process"),
        (FILE.replace("  secret_key_file: SECRET\n", ""), PASSWORD, r"storage\.secret_key=\*\*\*: goes with"),
    ],
)
def test_a_wrong_configuration_names_the_key_and_the_rule(
    tmp_path: Path, text: str, environment: dict[str, str], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint) as refused:
        read(tmp_path, text, environment)
    assert "p:w" not in str(refused.value)
