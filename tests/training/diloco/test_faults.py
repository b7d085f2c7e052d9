"""Servers and workers on loopback: what faults cost."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.errors import UsageError
from skyward.training.diloco import DiLoCoServer, DiLoCoWorker, worker
from skyward.training.diloco.client import DiLoCoClient
from skyward.training.diloco.frames import decode, encode, size_of
from skyward.training.diloco.rounds import UpdateKey
from skyward.training.diloco.tensors import exchanged, to_wire
from tests.ssh.server import free_port
from tests.training.diloco.lossy_line import ANSWER, LossyLine
from tests.training.diloco.runs import (
    TOKEN,
    are_equal,
    make_model,
    serving,
    state_of,
    step,
    together,
    train,
    worker_of,
)
from tests.waiting import until

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(worker, "MOST_PAUSE_S", 0.5)


def port_of(server: DiLoCoServer) -> int:
    return int(server.address.rpartition(":")[2])


def trained(rounds: int) -> dict[str, torch.Tensor]:
    model = make_model()
    with serving(make_model()) as server:
        train(server, model, "a", 3 * rounds)
    return state_of(model)


def test_a_delta_counts_once_wherever_its_connection_breaks() -> None:
    """In the request's head, in each part of the frame, and after the server has it all."""
    frame = b"".join(encode(to_wire(exchanged(make_model())), {}))
    data = 8 + int.from_bytes(frame[:8], "little")
    cuts = [-30, -1, 0, 1, 7, 8, data - 1, data, data + 1, len(frame) - 1, ANSWER, ANSWER]
    rounds = len(cuts)  # each takes one cut or more: how many depends on what the server has kept of those before
    model = make_model()
    with serving(make_model()) as server:
        with LossyLine(port_of(server), request="PUT /updates", cuts=cuts) as line:
            train(line.address, model, "a", 3 * rounds, max_sync_retries=rounds)
            assert line.cuts == []
        assert server.status()["round"] == rounds
    assert are_equal(state_of(model), trained(rounds))


def test_an_upload_that_breaks_goes_on_where_it_stopped() -> None:
    model = torch.nn.Linear(1000, 1000)
    size = size_of(encode(to_wire(exchanged(model)), {"figures": "{}"}))
    cuts = [size // 4, size // 2 - size // 4, size // 8, ANSWER]  # of what each request brings
    with serving(torch.nn.Linear(1000, 1000)) as server:
        with (
            LossyLine(port_of(server), request="PUT /updates", cuts=cuts) as line,
            worker_of(line.address, model, None, "a", max_sync_retries=len(cuts)) as worker,
        ):
            assert worker.force_sync()
            assert line.cuts == []
            (entry,) = server.status()["workers"]
            sent = 1e6 * worker.sync_metrics["diloco/last_send_mb"]
        assert server.status()["round"] == 1
    assert entry["received_bytes"] == sent  # each byte once


def test_a_worker_that_is_evicted_in_its_upload_tries_again() -> None:
    frame = b"".join(encode(to_wire(exchanged(make_model())), {}))
    with serving(make_model(), num_workers=2) as server:
        client = DiLoCoClient(server.address, token=TOKEN)
        for name in "ab":
            client.ask("/join", {"worker": name, "session": name, "base_round": 0})
        late = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=60)
        late.putrequest("PUT", "/updates?worker=a&session=a&base_round=0&number=1&upload=x&offset=0")
        late.putheader("Authorization", f"Bearer {TOKEN}")
        late.putheader("Content-Length", str(len(frame)))
        late.endheaders()
        late.send(frame[:20])
        query = "/updates?worker=a&session=a&base_round=0&number=1&upload=x"
        until(lambda: client.ask(query)["received"] == 20)
        client.ask("/control/kick", {"worker": "a"})
        client.submit(UpdateKey(worker="b", base_round=0, number=1), "b", [memoryview(frame)], upload="y")
        late.send(frame[20:])
        assert late.getresponse().status == 503  # so the worker asks again, and joins
        late.close()
        assert server.status()["round"] == 1


IN_VAIN = 3
"""Attempts that carry no byte of a frame, in the test below. More retries are not needed for the many that do."""


def trained_over(
    request: str, cut: Callable[[bytes], list[int]], **options: Any
) -> tuple[dict[str, torch.Tensor], bytes, bytes]:
    """Train twice for a round, over lines that do not break, and that break in answers to some requests.

    Args:
        request: Beginning of these requests.
        cut: Function that returns where their answers break, by a frame that came whole.
        options: Options of the server.

    Returns:
        The parameters, the frame that came whole, and the bytes of the one that did not.
    """
    model = make_model()
    with serving(make_model(), **options) as server:
        with LossyLine(port_of(server), request=request) as whole:
            train(whole.address, model, "a", 3)
        cuts = cut(whole.bodies[0])
        with LossyLine(port_of(server), request=request, answer_cuts=cuts) as line:
            train(line.address, model, "a", 3, max_sync_retries=IN_VAIN)
        assert line.answer_cuts == []
        assert server.status()["round"] == 2
    return state_of(model), whole.bodies[0], b"".join(line.bodies)


@pytest.mark.parametrize(
    ("request_cut", "options"), [("GET /parameters", {}), ("GET /answers", {"quantization_bits": 4})]
)
def test_each_byte_of_a_frame_comes_once_wherever_its_connection_breaks(
    request_cut: str, options: dict[str, int]
) -> None:
    """In the head of the answer, and in each part of the frame."""

    def cuts(frame: bytes) -> list[int]:
        data = 8 + int.from_bytes(frame[:8], "little")
        ends = [0, 1, 7, 8, data - 1, data, data + 1, len(frame) - 1]
        return [-30, -1, *(end - before for before, end in itertools.pairwise([0, *ends]))]  # each brings the rest

    expected, _, _ = trained_over(request_cut, lambda _: [], **options)
    state, whole, in_parts = trained_over(request_cut, cuts, **options)
    assert len(in_parts) == len(whole)
    assert decode(in_parts).arrays.keys() == decode(whole).arrays.keys()
    assert are_equal(state, expected)


def test_an_answer_that_is_lost_is_fetched_again() -> None:
    model = make_model()
    with serving(make_model()) as server:
        with LossyLine(port_of(server), request="GET /answers", cuts=[ANSWER, ANSWER]) as line:
            train(line.address, model, "a", 6)
            assert line.cuts == []
        assert server.status()["round"] == 2
    assert are_equal(state_of(model), trained(2))


ROUNDS = 6


def has_saved(folder: Path, rounds: int) -> bool:
    """Return whether a server has saved that many rounds, and has begun with the next save."""
    names = os.listdir(folder) if folder.exists() else []
    newest = max((int(name.rpartition("-")[2]) for name in names if name.startswith("checkpoint-")), default=-1)
    return newest > rounds or (newest == rounds and any(name.startswith(".tmp-") for name in names))


@contextmanager
def serve_process(port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    code = f"""
import sys
from skyward.training.diloco import DiLoCoServer
from tests.training.diloco.runs import TOKEN
with DiLoCoServer(None, 2, port={port}, token=TOKEN, save_dir={str(folder)!r}, heartbeat_timeout=0) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""
    server = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline()
        yield server
    finally:
        server.kill()
        server.communicate()


def test_a_server_that_is_killed_while_it_saves_costs_nothing(tmp_path: Path) -> None:
    """Two workers train on one after another server. Each is killed when a save has begun."""
    port = free_port()
    models = [make_model(), make_model()]
    address = f"127.0.0.1:{port}"
    workers = [
        threading.Thread(
            target=train,
            args=(address, models[n], str(n), 3 * ROUNDS),
            kwargs={"data_seed": n, "max_sync_retries": 1000, "timeout": 200},
        )
        for n in (0, 1)
    ]
    for saved in (0, 2):
        with serve_process(port, tmp_path) as server:
            for thread in workers:
                if thread.ident is None:
                    thread.start()
            until(partial(has_saved, tmp_path, saved))
            server.send_signal(signal.SIGKILL)
            server.wait()
    with serve_process(port, tmp_path):
        for thread in workers:
            thread.join(200)
            assert not thread.is_alive()
    expected = [make_model(), make_model()]
    with serving(None, num_workers=2) as unharmed:
        together(*(partial(train, unharmed, expected[n], str(n), 3 * ROUNDS, data_seed=n) for n in (0, 1)))
    assert are_equal(state_of(models[0]), state_of(expected[0]))
    assert are_equal(state_of(models[1]), state_of(expected[1]))


def test_fewer_workers_than_min_workers_end_no_round(caplog: pytest.LogCaptureFixture) -> None:
    with serving(make_model(), num_workers=2, min_workers=2) as server:
        lone = worker_of(server, make_model(), None, "lone", timeout=5)
        lone.start()
        assert not lone.force_sync()
        assert "worker lone trains on without synchronisation" in caplog.text
        assert server.status()["round"] == 0
        train(server, make_model(), "other", 3)
        assert server.status()["round"] == 1
        until(lone.force_sync)  # the answer that it did not wait for
        assert not lone.force_sync()  # this delta waits when the server stops, and leaves no file open


def test_the_last_worker_ends_at_once_when_the_others_have_ended(caplog: pytest.LogCaptureFixture) -> None:
    """One more round is to come, and `min_workers=2` would let the worker wait for its whole timeout."""
    with serving(make_model(), num_workers=2, min_workers=2) as server:
        first = worker_of(server, make_model(), None, "first")
        last = worker_of(server, make_model(), None, "last", timeout=10_000.0)
        first.start()
        last.start()

        def end_first() -> None:
            until(lambda: [w["worker"] for w in server.status()["workers"] if w["is_awaited"]] == ["first"])
            first.finish()
            first.stop()

        together(end_first, lambda: last.force_sync() and pytest.fail("nobody was left"))
        assert "worker last trains on without synchronisation: round 0: the other workers have ended" in caplog.text
        assert server.status()["round"] == 0
        train(server, make_model(), "new", 3)
        assert last.force_sync()  # its delta was not lost
        last.stop()


def test_a_worker_that_is_evicted_keeps_its_delta_for_its_round() -> None:
    """A worker that was silent comes back while its round is open: nothing of its work is lost."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with serving(make_model(), num_workers=1) as server, worker_of(server, model, optimizer, "a") as late:
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        assert DiLoCoClient(server.address, token=TOKEN).ask("/control/kick", {"worker": "a"}) == {"was_present": True}
        assert server.status()["workers"] == []
        step(model, optimizer, 2)
        assert late.sync_metrics["diloco/reconnections"] == 1
        assert server.status()["round"] == 1
    assert are_equal(state_of(model), trained(1))


def test_a_worker_that_dies_is_evicted_and_the_round_goes_on() -> None:
    models = [make_model(), make_model()]
    with serving(make_model(), num_workers=2, heartbeat_timeout=5.0) as server:
        dead = worker_of(server, models[1], None, "dead")
        dead.start()  # it has no heartbeat, and says nothing from now on
        train(server, models[0], "a", 3, heartbeat_interval=0.1)
        assert server.status()["round"] == 1
        assert dead.force_sync()  # what it had trained is lost, and it goes on from the others' parameters
    assert are_equal(state_of(models[0]), state_of(models[1]))


STOPPED_WORKER = """
import sys, time
true_time = time.time
time.time = lambda: true_time() - 3600  # its clock is an hour late

import torch
from tests.training.diloco.runs import make_model, state_of, step, worker_of

model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with worker_of(sys.argv[1], model, optimizer, "stopped", heartbeat_interval=0.1) as worker:
    for number, line in enumerate(sys.stdin):
        step(model, optimizer, number)
        print(state_of(model)["2.weight"].tolist(), flush=True)
"""


def test_a_worker_that_was_stopped_for_two_rounds_goes_on_from_those_of_the_others() -> None:
    """The round loses its own inner steps, and none of them counts in a later one."""
    model = make_model()
    with (
        serving(make_model(), heartbeat_timeout=2.0) as server,
        subprocess.Popen(
            [sys.executable, "-c", STOPPED_WORKER, server.address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        commands, weights = process.stdin, process.stdout
        assert commands is not None
        assert weights is not None

        def train_it(steps: int) -> object:
            commands.write("\n" * steps)
            commands.flush()
            return [json.loads(weights.readline()) for _ in range(steps)][-1]

        try:
            train_it(steps=2)
            process.send_signal(signal.SIGSTOP)
            train(server, model, "a", 6, heartbeat_interval=0.1)
            assert server.status()["round"] == 2
            process.send_signal(signal.SIGCONT)
            assert train_it(steps=1) == state_of(model)["2.weight"].tolist()
            train_it(steps=3)
            assert server.status()["round"] == 3
            commands.close()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_worker_resumes_from_its_checkpoint_to_the_bit() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with serving(make_model()) as server, LossyLine(port_of(server), request="GET /answers") as line:
        first = worker_of(server, model, optimizer, "a")
        first.start()
        for number in range(4):
            step(model, optimizer, number)
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}, first.state_dict()
        step(model, optimizer, 4)
        step(model, optimizer, 5)  # this round is closed when the worker is killed
        resumed = make_model(1)
        resumed.load_state_dict(saved[0])
        optimizer = torch.optim.SGD(resumed.parameters(), lr=0.05)
        second = worker_of(line.address, resumed, optimizer, "a")
        second.load_state_dict(json.loads(json.dumps(saved[1])))
        with second:
            assert "GET /answers" not in line.begun  # it only asks whether its update has arrived
            for number in range(4, 9):
                step(resumed, optimizer, number)
        assert server.status()["round"] == 3
    assert are_equal(state_of(resumed), trained(3))


@pytest.mark.parametrize("token", ["another", "no ascii: ä", ""])
def test_a_wrong_token_is_refused(token: str) -> None:
    with serving(make_model()) as server:
        request = urllib.request.Request(f"{server.address}/status", headers={"Authorization": f"Bearer {token}"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        refused.value.close()
        assert refused.value.code == 401


def test_a_server_that_starts_again_has_its_token(tmp_path: Path) -> None:
    folder = tmp_path / "global"
    first = DiLoCoServer(make_model(), save_dir=folder).token
    assert DiLoCoServer(make_model(), save_dir=folder).token == first
    assert DiLoCoServer(make_model(), save_dir=folder, token="given").token == "given"
    assert DiLoCoServer(make_model(), save_dir=folder).token == first
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    assert DiLoCoServer(make_model()).token != first
    (folder / "token").write_text("")
    with pytest.raises(UsageError, match="token is empty; delete it"):
        DiLoCoServer(make_model(), save_dir=folder)


def test_a_frame_over_the_limit_is_refused() -> None:
    with serving(make_model()) as server, worker_of(server, make_model(), None, "a") as worker_a:
        client = DiLoCoClient(server.address, token=TOKEN)
        key = UpdateKey(worker="a", base_round=0, number=9)
        session = worker_a.state_dict()["session"]
        with pytest.raises(UsageError, match="more than the model"):
            client.submit(key, session, [memoryview(bytes(2**24))] * 2)
        assert client.ask("/status")["round"] == 0


def test_no_encryption_beyond_loopback_is_refused() -> None:
    with pytest.raises(UsageError, match=r"host='0.0.0.0': other machines reach it, and cert=None"):
        DiLoCoServer(make_model(), host="0.0.0.0")
    with pytest.raises(UsageError, match="without encryption"):
        DiLoCoWorker(make_model(), None, "10.0.0.1:8512")


def test_a_save_of_another_model_is_refused(tmp_path: Path) -> None:
    with serving(make_model(), save_dir=tmp_path):
        pass
    with pytest.raises(UsageError, match="the save is of another one"):
        DiLoCoServer(torch.nn.Linear(2, 2), save_dir=tmp_path)
