"""Facts that a server keeps for people, from workers that train."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

from skyward.training.diloco import DiLoCoServer
from skyward.training.diloco.facts import MOST_HOST_LETTERS, RoundFacts, ServerFacts, WorkerRound
from tests.training.diloco.runs import make_model, serving, step, together, worker_of


def closed(number: int, *workers: str) -> RoundFacts:
    part = WorkerRound(loss=0.1 * number, norm=1.0, cosine=0.123456789, staleness=0, is_counted=True)
    parts = dict.fromkeys(workers, part)
    return RoundFacts(round=number, fragment=0, seconds=None, loss=None, gradient_norm=1.0, workers=parts)


def test_the_last_rounds_are_kept_and_no_more() -> None:
    facts = ServerFacts(kept=3)
    for number in range(5):
        facts.close(closed(number, "a"))
    assert [entry["round"] for entry in facts.since(0)] == [2, 3, 4]
    assert [entry["round"] for entry in facts.since(4)] == [4]
    last = facts.last()
    assert last is not None
    assert last["workers"]["a"]["cosine"] == 0.123457


def test_figures_are_finite_numbers_of_workers_that_are_present() -> None:
    facts = ServerFacts()
    facts.hear("a", {"steps_per_second": 2.0, "loss": float("nan"), "name": "a", "is_fast": True, "deep": {}})
    facts.hear("b", {f"figure_{number}": number for number in range(100)})
    facts.count_traffic("a", received=7)
    facts.count_traffic("b", sent=5)
    facts.hear("a", {}, host="gpu-1" * 100)
    own = facts.of_worker("a")
    assert len(own.pop("host")) == MOST_HOST_LETTERS
    assert own == {"steps_per_second": 2.0, "received_bytes": 7, "sent_bytes": 0}
    assert len(facts.of_worker("b")) < 50
    facts.keep(["b"])
    assert facts.of_worker("a") == {"host": "", "received_bytes": 0, "sent_bytes": 0}
    assert facts.speed("a") == 0.0
    assert facts.traffic == {"received_bytes": 7, "sent_bytes": 5}


def test_a_worker_tells_its_machine_and_its_settings_when_it_joins() -> None:
    """The status need not wait for its first heartbeat, or its first delta."""
    model = make_model()
    with serving(make_model()) as server, worker_of(server, model, None, "a", sync_every=40, quantization_bits=4):
        (own,) = server.status()["workers"]
    told = {"host": socket.gethostname(), "gpus": torch.cuda.device_count(), "sync_every": 40, "bits": 4, "dylu": 0}
    assert own.items() >= told.items()


def train(server: DiLoCoServer, name: str, *, spoils: bool = False, **options: Any) -> None:
    """Take two rounds of three steps, and count the losses. One that spoils has a NaN in its second delta."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with worker_of(server, model, optimizer, name, **options) as worker:
        for number in range(6):
            if spoils and number == 5:
                with torch.no_grad():
                    next(model.parameters()).fill_(float("nan"))
            worker.count_loss(torch.tensor(float(number)) if name == "a" else 2.0 * number)
            step(model, optimizer, number, data_seed=ord(name))


def test_a_server_knows_losses_norms_and_angles_of_its_rounds() -> None:
    with serving(make_model(), num_workers=2) as server:
        together(lambda: train(server, "a"), lambda: train(server, "b", spoils=True))
        first, second = server.history()
        total = server.status()
    assert (first["round"], first["seconds"], first["loss"]) == (0, None, (1.0 + 2.0) / 2)
    assert first["gradient_norm"] > 0
    assert {name: part["loss"] for name, part in first["workers"].items()} == {"a": 1.0, "b": 2.0}
    # The workers have other data and one model, so they agree, but not wholly.
    assert all(0 < part["cosine"] < 1 for part in first["workers"].values())
    assert second["seconds"] > 0
    assert second["loss"] == 4.0  # the mean of those that count
    refused = second["workers"]["b"]
    assert (refused["is_counted"], refused["norm"], refused["cosine"]) == (False, None, None)
    assert second["workers"]["a"]["cosine"] == pytest.approx(1.0, abs=1e-5)  # the mean is its own delta
    assert total["received_bytes"] > 0
    assert total["sent_bytes"] > 0


def test_a_worker_without_heartbeats_shows_speed_steps_and_traffic() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with serving(make_model()) as server, worker_of(server, model, optimizer, "a", sync_every=2):
        for number in range(2):
            step(model, optimizer, number)
        (row,) = server.status()["workers"]
    assert (row["local_step"], row["sync_every"], row["staleness"]) == (2, 2, 0)
    assert row["steps_per_second"] > 0
    assert row["loss"] is None
    assert row["received_bytes"] > 4 * 31  # a delta in float32
    assert row["sent_bytes"] > 2 * 4 * 31  # the first parameters, and an answer
    assert row["silent_s"] >= 0


def test_an_asynchronous_round_is_compared_with_the_momentum() -> None:
    with serving(make_model(), async_mode=True, dn_buffer_size=1) as server:
        train(server, "a")
        first, second = server.history()
    assert first["workers"]["a"]["cosine"] is None  # there was no momentum yet
    assert 0 < second["workers"]["a"]["cosine"] < 1
    assert (first["workers"]["a"]["staleness"], second["loss"]) == (0, 4.0)
