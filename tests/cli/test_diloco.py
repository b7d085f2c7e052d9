"""`skyward diloco`, with a server in this process, and as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from skyward.cli import main
from skyward.errors import UsageError
from skyward.training.diloco import DiLoCoServer
from skyward.training.diloco.client import DiLoCoClient
from skyward.training.diloco.report import WORKER_COLUMNS
from tests.training.diloco.runs import TOKEN, are_equal, make_model, serving, state_of, step, train, worker_of


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiLoCoServer]:
    with serving(make_model(), save_dir=tmp_path / "global") as server:
        monkeypatch.setenv("DILOCO_SERVER", server.address)
        monkeypatch.setenv("DILOCO_TOKEN", TOKEN)
        yield server


def said(capsys: pytest.CaptureFixture[str], *line: str, status: int = 0) -> str:
    assert main(["diloco", *line]) == status
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_an_operator_sees_saves_and_stops_a_server(
    server: DiLoCoServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with worker_of(server, make_model(), None, "a"):
        header, titles, row = said(capsys, "status").splitlines()
        assert header == "round 0, 1 worker, 31 parameters, saved in round 0"
        assert titles.split() == [title.upper() for title in WORKER_COLUMNS]
        assert row.split()[:8] == ["a", "trains", "-", "-", "3", "-", "-", "-"]
        assert json.loads(said(capsys, "status", "--json"))["workers"][0]["worker"] == "a"
        assert said(capsys, "kick", "a") == "a: evicted\n"
        assert "worker='a': is not present" in said(capsys, "kick", "a", status=1)
    assert said(capsys, "save") == f"saved: {tmp_path}/global/checkpoint-0\n"
    assert said(capsys, "stop") == "the server has saved, and ends\n"
    server.wait()


def test_an_operator_gives_a_worker_a_token_and_revokes_it(
    server: DiLoCoServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(capsys, "token", "list") == "no worker has a token of its own\n"
    script = "".join(said(capsys, "token", "add", "my laptop").splitlines(keepends=True)[1:])
    script += 'echo "$DILOCO_SERVER|$DILOCO_WORKER_ID|$DILOCO_TOKEN"'
    pasted = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    address, worker, token = pasted.strip().split("|")
    assert (address, worker) == (server.address, "my laptop")
    assert said(capsys, "token", "add", worker, status=1).startswith("skyward: worker='my laptop': has a token already")
    with worker_of(address, make_model(), None, worker, token=token):
        gone = "my laptop: its token is refused from now on, and it was evicted\n"
        assert said(capsys, "token", "revoke", worker) == gone
    assert said(capsys, "token", "list").splitlines() == ["WORKER     TOKEN", "my laptop  revoked"]
    monkeypatch.setenv("DILOCO_TOKEN", token)
    assert "the one of worker 'my laptop' was revoked" in said(capsys, "status", status=1)


def test_a_link_to_the_page_has_the_token_where_browsers_do_not_send_it(
    server: DiLoCoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    train(server, make_model(), "a", 3)
    assert "last round 0: loss -, outer gradient " in said(capsys, "status")
    assert said(capsys, "watch", "--page") == f"{server.address}/#token=a%20token%20for%20tests\n"
    refused = said(capsys, "watch", "--server", "pool://train", status=1)
    assert "runs in a pool's program, and only tasks of that pool reach it" in refused


def test_the_global_model_is_exported_from_a_server_and_from_its_saves(
    server: DiLoCoServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    train(server, model, "a", 3)
    file = tmp_path / "exported" / "model.safetensors"
    for source in ([], ["--save-dir", f"{tmp_path}/global"]):
        assert said(capsys, "export", f"{file.parent}", *source) == f"{file}\n"
        assert are_equal(safetensors.torch.load_file(file), state_of(model))
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        file.unlink()
    assert "has no save" in said(capsys, "export", f"{file.parent}", "--save-dir", f"{tmp_path}/none", status=1)


def test_the_global_model_is_evaluated_while_a_worker_trains(
    server: DiLoCoServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, evaluated = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    folder, averaged = tmp_path / "exported", state_of(model)
    with worker_of(server, model, optimizer, "a"):  # it synchronises after every third step
        for number in range(6):
            step(model, optimizer, number)
            if number % 3 == 2:
                averaged = state_of(model)
            for source in ([], ["--save-dir", f"{tmp_path}/global"]):
                said(capsys, "export", f"{folder}", *source)
                evaluated.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"), strict=False)
                assert are_equal(state_of(evaluated), averaged)  # without what the worker has done since
    assert server.status()["round"] == 2


def test_a_server_that_is_not_there_or_not_named_is_an_error(
    server: DiLoCoServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_TOKEN", "another")
    assert "token: is missing or wrong" in said(capsys, "status", status=1)
    monkeypatch.setenv("DILOCO_TOKEN", "of two\nlines")
    assert "token: has a line break" in said(capsys, "status", status=1)
    with pytest.raises(UsageError, match="answers HTTP status 404, as no DiLoCo server does"):
        DiLoCoClient(server.address, token=TOKEN).ask("/elsewhere")
    monkeypatch.delenv("DILOCO_TOKEN")
    assert "127.0.0.1:1 does not answer" in said(capsys, "status", "--server", "127.0.0.1:1", status=1)
    monkeypatch.delenv("DILOCO_SERVER")
    assert "server: none is named" in said(capsys, "status", status=1)


def test_a_number_of_workers_that_is_not_legal_starts_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["diloco", "serve", "--workers", "0"])
    assert "--workers: must be 1 or more, and is 0" in " ".join(capsys.readouterr().err.split())


def test_serve_prints_lines_to_paste_and_saves_when_it_is_ended(tmp_path: Path) -> None:
    """In a terminal of 60 columns without colours, and with its saves where a shell needs quotes."""
    folder = tmp_path / "of global models"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    command = [sys.executable, "-m", "skyward", "diloco", "serve", "--port", "0", "--save-dir", str(folder)]
    command += ["--quantization-bits", "4", "--token-for", "a", "--token-for", "b"]
    with subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command],  # as a script starts it with `&`
        env=environment | {"COLUMNS": "60", "TERM": "dumb"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(10)]
            script = "".join(line for line in lines if line.startswith("  export "))
            script += 'echo "$DILOCO_SERVER|$DILOCO_TOKEN_FILE|$DILOCO_WORKER_ID|$DILOCO_TOKEN"'
            pasted = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
            address, file, name, token = pasted.strip().split("|")
            assert (file, name) == (str(folder / "token"), "a")
            assert lines[6] == "Paste these lines where a trains:\n"
            with worker_of(address, make_model(), None, name, token=token) as worker:
                assert worker.force_sync()
            operator = DiLoCoClient(address, token=Path(file).read_text().strip())
            assert operator.ask("/tokens")["workers"] == {"a": True, "b": True}
            process.send_signal(signal.SIGTERM)
            shown, log = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, log
    assert lines[0].startswith("skyward diloco at http://127.0.0.1:")
    assert shown.splitlines()[-1] == f"round 1 is saved in {folder}"
    assert "round 0 closed: 1 deltas, 0 refused" in log
