"""The sender: everything arrives once and in order, whatever the hub does, and training never waits."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward import hub
from skyward.hub.client.sender import BATCH_S, COMMANDS_S
from skyward.hub.client.spool import logs_in
from tests.waiting import until

from .small_hub import TOKEN, SmallHub, small_hub


@pytest.fixture
def server() -> Iterator[SmallHub]:
    with small_hub() as made:
        hub.connect(made.url, TOKEN, "vision")
        yield made


def port_of(server: SmallHub) -> int:
    return int(server.url.rpartition(":")[2])


def test_a_run_arrives_once_and_in_order_and_its_folder_goes(server: SmallHub, spool: Path) -> None:
    with hub.start_run(run_name="first", experiment="digits") as run:
        run.log_params({"lr": 0.1})
        for step in range(1000):
            run.log_metrics({"loss": 1 / (step + 1)}, step=step)
        run.log_text("notes.txt", "all is well")
    assert server.points(run.id, "loss") == [(step, 1 / (step + 1)) for step in range(1000)]
    assert [record[0] for record in server.of(run.id) if record[0] != "m"] == ["run", "p", "a", "s"]
    assert list(server.blobs.values()) == [b"all is well"]
    assert server.headers[0]["X-Skyward-Project"] == "vision"
    assert not run.folder.exists()
    assert run.unsent == 0


def test_the_first_records_are_sent_at_once_and_later_ones_in_large_batches(server: SmallHub) -> None:
    run = hub.start_run()
    until(lambda: server.of(run.id, "run"))
    before, began = server.batches, time.monotonic()
    for step in range(30_000):
        run.log_metrics({"loss": 0.5}, step=step)
    lasted_s = time.monotonic() - began
    assert run.flush(60)
    assert len(server.points(run.id, "loss")) == 30_000
    assert server.batches - before < 40 + lasted_s / BATCH_S
    run.end()


def test_a_hub_that_is_away_comes_back_to_everything(
    spool: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.hub.client.sender.LONGEST_BACKOFF_S", 0.5)
    with small_hub() as first:
        hub.connect(first.url, TOKEN)
        run = hub.start_run()
        run.log_metrics({"loss": 1.0}, step=0)
        assert run.flush(60)
    with caplog.at_level(logging.INFO, "skyward.hub"):
        for step in range(1, 100):
            run.log_metrics({"loss": 1.0}, step=step)
        until(lambda: "does not answer" in caplog.text)
        assert not run.flush(0.3)
        with small_hub(port_of(first), first):
            assert run.flush(60)
            run.end()
        assert caplog.text.count("records wait in") == 1
        assert "answers again" in caplog.text
    assert [step for step, _ in first.points(run.id, "loss")] == list(range(100))


def test_close_says_what_is_unsent_and_where_and_sync_sends_it(spool: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_hub() as server:
        pass
    hub.connect(server.url, TOKEN)
    run = hub.start_run(run_name="late")
    run.log_metrics({"loss": 0.5}, step=1)
    run.log_text("notes.txt", "all is well")
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "skyward.hub"):
        run.end(timeout_s=1)
    assert time.monotonic() - began < 30  # it would wait for a minute by itself
    assert f"4 records are not sent yet. They are in {run.folder}" in caplog.text
    assert f"skyward hub sync {run.folder}" in caplog.text
    with pytest.raises(hub_unreachable()):
        hub.sync(spool)
    with small_hub(port_of(server), server):
        (synced,) = hub.sync(spool)
        assert (synced.run_id, synced.sent, synced.unsent) == (run.id, 4, 0)
        assert [record[0] for record in server.of(run.id)] == ["run", "m", "a", "s"]
        assert [each.sent for each in hub.sync(run.folder)] == [0]
    assert (run.folder / "files").is_dir()


def hub_unreachable() -> type[Exception]:
    from skyward.errors import HubUnreachable

    return HubUnreachable


def test_sync_of_a_folder_without_runs_says_so(server: SmallHub, tmp_path: Path) -> None:
    from skyward.errors import UsageError

    with pytest.raises(UsageError, match="has no run in it"):
        hub.sync(tmp_path)


def test_a_process_that_was_killed_is_finished_by_the_one_that_resumes_it(server: SmallHub, spool: Path) -> None:
    hub.connect("http://127.0.0.1:9", TOKEN)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.hub.client.writer"],
        stdout=subprocess.PIPE,
        env={**os.environ, "SKYWARD_HUB_URL": "http://127.0.0.1:9"},
    )
    assert process.stdout is not None
    run_id = process.stdout.readline().decode().strip()
    while process.stdout.readline() != b"100\n":
        pass
    process.kill()
    process.wait()
    process.stdout.close()

    hub.connect(server.url, TOKEN)
    with hub.start_run(resume=run_id) as run:
        run.cut(50)
        run.log_metrics({"loss": 0.5}, step=51)
    kinds = [record[0] for record in server.of(run_id)]
    assert kinds[0] == "run"
    at = kinds.index("cut")
    assert kinds[at - 2 : at] == ["run", "s"]
    assert kinds[at + 1 :] == ["m", "s"]
    assert [record[1] for record in server.of(run_id)[1 : at - 2]] == list(range(at - 3))
    assert at > 100
    assert not run.folder.exists()


def test_a_batch_whose_answer_was_lost_counts_once(server: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[str] = []

    def lose(path: str, body: bytes) -> tuple[int, str] | None:
        if path.endswith("/batches") and len(lost) < 3 and b'"m"' in body:
            import json

            lost.append(path)
            server.accept(path.split("/")[3], json.loads(body))
            return 503, "the answer is lost"
        return None

    server.refuse = lose
    with hub.start_run() as run:
        for step in range(100):
            run.log_metrics({"loss": 0.5}, step=step)
    assert len(lost) == 3
    assert [step for step, _ in server.points(run.id, "loss")] == list(range(100))


def test_a_hub_that_lost_its_last_records_gets_them_again(server: SmallHub) -> None:
    run = hub.start_run()
    for step in range(100):
        run.log_metrics({"loss": 0.5}, step=step)
    assert run.flush(60)
    with server.lock:  # as after a restore of its database
        ((key, _),) = server.accepted.items()
        server.accepted[key] = 11
        del server.records[run.id][11:]
    run.log_metrics({"loss": 0.5}, step=100)
    run.end()
    assert [step for step, _ in server.points(run.id, "loss")] == list(range(101))


def test_a_record_that_the_hub_refuses_does_not_hold_up_the_others(
    server: SmallHub, caplog: pytest.LogCaptureFixture
) -> None:
    server.refuse = lambda path, body: (400, "metrics['bad']: is bad; rename it") if b'"bad"' in body else None
    run = hub.start_run()
    for step in range(50):
        run.log_metrics({"bad" if step == 17 else "loss": 0.5}, step=step)
    assert run.flush(60)
    assert [step for step, _ in server.points(run.id, "loss")] == [step for step in range(50) if step != 17]
    assert "rename it" in caplog.text
    assert '"bad":0.5' in (run.folder / "refused.jsonl").read_text()
    run.end()


def test_a_wrong_token_loses_nothing_and_is_named(spool: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_hub() as server:
        hub.connect(server.url, "sky_1_wrong")
        run = hub.start_run()
        run.log_metrics({"loss": 0.5}, step=1)
        until(lambda: "token=...: is unknown" in caplog.text)
        run.end(timeout_s=1)
        assert "sky_1_wrong" not in caplog.text
        (synced,) = hub.sync(spool, url=server.url, token=TOKEN)
        assert synced.sent == 3


def test_heartbeats_go_on_while_nothing_is_logged(server: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.hub.client.active.HEARTBEAT_S", 0.2)
    run = hub.start_run()
    assert run.flush(60)
    before = server.batches
    until(lambda: server.batches >= before + 3)
    run.end()


def test_commands_arrive_within_two_seconds_and_are_acknowledged(server: SmallHub) -> None:
    assert COMMANDS_S <= 1.0
    run = hub.start_run()
    told: list[Any] = []
    arrived = threading.Event()

    def take(commands: Any) -> None:
        told.extend((command.number, command.action) for command in commands)
        arrived.set()

    run.take_commands(take)
    assert run.flush(60)
    server.command(run.id, 7, "save")
    assert arrived.wait(60)
    assert told[0] == (7, "save")
    run.acknowledge(7, "saved")
    until(lambda: server.of(run.id, "ack") == [["ack", 7, "saved"]])
    run.end()


def test_logging_never_waits_for_a_hub_that_hangs(spool: Path) -> None:
    with small_hub() as server:
        gate = threading.Event()

        def hang(path: str, body: bytes) -> None:
            gate.wait(60)

        server.refuse = hang
        hub.connect(server.url, TOKEN)
        run = hub.start_run()
        took = []
        for step in range(2000):
            began = time.perf_counter()
            run.log_metrics({"loss": 0.5}, step=step)
            took.append(time.perf_counter() - began)
        assert sorted(took)[1000] < 0.001
        gate.set()
        run.end(timeout_s=60)
        assert len(server.points(run.id, "loss")) == 2000


def test_a_forked_worker_logs_to_the_run_and_its_rest_is_sent_by_the_parent(server: SmallHub) -> None:
    run = hub.start_run()
    run.log_metrics({"parent": 0.0}, step=0)
    pid = os.fork()
    if pid == 0:
        try:
            for step in range(100):
                run.log_metrics({"child": float(step)}, step=step)
        finally:
            os._exit(0)  # at once: its sender has had no time
    os.waitpid(pid, 0)
    run.end()
    assert [step for step, _ in server.points(run.id, "child")] == list(range(100))
    assert [record[1] for record in server.of(run.id, "s")] == ["completed"]
    assert not logs_in(run.folder)
