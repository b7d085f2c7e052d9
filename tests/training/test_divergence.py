"""DivergenceDetector: when it acts, what it does, and that ranks act as one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from skyward.errors import UsageError
from skyward.training.callbacks import DivergenceDetector
from tests.training.producer import Producer


def acts_after(losses: list[float], **options: Any) -> int | None:
    """Return how many losses it takes until it acts."""
    run = Producer([DivergenceDetector(**options)])
    run.begin()
    for at, loss in enumerate(losses, 1):
        run.step(loss=loss)
        if run.control.should_training_stop:
            return at
    return None


def test_it_acts_when_the_smoothed_loss_stays_above_its_best() -> None:
    healthy = [5 - 0.2 * at for at in range(15)]
    assert acts_after(healthy) is None
    assert acts_after([*healthy, 9.7, 9.7, 9.7, 9.7]) == 18  # above at once, for `patience` observations
    assert acts_after([*healthy, 9.7, 2.0, 2.0, 2.0, 2.0]) is None  # a spike
    assert acts_after([*healthy, 9.7], patience=1) == 16


def test_a_relative_threshold_is_a_multiple_of_the_best() -> None:
    losses = [1.0] * 11 + [1.6] * 10
    assert acts_after(losses, threshold=None, relative_threshold=1.5, smoothing=1.0) == 14
    assert acts_after(losses, threshold=None, relative_threshold=1.7, smoothing=1.0) is None
    assert acts_after([-1.0] * 11 + [1.0] * 9, threshold=None, relative_threshold=1.5) is None


def test_nothing_is_checked_before_the_end_of_the_warmup() -> None:
    assert acts_after([1.0, *[9.0] * 30], warmup=10) == 13
    assert acts_after([1.0, *[9.0] * 30], warmup=0) == 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_acted_on_at_once(value: float) -> None:
    assert acts_after([1.0, 1.0, value]) == 3
    assert acts_after([value]) == 1


def test_stop_saves_first_and_abort_does_not() -> None:
    for action, saves in (("stop", True), ("abort", False)):
        run = Producer([DivergenceDetector(action=action)])  # type: ignore[arg-type]
        run.begin()
        run.control.should_save = run.control.should_evaluate = not saves
        run.step(loss=math.nan)
        assert run.control.should_training_stop
        assert run.control.should_save is saves
        assert run.control.should_abort_without_save is not saves
        assert not run.control.should_evaluate


def test_evaluations_count_once_although_they_are_reported_twice() -> None:
    for options in ({"use_eval_loss": True}, {"metric_key": "eval_loss"}):
        detector = DivergenceDetector(**options)
        run = Producer([detector])
        run.begin()
        for _ in range(3):
            run.step(loss=math.nan)
            run.evaluate(eval_loss=2.0, as_hugging_face_does=True)
        assert detector.observation_count == 3
        assert not run.control.should_training_stop


def test_logs_without_a_loss_are_no_observations() -> None:
    detector = DivergenceDetector()
    run = Producer([detector])
    run.begin()
    run.step(learning_rate=1.0)
    run.evaluate(eval_loss=math.nan, as_hugging_face_does=True)
    run.end()
    assert detector.observation_count == 0
    assert not run.control.should_training_stop


def test_a_resumed_run_decides_as_if_it_had_not_stopped() -> None:
    losses = [5.0] * 12 + [9.0] * 8
    whole = acts_after(losses)
    run = Producer([DivergenceDetector()])
    run.begin()
    for loss in losses[:13]:
        run.step(loss=loss)
    checkpoint = run.save()
    assert sorted(checkpoint["callbacks"]["DivergenceDetector"]) == [
        "best_smoothed_loss",
        "consecutive_above",
        "observation_count",
        "smoothed_loss",
    ]
    again = Producer([DivergenceDetector()])
    again.resume(checkpoint)
    again.begin()
    at = 13
    while not again.control.should_training_stop:
        again.step(loss=losses[at])
        at += 1
    assert at == whole


def test_it_reports_the_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Producer([DivergenceDetector()])
    run.begin()
    for _ in range(3):
        run.step(loss=math.nan)
    (message,) = [each.getMessage() for each in caplog.records]
    assert message == "training diverges: loss is not finite at step 1; action: stop"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"smoothing": 0}, "smoothing"),
        ({"smoothing": 1.1}, "smoothing"),
        ({"threshold": 0}, "threshold"),
        ({"threshold": -1}, "threshold"),
        ({"relative_threshold": 1}, "relative_threshold"),
        ({"relative_threshold": 0}, "relative_threshold"),
        ({"threshold": None}, "relative_threshold"),
        ({"patience": 0}, "patience"),
        ({"warmup": -1}, "warmup"),
        ({"action": "shout"}, "action"),
    ],
)
def test_illegal_arguments_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match=field):
        DivergenceDetector(**options)
