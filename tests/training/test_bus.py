"""Events reach the callbacks that have a handler, in order, and their errors reach every rank."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from skyward.errors import UsageError
from skyward.training import EVENTS, CallbackHandler, TrainerCallback, TrainerControl, TrainerState


def fire(handler: CallbackHandler, event: str, control: TrainerControl | None = None, **context: Any) -> TrainerControl:
    return handler.fire(event, args=None, state=TrainerState(), control=control or TrainerControl(), **context)


class Recorder(TrainerCallback):
    def __init__(self, into: list[str], mark: str = "") -> None:
        self.into, self.mark = into, mark

    def on_log(self, logs: dict[str, float], **kwargs: Any) -> None:
        self.into.append(f"{self.mark}log {logs['loss']}")

    def on_step_end(self, state: TrainerState, **kwargs: Any) -> None:
        self.into.append(f"{self.mark}step {state.global_step}")


class Counter(TrainerCallback):
    def __init__(self, state_key: str | None = None) -> None:
        self.steps = 0
        self._key = state_key

    @property
    def state_key(self) -> str:
        return self._key or super().state_key

    def on_step_end(self, **kwargs: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.steps = state_dict["steps"]


def test_there_are_nineteen_events() -> None:
    assert len(EVENTS) == len(set(EVENTS)) == 19


def test_only_handlers_that_are_defined_are_called_in_the_order_of_the_callbacks() -> None:
    got: list[str] = []
    handler = CallbackHandler([Recorder(got, "a "), Counter(), Recorder(got, "b ")])
    fire(handler, "on_log", logs={"loss": 1.0})
    fire(handler, "on_step_end")
    fire(handler, "on_epoch_end")
    assert got == ["a log 1.0", "b log 1.0", "a step 0", "b step 0"]
    assert handler.listens("on_log")
    assert not handler.listens("on_epoch_end")


def test_callbacks_may_be_added_and_removed_between_events() -> None:
    got: list[str] = []
    handler = CallbackHandler([Recorder(got)])
    added = Counter()
    handler.add(added)
    fire(handler, "on_step_end")
    assert handler.pop(Recorder) is not None
    assert handler.pop(Recorder) is None
    fire(handler, "on_step_end")
    assert (got, added.steps) == (["step 0"], 2)


def test_the_last_answer_that_is_not_none_wins() -> None:
    class Answers(TrainerCallback):
        def __init__(self, answer: TrainerControl | None) -> None:
            self.answer = answer

        def on_step_end(self, **kwargs: Any) -> TrainerControl | None:
            return self.answer

    stop, save = TrainerControl(should_training_stop=True), TrainerControl(should_save=True)
    control = TrainerControl()
    fire(CallbackHandler([Answers(stop), Answers(save), Answers(None)]), "on_step_end", control)
    assert control == save


def test_a_callback_whose_errors_are_ignored_is_warned_about_once_and_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fails(TrainerCallback):
        on_error = "disable"

        def on_step_end(self, **kwargs: Any) -> None:
            raise OSError("disk full")

    got: list[str] = []
    handler = CallbackHandler([Fails(), Recorder(got)])
    with caplog.at_level(logging.WARNING):
        fire(handler, "on_step_end")
        fire(handler, "on_step_end")
    assert [record.getMessage() for record in caplog.records] == [
        "Fails.on_step_end failed; the callback is disabled from now on"
    ]
    assert len(got) == 2


def test_an_error_that_matters_ends_the_run_and_names_the_event() -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, **kwargs: Any) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full") as caught:
        fire(CallbackHandler([Fails()]), "on_step_end")
    assert caught.value.__notes__ == ["raised in the callback Fails.on_step_end at rank 0"]


def test_states_are_kept_by_key_whatever_the_order(caplog: pytest.LogCaptureFixture) -> None:
    handler = CallbackHandler([Counter("a"), Counter("b"), Recorder([])])
    fire(handler, "on_step_end")
    kept = {**handler.state_dict(), "gone": {}}
    a, b = Counter("a"), Counter("b")
    CallbackHandler([b, Recorder([]), a]).load_state_dict({**kept, "a": {"steps": 7}})
    assert (a.steps, b.steps) == (7, 1)
    assert "'gone'" in caplog.text


def test_two_states_of_one_key_are_refused() -> None:
    with pytest.raises(UsageError, match="state_key='Counter'"):
        CallbackHandler([Counter(), Counter()])


def test_an_object_without_a_handler_is_refused() -> None:
    with pytest.raises(UsageError, match="handles no event"):
        CallbackHandler([object()])


def test_a_misspelt_handler_is_warned_about_with_the_likely_event(caplog: pytest.LogCaptureFixture) -> None:
    class Misspelt(TrainerCallback):
        def on_log(self, **_: Any) -> None: ...

        def on_stepend(self, **_: Any) -> None: ...

        def on_train_batch_end(self, **_: Any) -> None: ...  # Lightning's and Keras's

        def on_demand(self) -> None: ...  # a method of the user's own

    CallbackHandler([Misspelt()])
    assert [record.getMessage() for record in caplog.records] == [
        "Misspelt.on_stepend is never called, because no event has this name; did you mean on_step_end?",
        "Misspelt.on_train_batch_end is never called, because no event has this name; did you mean on_step_end?",
    ]


def test_a_callback_with_only_a_misspelt_handler_is_refused_with_the_likely_event() -> None:
    class Misspelt:
        def on_logs(self, **_: Any) -> None: ...

    with pytest.raises(UsageError, match=r"handles no event \(on_logs: did you mean on_log\?\)"):
        CallbackHandler([Misspelt()])


def test_the_first_three_parameters_may_have_any_names() -> None:
    got: list[Any] = []

    class Positional(TrainerCallback):
        def on_step_end(self, a: Any, s: Any, c: Any, **kw: Any) -> None:
            got.append((a, s, c, kw["model"], "args" in kw))

        def on_log(self, args: Any, s: Any, control: Any, /, logs: Any, **_: Any) -> None:
            got.append((args, s, control, logs))

        def on_save(self, state: Any, checkpoint: str, model: Any, **_: Any) -> None:
            got.append((state, checkpoint, model))

    handler, control = CallbackHandler([Positional()]), TrainerControl()
    given: dict[str, Any] = {"args": "arguments", "state": "where", "control": control, "model": "net"}
    handler.fire("on_step_end", **given)
    handler.fire("on_log", logs={"loss": 1}, **given)
    handler.fire("on_save", checkpoint="there", **given)
    assert got == [
        ("arguments", "where", control, "net", False),
        ("arguments", "where", control, {"loss": 1}),
        ("where", "there", "net"),
    ]


def test_a_handler_that_cannot_take_everything_is_refused_before_training() -> None:
    class Short(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any) -> None: ...

    with pytest.raises(UsageError, match=r"Short.on_save\(args, state, control\): .* add \*\*kwargs"):
        CallbackHandler([Short()])


def test_a_parameter_that_no_event_has_is_explained() -> None:
    class Asks(TrainerCallback):
        def on_step_end(self, step: int, **_: Any) -> None: ...

    with pytest.raises(TypeError, match="'step'") as caught:
        fire(CallbackHandler([Asks()]), "on_step_end")
    assert "Asks.on_step_end is called with keywords" in caught.value.__notes__[0]

    class Fails(TrainerCallback):
        def on_step_end(self, **_: Any) -> None:
            raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own") as caught:
        fire(CallbackHandler([Fails()]), "on_step_end")
    assert not any("keyword" in note for note in caught.value.__notes__)


def test_the_documentation_lists_every_event() -> None:
    page = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    drawing = page[page.index("on_init_end  on_train_begin") : page.index("## A callback in 15 lines")]
    assert set(re.findall(r"\bon_[a-z_]+", drawing)) == set(EVENTS)


def test_a_control_converts_to_a_number_and_back() -> None:
    for bits in range(128):
        control = TrainerControl()
        control.set_flags(bits)
        assert control.flags() == bits


def test_order_to_save_on_one_rank_counts_on_all_of_them_at_a_scheduled_step() -> None:
    ordered, other = TrainerControl(), TrainerControl()
    for control in (ordered, other):
        control.should_save = True  # the schedule
    assert not ordered.must_save
    ordered.should_save = True
    bits = ordered.flags() | other.flags()
    for control in (ordered, other):
        control.set_flags(bits)
        assert control.must_save
        control.should_save = False
        assert control == TrainerControl()


def test_an_abort_clears_the_flags_that_would_save() -> None:
    control = TrainerControl(should_save=True, should_evaluate=True)
    control.abort()
    assert control == TrainerControl(should_training_stop=True, should_abort_without_save=True)


def test_closing_reaches_every_callback_although_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    class Holder(TrainerCallback):
        closed = False

        def on_step_end(self, **kwargs: Any) -> None: ...

        def close(self) -> None:
            self.closed = True

    class Failing(Holder):
        def close(self) -> None:
            raise OSError("disk full")

    first, last = Holder(), Holder()
    CallbackHandler([first, Failing(), last]).close()
    assert (first.closed, last.closed) == (True, True)
    assert "Failing.close failed" in caplog.text


def test_a_call_of_an_undefined_handler_says_where_callbacks_belong() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'on_init_end'; .*HFCallbacks\(\[\.\.\.\]\)"):
        Counter().on_init_end()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"'Counter' object has no attribute 'other'$"):
        _ = Counter().other  # type: ignore[attr-defined]


def test_a_users_class_named_trainer_callback_is_accepted() -> None:
    heard: list[str] = []
    made = type("TrainerCallback", (TrainerCallback,), {"on_log": lambda self, **_: heard.append("log")})()
    fire(CallbackHandler([made]), "on_log")
    assert heard == ["log"]
