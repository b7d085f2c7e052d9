"""`AsyncTrainer`: a trainer without a framework, whose tests run beside its next epoch."""

from __future__ import annotations

import pickle
import threading
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyward.errors import UsageError
from skyward.training.sakura import AsyncTrainer
from tests.waiting import until

X = torch.linspace(-1, 1, 8)[:, None]


def make() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))


def loss_of(model: torch.nn.Module) -> float:
    with torch.no_grad():
        return float(model(X).square().mean())


class Trainer:
    """Trainer as users of Sakura write it. `form` is the kind of its state."""

    def __init__(self, form: str = "pickles", epochs: int = 4) -> None:
        torch.manual_seed(0)
        self._model, self._form = make(), form
        self._epochs, self._epoch = range(1, epochs + 1), 0
        self._metrics = SimpleNamespace(test=None)
        self.seen: list[Any] = []
        self.inline: list[float] = []

    def train(self, loader: Any) -> None:
        self.seen.append((self._epoch, self._metrics.test and self._metrics.test["loss"]))
        optimizer = torch.optim.SGD(self._model.parameters(), 0.5)
        for batch in loader:
            loss = (self._model(batch) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self._model.eval()
        self.inline.append(loss_of(self._model))
        self._model.train()

    def serialized_state_dict(self) -> Any:
        state = self._model.cpu().state_dict()
        if self._form == "tensors":
            return state
        if self._form == "one pickle":
            return pickle.dumps(state)
        return OrderedDict((name, pickle.dumps(value)) for name, value in state.items())


def score(model: Any) -> Any:
    assert not model.training
    return {"loss": loss_of(model)}


@pytest.mark.parametrize("form", ["pickles", "one pickle", "tensors"])
def test_each_epochs_weights_are_tested_and_known_before_the_epoch_after_the_next(form: str) -> None:
    trainer = Trainer(form)
    beside = AsyncTrainer(trainer, make, score, gate="always")
    beside.run([X, X + 1])
    assert [row["loss"] for row in beside.history] == trainer.inline
    assert [(row["epoch"], row["step"], row["status"]) for row in beside.history] == [
        (at, at, "ok") for at in range(1, 5)
    ]
    # Strict: when an epoch begins, the test of the one before the last has ended. The last one's ends at the end.
    assert [epoch for epoch, _ in trainer.seen] == [1, 2, 3, 4]
    known = [loss for _, loss in trainer.seen]
    assert known[0] is None
    assert known[2] in (trainer.inline[0], trainer.inline[1])
    assert known[3] in (trainer.inline[1], trainer.inline[2])
    assert trainer._metrics.test["loss"] == trainer.inline[3]
    assert trainer._metrics.test["elapsed_secs"] > 0


def test_training_is_the_same_as_without_and_no_thread_is_left() -> None:
    beside, before = Trainer(), set(threading.enumerate())
    AsyncTrainer(beside, make, score).run([X])
    until(lambda: set(threading.enumerate()) <= before)
    torch.manual_seed(0)
    alone = Trainer()
    for _ in alone._epochs:
        alone.train([X])
    assert beside.inline == alone.inline


def test_a_test_that_fails_leaves_the_metrics_and_is_noted_in_the_history() -> None:
    trainer = Trainer(epochs=2)
    beside = AsyncTrainer(trainer, make, lambda model: 1 / 0)
    beside.run([X])
    assert [(row["status"], row["error"]) for row in beside.history] == [
        ("failed", "ZeroDivisionError: division by zero")
    ] * 2
    assert trainer._metrics.test is None
    with pytest.raises(ZeroDivisionError):
        AsyncTrainer(Trainer(), make, lambda model: 1 / 0, on_error="raise").run([X])


def test_an_end_that_waits_for_a_hanging_test_is_bounded() -> None:
    go = threading.Event()
    trainer = Trainer(epochs=1)
    beside = AsyncTrainer(trainer, make, lambda model: {"waited": go.wait(60)}, gate="always", drain_timeout_s=0.1)
    beside.run([X])
    go.set()
    (row,) = beside.history
    assert row["status"] == "failed"
    assert "cancelled, not ended 0.1 s after training" in row["error"]


def test_an_incomplete_trainer_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="trainer: SimpleNamespace has no serialized_state_dict, _epochs, which"):
        AsyncTrainer(SimpleNamespace(train=None, _metrics=None), make, score)
    with pytest.raises(UsageError, match="test_fn=None: must be callable"):
        AsyncTrainer(Trainer(), make, None)  # type: ignore[arg-type]


class Bare:
    """Trainer with exactly the members that Sakura's specification names."""

    def __init__(self, epochs: Any = 3) -> None:
        self._epochs, self._metrics = epochs, dict[str, Any]()
        self._model = make()
        self.known: list[Any] = []

    def train(self, loader: Any) -> None:
        self.known.append(self._metrics.get("test"))

    def serialized_state_dict(self) -> Any:
        return self._model.state_dict()


def test_a_trainer_needs_no_more_than_sakuras_members() -> None:
    trainer = Bare()
    beside = AsyncTrainer(trainer, make, score, gate="sync")
    beside.run()
    assert [(row["epoch"], row["status"]) for row in beside.history] == [(0, "ok"), (1, "ok"), (2, "ok")]
    assert trainer._metrics["test"]["loss"] == beside.history[-1]["loss"]
    assert trainer.known[0] is None
    assert [known["loss"] for known in trainer.known[1:]] == [row["loss"] for row in beside.history[:2]]
    with pytest.raises(UsageError, match=r"trainer\._epochs=2\.5: must be a whole number"):
        AsyncTrainer(Bare(2.5), make, score)


def test_errors_name_the_given_value() -> None:
    with pytest.raises(UsageError, match="^val_compute='quic://host:1': is an address"):
        AsyncTrainer(Bare(), make, score, val_compute="quic://host:1").run()
    with pytest.raises(UsageError, match="^cache_keys: not an option of AsyncTrainer; did you mean cache_key=\\?"):
        AsyncTrainer(Bare(), make, score, cache_keys="k")  # type: ignore[call-arg]
    beside = AsyncTrainer(Bare(1), make, lambda model: 0.5, gate="sync")
    beside.run()
    assert beside.history[0]["error"].startswith("test_fn: returned float (0.5)")


def test_a_factory_that_fails_is_reported_before_training_begins() -> None:
    trainer = Bare()
    with pytest.raises(OSError, match="no base model"):
        AsyncTrainer(trainer, _fails, score).run()
    assert trainer.known == []


def _fails() -> Any:
    raise OSError("no base model")
