"""Tokens of single workers, over real HTTP: what each may do, and that it may not once it is revoked."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from skyward.errors import UsageError
from skyward.training.diloco import DiLoCoServer, DiLoCoWorker
from skyward.training.diloco.client import DiLoCoClient
from skyward.training.diloco.rounds import UpdateKey
from skyward.training.diloco.tokens import ServerTokens
from tests.training.diloco.runs import TOKEN, are_equal, make_model, serving, state_of, together, train, worker_of
from tests.waiting import until

JOIN = {"worker": "paris", "session": "session of paris"}


def members(server: DiLoCoServer) -> list[str]:
    return sorted(worker["worker"] for worker in server.status()["workers"])


def test_workers_train_together_with_a_token_for_each() -> None:
    models = {"berlin": make_model(), "paris": make_model()}
    with serving(None, 2) as server:
        tokens = {worker: server.add_token(worker) for worker in models}
        assert server.tokens == {"berlin": True, "paris": True}
        together(
            *(lambda worker=worker: train(server, models[worker], worker, 6, token=tokens[worker]) for worker in models)
        )
        assert server.status()["round"] == 2
    assert are_equal(state_of(models["berlin"]), state_of(models["paris"]))


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.ask("/join", JOIN),
        lambda client: client.ask("/leave", JOIN),
        lambda client: client.ask("/heartbeat", JOIN),
        lambda client: client.parameters("paris"),
        lambda client: client.submit(UpdateKey(worker="paris", base_round=0, number=0), "of paris", [memoryview(b"")]),
        lambda client: client.answer(UpdateKey(worker="paris", base_round=0, number=0), "of paris", wait_s=0),
    ],
    ids=["join", "leave", "heartbeat", "parameters", "submit", "answer"],
)
def test_the_token_of_a_worker_does_not_speak_for_another(ask: Callable[[DiLoCoClient], object]) -> None:
    with serving(make_model()) as server, worker_of(server, make_model(), None, "paris"):
        client = DiLoCoClient(server.address, token=server.add_token("berlin"))
        with pytest.raises(UsageError, match=r"worker='paris': the token is that of worker 'berlin'; set worker_id="):
            ask(client)
        assert members(server) == ["paris"]
        assert [worker["worker"] for worker in client.ask("/status")["workers"]] == ["paris"]


def test_a_worker_takes_its_name_from_the_pasted_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_WORKER_ID", "berlin")
    assert DiLoCoWorker(make_model(), None, "127.0.0.1:1", token=TOKEN).worker_id == "berlin"
    assert DiLoCoWorker(make_model(), None, "127.0.0.1:1", token=TOKEN, worker_id="rome").worker_id == "rome"


def test_the_token_of_a_worker_reads_and_does_not_manage(tmp_path: Path) -> None:
    with serving(make_model(), save_dir=tmp_path) as server, worker_of(server, make_model(), None, "paris"):
        client = DiLoCoClient(server.address, token=server.add_token("berlin"))
        for path in ("control/save", "control/kick", "control/stop", "tokens/add", "tokens/revoke"):
            with pytest.raises(UsageError, match="that of worker 'berlin' exchanges deltas only; use the operator's"):
                client.ask(f"/{path}", {"worker": "paris"})
        with pytest.raises(UsageError, match="use the operator's token"):
            client.ask("/tokens")
        assert client.ask("/history")["rounds"] == []
        assert client.parameters() is not None
        assert members(server) == ["paris"]
        assert server.tokens == {"berlin": True}


def test_a_revoked_worker_leaves_its_round_and_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    """The other worker's round ends without it, and its own training goes on alone."""
    with serving(make_model(), 2) as server, worker_of(server, make_model(), None, "paris") as other:
        token = server.add_token("berlin")
        with worker_of(server, make_model(), None, "berlin", token=token) as revoked:
            assert members(server) == ["berlin", "paris"]
            assert server.revoke_token("berlin")
            assert members(server) == ["paris"]
            assert other.force_sync()
            with caplog.at_level(logging.ERROR):
                assert not revoked.force_sync()
        assert "token: the one of worker 'berlin' was revoked; ask the server's operator for a new one" in caplog.text
        with pytest.raises(UsageError, match="was revoked"):
            worker_of(server, make_model(), None, "berlin", token=token).start()
        assert server.tokens == {"berlin": False}
        client = DiLoCoClient(server.address, token=server.add_token("berlin"))
        client.ask("/join", {"worker": "berlin", "session": "of another process"})
        assert members(server) == ["berlin", "paris"]


def test_a_worker_that_waits_for_its_round_hears_of_the_revocation(caplog: pytest.LogCaptureFixture) -> None:
    with serving(make_model(), 2) as server, worker_of(server, make_model(), None, "paris"):
        with worker_of(server, make_model(), None, "berlin", token=server.add_token("berlin")) as revoked:

            def revoke() -> None:
                client = DiLoCoClient(server.address, token=TOKEN)
                waits = {"worker": "berlin", "is_awaited": False}
                until(lambda: waits.items() <= client.ask("/status")["workers"][-1].items())
                assert client.ask("/tokens/revoke", {"worker": "berlin"}) == {"was_present": True}

            together(lambda: revoked.force_sync() and pytest.fail("it was revoked"), revoke)
        assert "the one of worker 'berlin' was revoked" in caplog.text
        assert members(server) == ["paris"]


def test_a_join_on_its_way_when_the_token_is_revoked_adds_no_member() -> None:
    """The server asks for the body once it has checked the token. Only then is the token revoked."""
    with serving(make_model()) as server:
        body = json.dumps({"worker": "berlin", "session": "of berlin"}).encode()
        head = [
            "POST /join HTTP/1.1",
            "Host: server",
            f"Authorization: Bearer {server.add_token('berlin')}",
            f"Content-Length: {len(body)}",
            "Expect: 100-continue",
            "Connection: close",
        ]
        with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2])), timeout=60) as line:
            line.sendall("\r\n".join([*head, "", ""]).encode())
            answer = line.makefile("rb")
            assert answer.readline().startswith(b"HTTP/1.1 100 ")
            server.revoke_token("berlin")
            line.sendall(body)
            assert b"HTTP/1.1 401 " in answer.read()
        assert members(server) == []


def test_tokens_outlast_the_server_as_hashes(tmp_path: Path) -> None:
    folder = tmp_path / "global"
    with serving(make_model(), save_dir=folder) as server:
        tokens = {worker: server.add_token(worker) for worker in ("berlin", "paris")}
        server.revoke_token("paris")
    file = folder / "worker_tokens.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert not any(token in file.read_text() for token in tokens.values())
    with serving(make_model(), save_dir=folder) as server:
        train(server, make_model(), "berlin", 3, token=tokens["berlin"])
        with pytest.raises(UsageError, match="the one of worker 'paris' was revoked"):
            DiLoCoClient(server.address, token=tokens["paris"]).ask("/status")


def test_names_and_files_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    tokens = ServerTokens("the operator's", tmp_path)
    tokens.issue("berlin")
    with pytest.raises(UsageError, match="worker='berlin': has a token already; revoke that one first"):
        tokens.issue("berlin")
    for name in ("", " ", "two\nlines", "long" * 100):
        with pytest.raises(UsageError, match="is no name; use 1 to 200 printable characters"):
            tokens.issue(name)
    with pytest.raises(UsageError, match="worker='paris': has no token; see `skyward diloco token list`"):
        tokens.revoke("paris")
    for text in ("{", "[]", json.dumps({"berlin": "text"})):
        (tmp_path / "worker_tokens.json").write_text(text)
        with pytest.raises(UsageError, match=r"worker_tokens.json cannot be read: .*; restore the file, or delete it"):
            ServerTokens("the operator's", tmp_path)
    assert not ServerTokens("the operator's", "s3://bucket/global").are_kept
