"""News of jobs on a real server: submitted on the command line, delivered, and shown."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from skyward import hub
from skyward.cli import main
from skyward.hub.http.settings import local_settings
from skyward.testing.hub import HubServer
from tests.hub.services.jobs.receiver import Receiver
from tests.waiting import until


def test_news_of_a_job_reaches_a_webhook_and_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    receiver = Receiver()
    settings = local_settings(tmp_path, port=0, hosts=[receiver.host])
    try:
        with HubServer(tmp_path, settings=settings) as server:
            monkeypatch.setenv("SKYWARD_HUB_URL", server.url)
            monkeypatch.setenv("SKYWARD_HUB_TOKEN", server.token)
            monkeypatch.setattr("sys.stdin", io.StringIO("whsec_c2VjcmV0\n"))
            hub.disconnect()
            assert main(["hub", "secret", "set", "LAB", "--data", str(tmp_path)]) == 0
            assert main(["hub", "secret", "list", "--data", str(tmp_path)]) == 0
            assert capsys.readouterr().out == "LAB\n"
            url = f"http://{receiver.host}/hook"
            options = ["--hold", "--notify", url, "--notify-secret", "LAB", "--notify-wait", "2h"]
            assert main(["job", "submit", *options, "--", "true"]) == 0
            job = capsys.readouterr().out.strip()
            assert main(["job", "cancel", job]) == 0
            until(lambda: receiver.requests)
            until(lambda: "cancelled  127.0.0.1  1" in _shown(job, capsys))
            assert main(["job", "submit", "--notify", "https://elsewhere.test/", "--", "true"]) == 1
            assert "notify.secret: missing; name the secret" in capsys.readouterr().err
            assert main(["hub", "secret", "remove", "LAB", "--data", str(tmp_path)]) == 0
    finally:
        receiver.close()


def _shown(job: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["job", "show", job]) == 0
    return capsys.readouterr().out
