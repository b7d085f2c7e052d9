"""A worker makes each model and content once, and gives a model to one evaluation at a time."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch

from skyward.errors import UsageError
from skyward.training.evaluation import load_torch, load_trainable, load_weights
from skyward.training.evaluation.worker import ContentsMissing, Worker


class Model:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.state: Any = None


def take(model: Model, state: Any) -> None:
    model.state = state


def run(worker: Worker, eval_fn: Any, *, key: str | None = "k", state: Any = 0) -> Any:
    return worker.run(factory=Model, load=take, eval_fn=eval_fn, payload=None, cache_key=key, state=state).value


def test_a_model_is_made_once_for_a_key_and_again_without_one() -> None:
    worker, before = Worker(), Model.made
    for key in ("a", "a", None, None, "b"):
        run(worker, lambda model, payload: {}, key=key)
    assert Model.made - before == 4


def test_evaluations_of_one_key_do_not_meet_in_its_model() -> None:
    worker, inside, failures = Worker(), threading.Lock(), []

    def alone(model: Model, payload: Any) -> Any:
        if not inside.acquire(blocking=False):
            failures.append("two at once")
        seen = model.state
        for _ in range(1000):
            if model.state is not seen:
                failures.append("changed under an evaluation")
        inside.release()
        return seen

    threads = [threading.Thread(target=run, args=(worker, alone), kwargs={"state": object()}) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failures == []


def test_other_keys_run_side_by_side() -> None:
    worker, both = Worker(), threading.Barrier(2, timeout=60)
    threads = [
        threading.Thread(target=run, args=(worker, lambda model, payload: both.wait()), kwargs={"key": key})
        for key in "ab"
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not both.broken


def test_the_least_recently_used_model_is_dropped_first() -> None:
    worker, before = Worker(max_models=2), Model.made
    for key in ("a", "b", "a", "c", "a", "b"):
        run(worker, lambda model, payload: {}, key=key)
    assert Model.made - before == 4, "b was made twice"


def test_a_model_whose_evaluation_raised_is_not_used_again() -> None:
    worker, before = Worker(), Model.made
    with pytest.raises(ZeroDivisionError):
        run(worker, lambda model, payload: 1 / 0)
    run(worker, lambda model, payload: {})
    assert Model.made - before == 2


def test_a_caller_that_waits_for_an_abandoned_model_gets_another() -> None:
    worker, stuck, back = Worker(), threading.Event(), threading.Event()

    def hangs(model: Model, payload: Any) -> None:
        stuck.set()
        assert back.wait(60)

    thread = threading.Thread(target=run, args=(worker, hangs))
    thread.start()
    assert stuck.wait(60)
    waiting = threading.Thread(target=run, args=(worker, lambda model, payload: {}))
    waiting.start()
    worker.forget("k")
    waiting.join(60)
    assert not waiting.is_alive()
    back.set()
    thread.join()


def test_contents_are_unpickled_once_and_bounded() -> None:
    worker = Worker(max_contents=2)
    with pytest.raises(ContentsMissing) as missing:
        worker.content("a")
    assert missing.value.digests == ("a",)
    first = worker.content("a", pickle.dumps([1]))
    assert worker.content("a") is first
    for each in "bc":
        worker.content(each, pickle.dumps(each))
    assert [worker.has(each) for each in "abc"] == [False, True, True]


def test_floats_get_the_dtype_of_the_models_own_tensor_and_nothing_else_is_cast() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).bfloat16(), torch.nn.BatchNorm1d(2))
    model.train()
    other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = {**other.state_dict(), "1.num_batches_tracked": torch.tensor(2**53 + 1)}
    load_torch(model, state)
    assert model[0].weight.dtype is torch.bfloat16
    assert model[1].weight.dtype is torch.float32
    assert torch.equal(model.state_dict()["1.weight"], other.state_dict()["1.weight"])
    assert int(model.state_dict()["1.num_batches_tracked"]) == 2**53 + 1
    assert not model.training
    state["1.weight"].fill_(7)
    assert model[1].weight.max() < 7, "it has a copy"


def test_mismatched_names_are_reported() -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(
        UsageError, match=r"another model than the one in training \(unexpected: extra; missing: bias\)"
    ):
        load_torch(model, {"weight": model.weight, "extra": model.bias})
    load_trainable(model, {"weight": torch.zeros(1, 2)})
    assert model.weight.tolist() == [[0, 0]]


def test_arrays_are_loaded_by_set_weights() -> None:
    class Keras:
        def set_weights(self, weights: list[Any]) -> None:
            self.weights = weights

    model = Keras()
    load_weights(model, (1, 2))
    assert model.weights == [1, 2]
