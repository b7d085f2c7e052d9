"""Streaming end to end: servers and workers on loopback, fragments that travel beside training, and faults."""

from __future__ import annotations

import copy
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from skyward.errors import UsageError
from skyward.training.diloco import DiLoCoServer, DiLoCoWorker, OuterSGD, worker
from skyward.training.diloco.client import DiLoCoClient
from skyward.training.diloco.schedule import split_parameters, sync_steps
from skyward.training.diloco.tensors import exchanged, to_tensors
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
from tests.training.diloco.test_streaming import FRAGMENTS, SPEED, TABLES
from tests.waiting import until

STREAMING: dict[str, Any] = {"sync_every": 6, "num_fragments": 2}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(worker, "MOST_PAUSE_S", 0.5)


# Results --------------------------------------------------------------------------------------------------------------


class TwoFragments(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = torch.nn.Parameter(torch.zeros(1))
        self.q = torch.nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(("delay", "alpha", "table"), TABLES)
def test_workers_compute_the_tables_by_hand(delay: int, alpha: float, table: dict[str, list[float]]) -> None:
    """The server takes half a step, and worker b adds three times as much as worker a."""
    results: dict[str, list[float]] = {name: [] for name in table}

    def add(name: str) -> None:
        model = TwoFragments()
        options = STREAMING | {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
        with worker_of(server, model, None, name, **options) as worker:
            for _ in table["p a"]:
                with torch.no_grad():
                    model.p.add_(SPEED[name])
                    model.q.add_(SPEED[name])
                worker.count_step()
                for fragment in FRAGMENTS:
                    results[f"{fragment} {name}"].append(getattr(model, fragment).item())

    outer = OuterSGD(lr=0.5, momentum=0.0, nesterov=False)
    with serving(TwoFragments(), num_workers=2, outer_optimizer=outer) as server:
        together(*(partial(add, name) for name in SPEED))
    assert results == table


def reference(delay: int, alpha: float, steps: int) -> list[dict[str, torch.Tensor]]:
    """Streaming of two workers, written down again, with torch's optimizer as the outer one."""
    models = [make_model(), make_model()]
    inner = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    local = [exchanged(model) for model in models]
    names = split_parameters({name: tensor.numel() for name, tensor in local[0].items()}, 2)
    server = {name: torch.nn.Parameter(tensor.detach().clone()) for name, tensor in local[0].items()}
    outer = [
        torch.optim.SGD(
            [server[name] for name in part if not name.startswith("buffer:")], lr=0.7, momentum=0.9, nesterov=True
        )
        for part in names
    ]
    landing: dict[int, int] = {}
    for number in range(steps):
        for model, optimizer, seed in zip(models, inner, (0, 1), strict=True):
            step(model, optimizer, number, seed)
        for fragment, offset in enumerate(sync_steps(6, 2)):
            if (number + 1) % 6 != offset % 6:
                continue
            landing[number + delay] = fragment
            with torch.no_grad():
                for name in names[fragment]:
                    deltas = [server[name].detach() - tensors[name] for tensors in local]
                    mean = (sum(delta.double() for delta in deltas) / 2).float()  # type: ignore[union-attr]
                    if name.startswith("buffer:"):
                        server[name].sub_(mean)
                    server[name].grad = mean
            outer[fragment].step()
        if number in landing:
            with torch.no_grad():
                for tensors in local:
                    for name in names[landing[number]]:
                        tensors[name].mul_(alpha).add_(server[name], alpha=1 - alpha)
    return [state_of(model) for model in models]


@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.0), (1, 0.5), (2, None)])
def test_workers_equal_the_reference(delay: int, alpha: float | None) -> None:
    """A model with buffers, and the paper's outer optimizer. Each fragment has a momentum of its own."""
    models = [make_model(), make_model()]
    options = STREAMING | {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
    with serving(make_model(), num_workers=2) as server:
        together(*(partial(train, server, models[n], str(n), 18 + delay, data_seed=n, **options) for n in (0, 1)))
        assert server.status()["round"] == 6
        assert server.status()["num_fragments"] == 2
    expected = reference(delay, 0.5 if alpha is None else alpha, 18 + delay)
    for model, values in zip(models, expected, strict=True):
        torch.testing.assert_close(state_of(model), values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"bf16_answers": True}, {}])
def test_workers_that_wait_have_equal_fragments_to_the_bit(options: dict[str, Any]) -> None:
    """After the last step one fragment was just received, and the other one three steps before."""
    models = [make_model(), make_model()]
    with serving(make_model(), num_workers=2, **options) as server:
        together(*(partial(train, server, models[n], str(n), 12, data_seed=n, **STREAMING) for n in (0, 1)))
    one, other = (exchanged(model) for model in models)
    names = split_parameters({name: tensor.numel() for name, tensor in one.items()}, 2)
    assert all(torch.equal(one[name], other[name]) for name in names[1])
    assert not all(torch.equal(one[name], other[name]) for name in names[0])


def test_one_fragment_with_a_delay_overlaps_plain_diloco() -> None:
    model = make_model()
    with serving(make_model()) as server:
        train(server, model, "a", 8, fragment_sync_delay=2)
        assert server.status()["round"] == 2


def test_steps_of_a_cycle_need_not_be_divisible_and_tied_weights_travel_once() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(4, 4, bias=False)
            self.two = torch.nn.Linear(4, 4)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.two(self.one(x)).sum(1, keepdim=True)
            return result

    models = [Tied(), Tied()]
    with serving(num_workers=2) as server:
        options = {"sync_every": 5, "num_fragments": 2, "fragment_sync_delay": 1}
        together(*(partial(train, server, models[n], str(n), 15, data_seed=n, **options) for n in (0, 1)))
        assert server.status()["round"] == 6
        assert server.status()["parameters"] == 20
    for model in models:
        assert model.two.weight is model.one.weight


def test_a_late_joiner_begins_with_the_fragment_of_the_open_round() -> None:
    early, late = make_model(), make_model(1)
    with serving(make_model()) as server:
        optimizer = torch.optim.SGD(early.parameters(), lr=0.05)
        with worker_of(server, early, optimizer, "a", **STREAMING):
            for number in range(3):
                step(early, optimizer, number)  # round 0, with fragment 0, is over
            joining = threading.Thread(target=train, args=(server, late, "b", 6), kwargs=STREAMING, daemon=True)
            joining.start()
            until(lambda: len(server.status()["workers"]) == 2)
            for number in range(3, 12):
                step(early, optimizer, number)
            joining.join(60)
            assert not joining.is_alive()
        assert server.status()["round"] == 4


def test_workers_with_other_fragments_are_refused() -> None:
    with serving(make_model()) as server, worker_of(server, make_model(), None, "a", num_fragments=2):
        with pytest.raises(UsageError, match=r"num_fragments=3 of worker 'b'.*have 2 fragments; set num_fragments=2"):
            worker_of(server, make_model(), None, "b", num_fragments=3).start()
        with pytest.raises(UsageError, match="num_fragments=99: the model has 8 tensors"):
            worker_of(server, make_model(), None, "b", num_fragments=99)


def test_another_number_of_fragments_may_follow_when_all_have_left() -> None:
    with serving(make_model()) as server:
        for num_fragments in (3, 2):
            train(server, make_model(), "a", 6, sync_every=6, num_fragments=num_fragments)
        assert server.status()["num_fragments"] == 2
        assert server.status()["round"] == 5


def test_a_slower_worker_changes_its_steps_with_the_next_cycle() -> None:
    """DyLU in streaming mode: the slow worker's cycle shrinks to a quarter, and no fragment is left out."""

    class Paced(DiLoCoWorker):
        def get_steps_per_second(self) -> float:
            return 1.0 if self.worker_id == "slow" else 4.0

    is_adjusted = threading.Event()

    def train_as(name: str) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        options: dict[str, Any] = {"token": TOKEN, "dylu": True, "heartbeat_interval": 0.01, "timeout": 60}
        options |= {"num_fragments": 2, "fragment_sync_delay": 1}
        with Paced(model, optimizer, server.address, worker_id=name, sync_every=8, **options) as paced:
            number = 0
            while not is_adjusted.is_set():
                step(model, optimizer, number)
                number += 1
                if name == "slow" and paced.sync_metrics["diloco/sync_every"] == 2:
                    is_adjusted.set()

    with serving(make_model(), num_workers=2) as server:
        together(partial(train_as, "fast"), partial(train_as, "slow"))


def test_asynchronous_workers_take_turns_for_themselves() -> None:
    models = [make_model(), make_model()]
    averaging = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
    with serving(make_model(), async_mode=True, outer_optimizer=averaging) as server:
        train(server, models[0], "a", 12, **STREAMING)
        train(server, models[1], "b", 9, fragment_sync_delay=1, **STREAMING)
        assert server.status()["round"] == 7
    # Alone and with all of its own progress, a worker is where its steps have brought it.
    alone = make_model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for number in range(12):
        step(alone, optimizer, number)
    torch.testing.assert_close(state_of(models[0]), state_of(alone), rtol=1e-4, atol=1e-4)


# Transfers beside training --------------------------------------------------------------------------------------------


def held(server: DiLoCoServer, gate: threading.Event) -> LossyLine:
    """Return a line whose uploads wait for the gate."""
    return LossyLine(int(server.address.rpartition(":")[2]), request="PUT /updates", gate=gate)


def test_training_goes_on_while_a_fragment_travels() -> None:
    """The transfer takes half a round, by the count of steps. The step that applies it asks the server nothing."""
    model, gate = make_model(), threading.Event()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with serving(make_model()) as server, held(server, gate) as line:
        options = {"sync_every": 8, "num_fragments": 2, "fragment_sync_delay": 3}
        with worker_of(line.address, model, optimizer, "a", **options) as streaming:
            for number in range(6):  # sent after four steps: then come half of the four steps to the next fragment
                step(model, optimizer, number)
            until(lambda: "PUT /updates" in line.begun)
            assert server.status()["round"] == streaming.sync_metrics["diloco/sync_count"] == 0
            gate.set()
            until(lambda: "GET /answers" in line.ended)
            asked = list(line.begun)
            step(model, optimizer, 6)
            assert streaming.sync_metrics["diloco/sync_count"] == 1
            assert line.begun == asked


def test_the_end_of_a_run_waits_for_its_fragment_and_a_failed_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "ABANDON_S", 0.01)
    gate = threading.Event()

    def run(model: torch.nn.Module, address: str, *, fails: bool) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with worker_of(address, model, optimizer, "a", fragment_sync_delay=3, **STREAMING):
            for number in range(3):
                step(model, optimizer, number)
            if fails:
                raise OSError("the disk is gone")

    with serving(make_model()) as server:
        run(make_model(), server.address, fails=False)
        assert server.status()["round"] == 1
        with held(server, gate) as line, pytest.raises(OSError, match="the disk is gone"):
            run(make_model(), line.address, fails=True)
        assert server.status()["round"] == 1
        gate.set()


# Faults ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_cut", ["PUT /updates", "GET /answers"])
def test_fragments_count_once_wherever_a_connection_breaks(request_cut: str) -> None:
    models = [make_model(), make_model()]
    options = STREAMING | {"fragment_sync_delay": 2}
    for model, cuts in zip(models, ([], [0, 8, 90, ANSWER, ANSWER]), strict=True):
        with serving(make_model()) as server:
            port = int(server.address.rpartition(":")[2])
            with LossyLine(port, request=request_cut, cuts=cuts) as line:
                train(line.address, model, "a", 14, max_sync_retries=9, **options)
                assert line.cuts == []
            assert server.status()["round"] == 4
    assert are_equal(state_of(models[0]), state_of(models[1]))


def test_a_worker_whose_fragment_is_late_loses_no_progress(caplog: pytest.LogCaptureFixture) -> None:
    """The server has the fragment, and its answer is lost. The next turn fetches it, and keeps the steps since."""
    model = make_model()
    averaging = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
    with serving(make_model(), outer_optimizer=averaging) as server:
        port = int(server.address.rpartition(":")[2])
        with LossyLine(port, request="PUT /updates", cuts=[ANSWER]) as line:
            options = STREAMING | {"fragment_sync_delay": 1, "max_sync_retries": 0}
            with worker_of(line.address, model, None, "a", **options) as streaming:
                before = state_of(model)
                for _ in range(8):
                    with torch.no_grad():
                        model[0].weight += 1  # type: ignore[index]
                    streaming.count_step()
        assert "trains on without synchronisation" in caplog.text
        assert server.status()["round"] == 1
        assert torch.allclose(model[0].weight, before["0.weight"] + 8)  # type: ignore[index]


def test_a_broken_worker_goes_on_from_all_parameters_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """A NaN in one fragment would come back from the others, so the answer has them all."""
    model = make_model()
    with serving(make_model()) as server:
        with worker_of(server, model, None, "a", fragment_sync_delay=1, **STREAMING) as broken:
            for _ in range(3):
                broken.count_step()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
            for _ in range(4):
                broken.count_step()
        assert server.status()["round"] == 2
    assert are_equal(state_of(model), state_of(make_model()))
    assert "worker='a': the norm of its delta is nan" in caplog.text


def test_an_evicted_worker_sends_its_fragment_again_in_its_round() -> None:
    model = make_model()
    with serving(make_model()) as server:
        with worker_of(server, model, None, "a", fragment_sync_delay=1, **STREAMING) as evicted:
            for _ in range(2):
                evicted.count_step()
            DiLoCoClient(server.address, token=TOKEN).ask("/control/kick", {"worker": "a"})
            for _ in range(2):
                evicted.count_step()
            assert evicted.sync_metrics["diloco/reconnections"] == 1
        assert server.status()["round"] == 1


# Checkpoints ----------------------------------------------------------------------------------------------------------


def train_and_resume(
    server: DiLoCoServer, stop: int, saved_at: int, steps: int, **options: Any
) -> dict[str, torch.Tensor]:
    """Train up to a step, forget all since a checkpoint, and go on from that one. Return the final parameters."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    killed = worker_of(server, model, optimizer, "a", **options)
    killed.start()
    for number in range(saved_at):
        step(model, optimizer, number)
    saved = copy.deepcopy((model.state_dict(), killed.state_dict()))
    for number in range(saved_at, stop):
        step(model, optimizer, number)
    resumed = make_model(1)
    resumed.load_state_dict(saved[0])
    optimizer = torch.optim.SGD(resumed.parameters(), lr=0.05)
    worker = worker_of(server, resumed, optimizer, "a", **options)
    worker.load_state_dict(saved[1])
    with worker:
        for number in range(saved_at, steps):
            step(resumed, optimizer, number)
    return state_of(resumed)


@pytest.mark.parametrize("answers", [{}, {"bf16_answers": True}])
@pytest.mark.parametrize(("saved_at", "stop"), [(2, 2), (3, 3), (4, 4), (3, 5), (5, 7), (2, 7), (7, 11), (4, 8)])
def test_a_worker_resumes_to_the_bit(saved_at: int, stop: int, answers: dict[str, Any]) -> None:
    """From before a fragment is sent, from its flight, and from up to a whole cycle less the delay ago."""
    options = STREAMING | {"fragment_sync_delay": 2}
    whole = make_model()
    with serving(make_model(), **answers) as server:
        train(server, whole, "a", 17, **options)
    with serving(make_model(), **answers) as server:
        resumed = train_and_resume(server, stop, saved_at, 17, **options)
        assert server.status()["round"] == 5
    assert are_equal(resumed, state_of(whole))


@pytest.mark.parametrize("bits", [0, 4])
def test_a_server_goes_on_with_momentum_and_rounding_errors_of_every_fragment(bits: int, tmp_path: Path) -> None:
    options = STREAMING | {"fragment_sync_delay": 1, "quantization_bits": bits}
    whole = make_model()
    with serving(make_model(), quantization_bits=bits) as server:
        train(server, whole, "a", 19, **options)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with serving(make_model(), save_dir=tmp_path, quantization_bits=bits) as first:
        port = int(first.address.rpartition(":")[2])
        streaming = worker_of(first, model, optimizer, "a", **options)
        streaming.start()
        for number in range(11):
            step(model, optimizer, number)
    with serving(None, save_dir=tmp_path, port=port, quantization_bits=bits) as second:
        for number in range(11, 19):
            step(model, optimizer, number)
        streaming.finish()
        streaming.stop()
        assert second.status()["round"] == 6
    assert are_equal(state_of(model), state_of(whole))


# Compression ----------------------------------------------------------------------------------------------------------

COMPRESSED = STREAMING | {"quantization_bits": 4}


@pytest.mark.parametrize("bits", [8, 4])
def test_compressed_answers_keep_all_workers_equal_to_the_bit(bits: int) -> None:
    """Also a late joiner, because the global parameters move by the answers as they are."""
    models = [make_model(), make_model()]
    options: dict[str, Any] = {"quantization_bits": bits}
    with serving(make_model(), num_workers=2, quantization_bits=bits) as server:
        together(*(partial(train, server, models[n], str(n), 9, data_seed=n, **options) for n in (0, 1)))
        late = make_model()
        with worker_of(server, late, None, "late"):
            assert are_equal(state_of(late), state_of(models[0]))
    assert are_equal(state_of(models[0]), state_of(models[1]))
    exact = [make_model(), make_model()]
    with serving(make_model(), num_workers=2) as server:
        together(*(partial(train, server, exact[n], str(n), 9, data_seed=n) for n in (0, 1)))
    for name, tensor in state_of(exact[0]).items():
        torch.testing.assert_close(state_of(models[0])[name], tensor, atol=0.1, rtol=0.1)


def test_compression_makes_the_traffic_small() -> None:
    model = torch.nn.Linear(512, 256)
    with (
        serving(torch.nn.Linear(512, 256), quantization_bits=4) as server,
        worker_of(server, model, None, "a", quantization_bits=4) as compressing,
    ):
        assert compressing.force_sync()
        metrics = compressing.sync_metrics
    for name in ("send", "recv"):
        assert metrics[f"diloco/last_{name}_mb"] * 1e6 < 0.54 * 513 * 256


def test_rounding_errors_come_with_the_next_update() -> None:
    """Averaging, and one worker that learns the same small step again and again beside a large one."""
    model = torch.nn.Linear(2, 1, bias=False)
    averaging = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
    with (
        serving(model, outer_optimizer=averaging, quantization_bits=4) as server,
        worker_of(server, model, None, "a", quantization_bits=4) as compressing,
    ):
        before = model.weight.detach().clone()
        for _ in range(20):
            with torch.no_grad():
                model.weight += torch.tensor([[7.0, 0.2]])
            assert compressing.force_sync()
        frame = DiLoCoClient(server.address, token=TOKEN).parameters()
    assert frame is not None
    moved = to_tensors(frame)["weight"] - before
    assert moved[0, 0].item() == pytest.approx(140, rel=0.01)
    assert moved[0, 1].item() == pytest.approx(4, abs=2.1)  # without feedback it would not have moved at all
    assert torch.equal(model.weight.detach(), to_tensors(frame)["weight"])


@pytest.mark.parametrize(("saved_at", "stop"), [(4, 4), (2, 7), (7, 11)])
def test_a_worker_resumes_with_its_rounding_errors_to_the_bit(saved_at: int, stop: int) -> None:
    options = COMPRESSED | {"fragment_sync_delay": 2}
    whole = make_model()
    with serving(make_model(), quantization_bits=4) as server:
        train(server, whole, "a", 17, **options)
    with serving(make_model(), quantization_bits=4) as server:
        resumed = train_and_resume(server, stop, saved_at, 17, **options)
        assert server.status()["round"] == 5
    assert are_equal(resumed, state_of(whole))


def test_a_broken_delta_leaves_no_rounding_error_behind() -> None:
    model = make_model()
    with serving(make_model(), quantization_bits=8) as server:
        with worker_of(server, model, None, "a", quantization_bits=8) as broken:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
            assert broken.force_sync()
            assert broken.state_dict()["replica"]["residuals"] == {}
            assert broken.force_sync()
        assert server.status()["round"] == 2
    assert are_equal(state_of(model), state_of(make_model()))


def test_quantised_answers_to_asynchronous_workers_are_refused() -> None:
    with pytest.raises(UsageError, match="quantization_bits=8: asynchronous answers are whole parameters; set it to 0"):
        DiLoCoServer(make_model(), async_mode=True, quantization_bits=8)
    with pytest.raises(UsageError, match="quantization_bits=5: must be 8, 4, or 0 for none"):
        DiLoCoServer(make_model(), quantization_bits=5)
