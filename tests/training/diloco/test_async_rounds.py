"""Asynchronous updates: each is applied as it arrives, and exactly once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from skyward.errors import UsageError
from skyward.training.diloco import DelayedNesterov, DiLoCoServer
from skyward.training.diloco.async_rounds import AsyncRounds
from skyward.training.diloco.client import DiLoCoClient
from skyward.training.diloco.refusal import RefusalKind, WorkerRefused
from skyward.training.diloco.rounds import UpdateAnswer, UpdateKey
from tests.training.diloco.lossy_line import ANSWER, LossyLine
from tests.training.diloco.runs import TOKEN, are_equal, make_model, serving, state_of, train, worker_of


def key(worker: str, base_round: int, number: int = 0) -> UpdateKey:
    return UpdateKey(worker=worker, base_round=base_round, number=number)


def applied(rounds: AsyncRounds, update: UpdateKey) -> None:
    assert rounds.submit(update, update.worker, now=0.0).kind == "accepted"
    assert rounds.is_complete
    rounds.close()


def both_present() -> AsyncRounds:
    rounds = AsyncRounds()
    rounds.join("a", "a", now=0.0)
    rounds.join("b", "b", now=0.0)
    return rounds


def test_an_update_counts_once_also_after_a_restart() -> None:
    rounds = both_present()
    applied(rounds, key("a", 0))
    applied(rounds, key("b", 0))
    resumed = AsyncRounds()
    resumed.load_state_dict(json.loads(json.dumps(rounds.state_dict())), now=0.0)
    for same in (rounds, resumed):
        outcome = same.submit(key("a", 0), "a", now=0.0)
        assert outcome.kind == "answered"
        assert outcome.answer == UpdateAnswer(round=1, is_counted=True)
        assert same.round == 2


def test_a_base_older_than_the_last_answer_or_unknown_is_refused() -> None:
    rounds = both_present()
    applied(rounds, key("a", 0))
    for base in (0, 2):
        with pytest.raises(WorkerRefused, match="load the parameters of round 1") as refused:
            rounds.submit(key("a", base, number=5), "a", now=0.0)
        assert refused.value.kind is RefusalKind.WRONG_ROUND
    applied(rounds, key("b", 0))
    applied(rounds, key("a", 1, number=1))  # b's update lies between its base and it
    rounds.evict("a")
    with pytest.raises(WorkerRefused, match="is not present"):
        rounds.submit(key("a", 3), "a", now=0.0)
    with pytest.raises(UsageError, match="has no update"):
        rounds.close()


def test_one_worker_without_delay_equals_synchronous_rounds_to_the_bit() -> None:
    """With a buffer of one update, delayed Nesterov is Nesterov. The model has a BatchNorm."""
    models = [make_model(), make_model()]
    for model, is_async in zip(models, (False, True), strict=True):
        with serving(make_model(), async_mode=is_async) as server:
            train(server, model, "a", 9)
            assert server.status()["round"] == 3
    assert are_equal(state_of(models[0]), state_of(models[1]))


def test_no_worker_waits_for_another_and_updates_of_an_old_base_count() -> None:
    """The result is that of the outer optimizer, given both deltas in the order of their arrival."""
    expected = dict(make_model().named_parameters())
    outer = DelayedNesterov(every=2)
    with serving(make_model(), num_workers=2, async_mode=True) as server:
        models = {name: make_model() for name in "ab"}
        workers = {name: worker_of(server, model, None, name) for name, model in models.items()}
        for worker in workers.values():
            worker.start()
        moved: dict[str, dict[str, torch.Tensor]] = {name: {} for name in "ab"}
        with torch.no_grad():
            for n, (name, model) in enumerate(models.items()):
                for place, parameter in model.named_parameters():
                    moved[name][place] = torch.full_like(parameter, 0.25 * (n + 1))
                    parameter.sub_(moved[name][place])
            for name in "ab":
                assert workers[name].force_sync()
                # Computed as the worker does, from the moved parameters.
                base = dict(make_model().named_parameters())
                delta = {place: base[place] - (base[place] - moved[name][place]) for place in base}
                outer.step({place: parameter.data for place, parameter in expected.items()}, delta)
        status = server.status()
        assert status["round"] == 2
        assert [worker["staleness"] for worker in status["workers"]] == [0, 1]
        for worker in workers.values():
            worker.stop()
    for place, parameter in models["b"].named_parameters():
        assert torch.equal(parameter, expected[place])


def test_a_lost_answer_applies_no_update_twice() -> None:
    model, expected = make_model(), make_model()
    with serving(make_model(), async_mode=True) as server:
        port = int(server.address.rpartition(":")[2])
        with (
            LossyLine(port, request="GET /answers", cuts=[100, ANSWER, ANSWER]) as line,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr("skyward.training.diloco.worker.FIRST_PAUSE_S", 0.001)
            train(line.address, model, "a", 6)
        assert server.status()["round"] == 2
    with serving(make_model(), async_mode=True) as server:
        train(server, expected, "a", 6)
    assert are_equal(state_of(model), state_of(expected))


def test_a_worker_that_was_evicted_keeps_its_delta_though_others_went_on() -> None:
    with serving(make_model(), num_workers=2, async_mode=True) as server:
        late = worker_of(server, make_model(), None, "late")
        late.start()
        train(server, make_model(), "b", 6)
        assert DiLoCoClient(server.address, token=TOKEN).ask("/control/kick", {"worker": "late"})["was_present"]
        assert late.force_sync()
        status = server.status()
        assert status["round"] == 3
        assert status["workers"][0]["staleness"] == 2
        late.stop()


def test_stale_updates_leave_variances_positive() -> None:
    """Four workers each move the running variance from 1 to 0.1. All of that together would make it -2.6."""
    with serving(make_model(), num_workers=4, async_mode=True) as server:
        models = [make_model() for _ in range(4)]
        workers = [worker_of(server, model, None, str(n)) for n, model in enumerate(models)]
        for worker in workers:
            worker.start()
        for model in models:
            model.get_buffer("1.running_var").fill_(0.1)
        for worker in workers:
            assert worker.force_sync()
            worker.stop()
    variance = models[-1].get_buffer("1.running_var")
    assert 0.1 < float(variance.min()) <= float(variance.max()) < 0.4


def test_modes_of_saves_and_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with serving(make_model(), save_dir=tmp_path, async_mode=True) as server:
        train(server, make_model(), "a", 3)
    with serving(make_model(), save_dir=tmp_path, async_mode=True) as server:
        assert server.status()["round"] == 1
    with pytest.raises(UsageError, match="async_mode=False: the save is of the other mode"):
        DiLoCoServer(make_model(), save_dir=tmp_path)
    with pytest.raises(UsageError, match="dn_buffer_size=2: is for asynchronous updates"):
        DiLoCoServer(make_model(), dn_buffer_size=2)
    with pytest.raises(UsageError, match="min_workers=2: each update is a round"):
        DiLoCoServer(make_model(), 2, min_workers=2, async_mode=True)
    with pytest.raises(UsageError, match="the outer_optimizer ignores it"):
        DiLoCoServer(make_model(), async_mode=True, dn_buffer_size=2, outer_optimizer=DelayedNesterov())
