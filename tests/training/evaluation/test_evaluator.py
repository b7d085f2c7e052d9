"""Copies are scored while training goes on. Every outcome is a record, and training is the same as without."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from skyward.errors import ArgumentNotPicklable, UsageError
from skyward.training.evaluation import AsyncEvaluator, EvaluationRecord, Timeline
from skyward.training.snapshot import SnapshotPool
from tests.training.evaluation.parts import ByHand, make_model, norm_of, scored
from tests.waiting import until


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    until(lambda: set(threading.enumerate()) <= before)


def by_hand(hand: ByHand, **options: Any) -> AsyncEvaluator:
    return AsyncEvaluator(make_model, scored, None, **{"compute": hand, "gate": "always", **options})


def state(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2,), value)}


def steps(records: list[EvaluationRecord]) -> list[tuple[int, str]]:
    return [(each.step, each.status) for each in records]


# Scored weights ------------------------------------------------------------------------------------------------------


def test_weights_that_training_changes_meanwhile_are_not_scored() -> None:
    model, hold = make_model(), threading.Event()

    def when_released(scoring: Any, payload: object) -> dict[str, float]:
        return norm_of(scoring, payload)

    def load_late(scoring: Any, taken: Any) -> None:
        assert hold.wait(60)
        scoring.load_state_dict(taken)

    expected = norm_of(model, None)
    with AsyncEvaluator(make_model, when_released, gate="always", load=load_late) as evaluator:
        evaluator.submit(model.state_dict(), step=1)
        with torch.no_grad():
            for each in model.parameters():
                each.add_(1)
        hold.set()
        assert [each.metrics for each in evaluator.drain()] == [expected]


def test_metrics_equal_those_of_an_evaluation_between_two_steps_to_the_bit() -> None:
    torch.manual_seed(0)
    model, data = make_model(), torch.randn(64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inline = []
    with AsyncEvaluator(make_model, scored, data, gate="always", max_pending=20) as evaluator:
        for step in range(1, 11):
            model.train()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            evaluator.submit(model.state_dict, step=step, epoch=step / 10)
            inline.append(scored(model.eval(), data)["loss"].item())
    assert [each.metrics["loss"] for each in evaluator.history] == inline
    assert [(each.step, each.epoch, each.status) for each in evaluator.history] == [
        (step, step / 10, "ok") for step in range(1, 11)
    ]
    assert all(each.worker == "in-process" and each.elapsed_s is not None for each in evaluator.history)
    assert len({each.snapshot_id for each in evaluator.history}) == 10


@pytest.mark.parametrize("gate", ["always", "sync"])
def test_training_draws_the_same_random_numbers_and_stays_in_its_mode(gate: Any) -> None:
    def train(evaluator: AsyncEvaluator | None) -> tuple[list[float], bool]:
        torch.manual_seed(1)
        model, drawn = make_model(), []
        for step in range(1, 5):
            drawn.append(torch.rand(()).item())
            if evaluator is not None:
                evaluator.submit(model.state_dict(), step=step)
                evaluator.drain()
        return drawn, model.training

    def draws(model: Any, payload: Any) -> dict[str, Any]:
        loader = torch.utils.data.DataLoader(payload, batch_size=2, shuffle=True)
        return {"first": next(iter(loader)).sum(), "noise": torch.rand(3).sum(), "perm": torch.randperm(5)[0]}

    with AsyncEvaluator(make_model, draws, torch.arange(8.0), gate=gate, cache_key=None) as evaluator:
        assert train(evaluator) == train(None) != ([], True)
    assert {each.status for each in evaluator.history} == {"ok"}


def test_only_floats_travel_as_half_and_the_model_gets_its_own_dtypes() -> None:
    model, hand = make_model(), ByHand()
    with by_hand(hand, fp16_state_dict=True) as evaluator:
        evaluator.submit({**model.state_dict(), "seen": torch.tensor([2**40, 5])}, step=1)
        sent = hand.job(0).state
        assert sent["0.weight"].dtype is torch.float16
        assert sent["seen"].tolist() == [2**40, 5]
        assert sent["1.num_batches_tracked"].dtype is torch.int64
        worker_model = make_model()
        del sent["seen"]
        hand.job(0).load.value(worker_model, sent)
        assert worker_model.state_dict()["0.weight"].dtype is torch.float32
        assert not worker_model.training
        assert torch.allclose(worker_model.state_dict()["0.weight"], model.state_dict()["0.weight"], atol=1e-3)
        hand.end(0, {})


def test_a_factory_of_another_model_is_reported() -> None:
    with AsyncEvaluator(lambda: torch.nn.Linear(1, 1), scored, gate="sync") as evaluator:
        record = evaluator.submit(make_model().state_dict(), step=1)
    assert record is not None
    assert record.status == "failed"
    assert "model_factory: makes another model than the one in training (unexpected: 0.weight" in record.error


def test_arrays_need_no_torch_and_are_copied_into_the_same_buffers() -> None:
    hand = ByHand()
    weights: list[Any] = [np.zeros(3), np.ones((2, 2), dtype=np.int8)]
    with by_hand(hand) as evaluator:
        evaluator.submit(weights, step=1)
        first = hand.job(0).state
        weights[0] += 1
        assert first[0].tolist() == [0, 0, 0]
        assert first[1].dtype == np.int8
        hand.end(0, {"a": 1})
        evaluator.drain()
        evaluator.submit(weights, step=2)
        assert hand.job(1).state[0] is first[0]
        assert first[0].tolist() == [1, 1, 1]
        hand.end(1, {"a": 1})


def test_a_snapshot_of_another_owner_is_shared_and_not_copied() -> None:
    hand, taken = ByHand(), SnapshotPool().take(state(3))
    with by_hand(hand) as evaluator:
        evaluator.submit(taken, step=1)
        taken.release()
        assert hand.job(0).state["w"] is taken.state["w"]
        hand.end(0, {})
    with pytest.raises(RuntimeError, match="was released"):
        taken.retain()


def test_contents_are_the_same_objects_for_every_job() -> None:
    hand = ByHand(shares_memory=False)
    with by_hand(hand) as evaluator, AsyncEvaluator(make_model, scored, compute=hand, gate="always") as other:
        for at, each in enumerate((evaluator, evaluator, other)):
            each.submit(state(), step=at)
            hand.job(at)
        first, second, third = (hand.job(at) for at in range(3))
        assert first.payload is second.payload
        assert first.factory is second.factory
        assert first.factory.digest == third.factory.digest
        assert first.cache_key == second.cache_key != third.cache_key, "two evaluators never share a model by accident"
        for at in range(3):
            hand.end(at, {})


def test_an_object_that_cannot_be_sent_is_refused_when_the_evaluator_is_made() -> None:
    with pytest.raises(ArgumentNotPicklable, match="payload: cannot be sent to another process"):
        AsyncEvaluator(make_model, scored, threading.Lock(), compute=ByHand(shares_memory=False))


# Failures ------------------------------------------------------------------------------------------------------------


def test_an_evaluation_that_raises_or_returns_no_dictionary_is_a_record() -> None:
    def wrong(model: Any, payload: Any) -> Any:
        if payload.pop() == "raise":
            raise ValueError("no data")
        return 0.5

    with AsyncEvaluator(make_model, wrong, ["number", "raise"], gate="sync") as evaluator:
        for step in (1, 2):
            evaluator.submit(make_model().state_dict(), step=step)
        raised, no_dictionary = evaluator.collect()
    assert (raised.status, raised.error, raised.metrics) == ("failed", "ValueError: no data", {})
    assert no_dictionary.status == "failed"
    assert no_dictionary.error.startswith("eval_fn: returned float (0.5); return a dictionary of metrics")


def test_an_evaluation_that_never_returns_times_out() -> None:
    stuck, back = threading.Event(), threading.Event()

    def never(model: Any, payload: Any) -> dict[str, int]:
        if not stuck.is_set():
            stuck.set()
            assert back.wait(60)
        return {"fine": 1}

    with AsyncEvaluator(make_model, never, timeout_s=3.0, gate="always") as evaluator:  # the second one needs time, too
        evaluator.submit(make_model().state_dict(), step=1)
        assert stuck.wait(60)
        (first,) = evaluator.drain()
        evaluator.submit(make_model().state_dict(), step=2)
        (second,) = evaluator.drain()
        back.set()
    assert first.status == "failed"
    assert "ran longer than its timeout_s of 3 s" in first.error
    assert second.metrics == {"fine": 1}, "its model is not that of the one that is stuck"


def test_a_dispatcher_that_refuses_is_a_record() -> None:
    class Refuses(ByHand):
        def submit(self, job: Any) -> Any:
            raise OSError("no room")

    with by_hand(Refuses()) as evaluator:
        evaluator.submit(state(), step=1)
        (record,) = evaluator.drain()
    assert (record.status, record.error) == ("failed", "OSError: no room")


def test_no_result_of_a_worker_leaves_an_evaluation_open() -> None:
    class Odd(dict[str, float]):
        def items(self) -> Any:
            raise RuntimeError("no items")

    class Ends(ByHand):
        def submit(self, job: Any) -> Any:
            if job.step == 2:
                raise SystemExit(3)
            return super().submit(job)

    hand = Ends()
    with by_hand(hand) as evaluator:
        for step in (1, 2, 3):
            evaluator.submit(state(), step=step)
        hand.end(0, Odd(loss=1.0))
        hand.end(1, {"loss": 1.0})
        first, second, third = evaluator.drain(20)
    assert (first.status, first.error) == ("failed", "RuntimeError: no items")
    assert (second.status, second.error) == ("failed", "SystemExit: 3")
    assert third.status == "ok"


def test_an_error_is_raised_where_training_collects_on_request() -> None:
    hand = ByHand()
    evaluator = by_hand(hand, on_error="raise")
    for step in (1, 2):
        evaluator.submit(state(), step=step)
    hand.end(0, ValueError("no data"))
    until(lambda: evaluator.pending == 1)
    with pytest.raises(ValueError, match="no data") as raised:
        evaluator.collect()
    assert raised.value.__notes__ == ["raised by the evaluation of step 1"]
    assert steps(evaluator.collect()) == [(1, "failed")]
    hand.end(1, KeyError("x"))
    with pytest.raises(KeyError):
        evaluator.drain()
    evaluator.close()
    evaluator.close()
    assert not hand.was_closed, "a dispatcher that was given is its owner's"


def test_a_copy_that_fails_is_training_s_own_error_and_leaves_nothing_open() -> None:
    def fails() -> Any:
        raise MemoryError("no room for a copy")

    hand = ByHand()
    with by_hand(hand) as evaluator:
        with pytest.raises(MemoryError, match="no room"):
            evaluator.submit(fails, step=1)
        assert evaluator.pending == 0
        assert evaluator.submit(state(), step=2) is None
        hand.end(0, {})
    assert steps(evaluator.history) == [(2, "ok")]


# Limits --------------------------------------------------------------------------------------------------------------


def test_a_full_queue_skips_without_a_copy_and_reports_it() -> None:
    hand, calls = ByHand(), []

    def counted() -> dict[str, torch.Tensor]:
        calls.append(0)
        return state()

    with by_hand(hand, max_pending=2) as evaluator:
        for step in (1, 2, 3):
            record = evaluator.submit(counted, step=step)
            assert (record is None) == (step < 3)
        assert len(calls) == 2
        assert steps(evaluator.collect()) == [(3, "skipped")]
        assert evaluator.history[0].error == "2 evaluations were open, which is max_pending"
        for at in (0, 1):
            hand.end(at, {})
        assert steps(evaluator.drain()) == [(1, "ok"), (2, "ok")]
        evaluator.submit(state(), step=4)
        hand.end(2, {})


@pytest.mark.parametrize("on_backpressure", ["block", "queue"])
def test_at_the_limit_training_waits_for_the_oldest_if_told_to(on_backpressure: Any) -> None:
    hand = ByHand()
    with by_hand(hand, max_pending=1, on_backpressure=on_backpressure) as evaluator:
        evaluator.submit(state(), step=1)
        hand.job(0)
        ends = threading.Timer(0.1, hand.end, (0, {}))
        ends.start()
        evaluator.submit(state(), step=2)
        assert steps(evaluator.collect()) == [(1, "ok")], "it had ended before the next was sent"
        ends.join()
        hand.end(1, {})


def test_a_slow_worker_is_skipped_or_not_and_recovers() -> None:
    hand = ByHand()
    with by_hand(hand) as evaluator, by_hand(hand, on_backpressure="queue") as insists:
        hand.behind_s = 60
        skipped = evaluator.submit(state(), step=1)
        assert skipped is not None
        assert skipped.error == "by hand is behind by 60 s"
        assert insists.submit(state(), step=1) is None
        hand.behind_s = 0
        assert evaluator.submit(state(), step=2) is None
        for at in (0, 1):
            hand.end(at, {})


def test_strict_waits_for_the_oldest_and_lazy_does_not() -> None:
    hand = ByHand()
    with by_hand(hand, drain="strict") as evaluator:
        evaluator.submit(state(), step=1)
        hand.job(0)
        ends = threading.Timer(0.1, hand.end, (0, {}))
        ends.start()
        evaluator.submit(state(), step=2)
        assert steps(evaluator.collect()) == [(1, "ok")]
        ends.join()
        hand.end(1, {})


def test_by_default_training_waits_for_no_cold_worker() -> None:
    hand = ByHand()
    with by_hand(hand, gate="auto", max_pending=9) as evaluator:
        for step in range(1, 6):
            assert evaluator.submit(state(), step=step) is None, "it did not wait"
        assert evaluator.pending == 5
        for at in range(5):
            hand.end(at, {})
        evaluator.drain()
        assert evaluator.way == "beside"


def test_a_warm_up_makes_the_model_elsewhere_and_reports_a_failure_once(caplog: pytest.LogCaptureFixture) -> None:
    hand = ByHand(shares_memory=False)
    with by_hand(hand) as evaluator:
        evaluator.warm_up()
        job = hand.job(0)
        assert job.is_warm_up
        assert job.state is None
        hand.end(0, ValueError("no base model"))
        evaluator.submit(state(), step=1)
        assert not hand.job(1).is_warm_up
        hand.end(1, ValueError("no base model"))
        assert steps(evaluator.drain()) == [(1, "failed")]
    assert [each.getMessage() for each in caplog.records] == [
        "evaluation: warm-up of by hand failed: ValueError: no base model"
    ]
    with by_hand(ByHand()) as here:
        here.warm_up()
    assert not here.history


# The end -------------------------------------------------------------------------------------------------------------


def test_evaluations_open_at_the_end_of_training_are_recorded() -> None:
    hand = ByHand()
    evaluator = by_hand(hand)
    for step in (1, 2):
        evaluator.submit(state(), step=step)
    hand.job(1)  # sent, too
    hand.end(0, {"a": 1})
    until(lambda: evaluator.pending == 1)
    assert steps(evaluator.drain(timeout_s=0.05)) == [(1, "ok"), (2, "failed")]
    assert evaluator.history[1].error == "cancelled, not ended 0.05 s after training"
    assert hand.jobs[1][1].cancelled()
    evaluator.submit(state(), step=3)
    hand.job(2)
    evaluator.close()
    assert evaluator.history[2].error == "the evaluator was closed before the evaluation ended"
    with pytest.raises(UsageError, match="is closed; submit before close"):
        evaluator.submit(state(), step=4)


def test_a_training_that_raises_does_not_wait_for_evaluations() -> None:
    hand = ByHand()
    with pytest.raises(ZeroDivisionError), by_hand(hand) as evaluator:
        evaluator.submit(state(), step=1)
        hand.job(0)
        _ = 1 / 0
    assert steps(evaluator.history) == [(1, "failed")]


def test_late_metrics_decide_nothing() -> None:
    hand = ByHand()
    with by_hand(hand, max_age_steps=10) as evaluator:
        for step in (10, 20):
            evaluator.submit(state(), step=step)
        evaluator.collect(step=25)
        for at in (0, 1):
            hand.end(at, {"loss": at})
        assert steps(evaluator.drain()) == [(10, "late"), (20, "ok")]
        latest = evaluator.latest()
        assert latest is not None
        assert latest.step == 20
        assert evaluator.latest(max_age_steps=4) is None


def test_the_timeline_shows_copies_transfers_workers_and_waits() -> None:
    timeline, hand = Timeline(), ByHand()
    with by_hand(hand, timeline=timeline, max_pending=1, on_backpressure="block") as evaluator:
        for at in (0, 1):
            evaluator.submit(state(), step=at + 1)
            threading.Timer(0.5, hand.end, (at, {})).start()  # training comes to its wait before
    tracks = timeline.tracks()
    assert {"training", "snapshot", "transfer", "hand"} == set(tracks) - {"queue"}
    assert [each.args["step"] for each in tracks["hand"]] == [1, 2]
    assert {each.name for each in tracks["training"]} == {"to step 1", "steps 1 to 2", "wait"}
    assert timeline.summary().waited_s > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drain": "eager"}, "drain='eager': unknown value; use one of 'lazy', 'strict'"),
        ({"max_pending": 0}, "max_pending=0: must be a whole number >= 1; set max_pending=1 or more"),
        ({"timeout_s": -1}, "timeout_s=-1: must be seconds > 0; set"),
        ({"max_age_steps": -1}, "max_age_steps=-1: must be a whole number >= 0; set"),
        ({"gate": "no"}, "gate='no': unknown value; use one of 'auto', 'always', 'sync'"),
        ({"compute": 5}, "compute=5: unknown place"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        AsyncEvaluator(make_model, scored, **options)
