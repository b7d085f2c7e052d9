"""Servers and workers on loopback: what they compute."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyward.errors import UsageError
from skyward.training.diloco import DiLoCoWorker, OuterSGD
from skyward.training.diloco.export import MODEL_FILE, export_model, saved_model
from tests.training.diloco.lossy_line import ANSWER, LossyLine
from tests.training.diloco.runs import TOKEN, are_equal, make_model, serving, state_of, step, together, train, worker_of


def averaging() -> OuterSGD:
    return OuterSGD(lr=1.0, momentum=0.0, nesterov=False)


def test_equal_workers_equal_one_to_the_bit() -> None:
    with serving(make_model()) as server:
        alone = make_model(1)
        train(server, alone, "alone", 9)
    models = [make_model(seed) for seed in (1, 2)]
    with serving(make_model(), num_workers=2) as server:
        together(
            *(
                lambda name=name, model=model: train(server, model, name, 9)
                for name, model in zip("ab", models, strict=True)
            )
        )
        assert server.status()["round"] == 3
    assert are_equal(state_of(models[0]), state_of(models[1]))
    assert are_equal(state_of(models[0]), state_of(alone))


def test_averaging_gives_the_mean_of_parameters_and_buffers() -> None:
    models = [make_model(), make_model()]
    with serving(make_model(), num_workers=2, outer_optimizer=averaging()) as server:
        together(*(partial(train, server, models[n], str(n), 3, data_seed=n) for n in (0, 1)))
    expected = []
    for n in (0, 1):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for number in range(3):
            step(model, optimizer, number, n)
        expected.append(state_of(model))
    for name, tensor in state_of(models[0]).items():
        torch.testing.assert_close(tensor, (expected[0][name] + expected[1][name]) / 2)
    assert are_equal(state_of(models[0]), state_of(models[1]))


def test_averaging_after_each_step_is_exact() -> None:
    """H=1, rate 1, no momentum: the mean of the workers' parameters to the bit. No sum of eighths rounds."""
    changes = torch.randint(-64, 64, (2, 5, 4), generator=torch.Generator().manual_seed(0)) / 8
    models = [torch.nn.Linear(4, 1, bias=False) for _ in changes]
    first = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(first.weight)

    def change(n: int) -> None:
        with worker_of(server, models[n], None, str(n), sync_every=1) as worker:
            for by in changes[n]:
                with torch.no_grad():
                    models[n].weight += by
                worker.count_step()

    with serving(first, num_workers=2, outer_optimizer=averaging()) as server:
        together(*(partial(change, n) for n in (0, 1)))
        assert server.status()["round"] == 5
    for model in models:
        assert model.weight[0].tolist() == changes.mean(0).sum(0).tolist()


def test_answers_in_bfloat16_keep_all_workers_equal_to_the_bit() -> None:
    models = [make_model(), make_model()]
    with serving(make_model(), num_workers=2, bf16_answers=True) as server:
        together(*(partial(train, server, models[n], str(n), 9, data_seed=n, bf16_comm=True) for n in (0, 1)))
        late = make_model()
        with worker_of(server, late, None, "late"):
            assert are_equal(state_of(late), state_of(models[0]))
    assert are_equal(state_of(models[0]), state_of(models[1]))


def test_the_first_worker_brings_the_model_and_tied_weights_travel_once() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(4, 4, bias=False)
            self.two = torch.nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight

    model = Tied()
    before = model.one.weight.detach().clone()
    with serving() as server, worker_of(server, model, None, "a") as worker:
        assert server.status()["parameters"] == 16
        with torch.no_grad():
            model.one.weight -= 1
        assert worker.force_sync()
    assert model.two.weight is model.one.weight
    assert torch.allclose(model.one.weight, before - 0.7 * 1.9)  # Nesterov's first step


@pytest.mark.parametrize("options", [{}, {"num_fragments": 2}, {"quantization_bits": 4}], ids=str)
def test_frozen_weights_come_to_a_newcomer_and_travel_in_no_round(options: dict[str, Any], tmp_path: Path) -> None:
    def adapted(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 256), torch.nn.Linear(256, 256), torch.nn.Linear(256, 1))
        model[:2].requires_grad_(False)
        return model

    first, newcomer = adapted(0), adapted(1)
    frozen = state_of(first[:2])  # type: ignore[index]  # a Sequential
    with serving(save_dir=tmp_path) as server:
        train(server, first, "a", 6, **options)
        optimizer = torch.optim.SGD(newcomer.parameters(), lr=0.05)
        with worker_of(server, newcomer, optimizer, "b", sync_every=2, **options) as worker:
            assert are_equal(state_of(newcomer[:2]), frozen)  # type: ignore[index]
            for number in range(2):
                step(newcomer, optimizer, number)
            metrics = worker.sync_metrics
        export_model(saved_model(tmp_path), tmp_path / "exported")
    assert metrics["diloco/sync_count"] > 0
    assert 0 < metrics["diloco/last_send_mb"] < 0.01  # all weights would be 0.27
    assert 0 < metrics["diloco/last_recv_mb"] < 0.01
    assert are_equal(state_of(newcomer[:2]), frozen)  # type: ignore[index]
    assert load_file(tmp_path / "exported" / MODEL_FILE).keys() == state_of(first).keys()


def test_a_model_in_bfloat16_makes_no_progress_without_a_step() -> None:
    model = make_model().bfloat16()
    with serving(make_model()) as server, worker_of(server, model, None, "a") as worker:
        before = state_of(model)
        assert worker.force_sync()
        assert are_equal(state_of(model), before)


def test_another_model_is_refused_with_the_names_that_differ() -> None:
    other = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(3))
    with serving(make_model()) as server, pytest.raises(UsageError) as refused:
        worker_of(server, other, None, "a").start()
    assert "missing 2.bias, 2.weight" in str(refused.value)
    assert "other shapes for 0.weight, 0.bias" in str(refused.value)
    assert "'a'" in str(refused.value)


def test_two_workers_with_one_id_are_refused() -> None:
    taken = pytest.raises(UsageError, match="another process trains under this id")
    with serving(make_model()) as server, worker_of(server, make_model(), None, "a"), taken:
        worker_of(server, make_model(), None, "a").start()


def test_a_delta_of_nan_costs_nobody_a_round(caplog: pytest.LogCaptureFixture) -> None:
    healthy, broken = make_model(), make_model()

    def break_down() -> None:
        with worker_of(server, broken, None, "broken") as worker:
            with torch.no_grad():
                next(broken.parameters()).fill_(float("nan"))
            assert worker.force_sync()

    with serving(make_model(), num_workers=2) as server:
        together(lambda: train(server, healthy, "healthy", 3), break_down)
        assert server.status()["round"] == 1
    assert are_equal(state_of(broken), state_of(healthy))
    assert "worker='broken': the norm of its delta is nan" in caplog.text


def test_metrics_and_state_have_the_names_of_the_specification() -> None:
    always = {"sync_count", "local_step", "last_sync_time", "total_sync_time", "last_send_mb", "last_recv_mb"}
    always |= {"steps_per_second", "sync_every"}
    counted = {"sync_count", "local_step", "sync_every", "worker_id", "total_sync_time", "sync_retries"}
    counted |= {"reconnections", "dylu_adjustments", "fragment_syncs"}
    streaming = {"dylu": True, "heartbeat_interval": 30, "num_fragments": 2}
    for options, more in (({}, set()), (streaming, {"dylu_adjustments", "num_fragments", "fragment_syncs"})):
        model = make_model()
        with serving(make_model()) as server, worker_of(server, model, None, "a", **options) as worker:
            assert worker.force_sync()
            assert worker.sync_metrics.keys() == {f"diloco/{name}" for name in always | more}
            state = worker.state_dict()
            assert state.keys() >= counted
            assert state["fragment_syncs"] == len(more & {"fragment_syncs"})


def test_a_delta_far_larger_than_usual_costs_nobody_a_round(caplog: pytest.LogCaptureFixture) -> None:
    healthy, broken = make_model(), make_model()

    def drift(model: torch.nn.Module, name: str, distances: list[float]) -> None:
        with worker_of(server, model, None, name) as worker:
            for distance in distances:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(distance)
                assert worker.force_sync()

    with serving(make_model(), num_workers=2) as server:
        together(
            lambda: drift(healthy, "healthy", [0.1, 0.1, 0.1, 0.1]),
            lambda: drift(broken, "broken", [0.1, 0.1, 0.1, 50.0]),
        )
        assert server.status()["round"] == 4
        counted = {name: facts["is_counted"] for name, facts in server.history()[-1]["workers"].items()}
        assert counted == {"healthy": True, "broken": False}
    assert are_equal(state_of(broken), state_of(healthy))
    assert "worker='broken': the norm of its delta is" in caplog.text
    assert "over 10 times the running median" in caplog.text


def test_a_slower_worker_takes_fewer_steps_in_a_round() -> None:
    """DyLU: by the speeds that both report, the slow one takes a quarter of the steps. Rounds go on."""
    is_adjusted = threading.Event()

    class Paced(DiLoCoWorker):
        def get_steps_per_second(self) -> float:
            return 1.0 if self.worker_id == "slow" else 4.0

    def train_as(name: str) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        options: dict[str, Any] = {"token": TOKEN, "dylu": True, "heartbeat_interval": 0.01, "timeout": 60}
        with Paced(model, optimizer, server.address, worker_id=name, sync_every=8, **options) as worker:
            for number in itertools.count():
                step(model, optimizer, number)
                metrics = worker.sync_metrics
                if name == "slow" and metrics["diloco/sync_every"] == 2:
                    assert metrics["diloco/dylu_adjustments"] == 1
                    is_adjusted.set()
                if is_adjusted.is_set():
                    assert name == "slow" or metrics["diloco/sync_every"] == 8
                    break

    with serving(make_model(), num_workers=2) as server:
        together(partial(train_as, "fast"), partial(train_as, "slow"))


@pytest.mark.parametrize("bf16_answers", [False, True])
def test_a_checkpoint_keeps_an_update_that_waits_for_its_answer(bf16_answers: bool) -> None:
    """The server has it, and the connection broke. The steps since then are kept, too."""
    model = make_model()
    with serving(make_model(), outer_optimizer=averaging(), bf16_answers=bf16_answers) as server:
        port = int(server.address.rpartition(":")[2])
        with LossyLine(port, request="PUT /updates", cuts=[ANSWER]) as line:
            killed = worker_of(line.address, model, None, "a", max_sync_retries=0)
            killed.start()
            before = state_of(model)
            with torch.no_grad():
                model[0].weight += 1  # type: ignore[index]
            killed.count_step()
            assert not killed.force_sync()
        assert server.status()["round"] == 1
        with torch.no_grad():
            model[0].weight += 2  # type: ignore[index]
        killed.count_step()
        resumed = worker_of(server, model, None, "a")
        resumed.load_state_dict(killed.state_dict())
        with resumed:
            assert resumed.force_sync()
            assert torch.allclose(model[0].weight, before["0.weight"] + 3, atol=0.02)  # type: ignore[index]
            assert server.status()["round"] == 1
            assert resumed.force_sync()
        assert server.status()["round"] == 2
    assert torch.allclose(model[0].weight, before["0.weight"] + 3, atol=0.02)  # type: ignore[index]


def test_progress_without_a_server_is_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    """A server that is away for a synchronisation gets that delta later, and the steps since then are kept."""
    model = make_model()
    with serving(make_model(), outer_optimizer=averaging()) as server:
        worker = worker_of(server, model, None, "a", max_sync_retries=0)
        worker.start()
        before = state_of(model)
        exchange_port = int(server.address.rpartition(":")[2])
        with torch.no_grad():
            model[0].weight += 1  # type: ignore[index]
    worker.count_step()
    assert not worker.force_sync()
    assert "trains on without synchronisation" in caplog.text
    with torch.no_grad():
        model[0].weight += 2  # type: ignore[index]
    worker.count_step()
    with serving(make_model(), outer_optimizer=averaging(), port=exchange_port) as server:
        assert worker.force_sync()
        assert worker.force_sync()
        worker.stop()
        assert torch.allclose(model[0].weight, before["0.weight"] + 3)  # type: ignore[index]
        assert server.status()["round"] == 2


def test_a_server_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = make_model()
    with serving(make_model()) as server:
        train(server, whole, "a", 12)
    model = make_model()
    for first, given in ((0, make_model()), (6, None)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with serving(given, save_dir=tmp_path) as server, worker_of(server, model, optimizer, "a"):
            for number in range(first, first + 6):
                step(model, optimizer, number)
    assert are_equal(state_of(model), state_of(whole))
