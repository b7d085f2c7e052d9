"""Scenarios that test_keras.py runs once for each backend, in a separate process.

It prints the callbacks' events as JSON.
"""

# ruff: noqa: E402  # TensorFlow is put out of the way before Keras is imported

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

backend = os.environ["KERAS_BACKEND"]
if backend != "tensorflow":
    sys.modules["tensorflow"] = None  # type: ignore[assignment]  # Keras does without
gc.disable()  # until all is imported: it stays

import keras
import numpy as np

from skyward.training import DivergenceDetector, TrainerCallback
from skyward.training.frameworks.keras.callbacks import KerasCallbacks
from tests.training.frameworks.recording import Asks, Counts, Recorder

X = (np.arange(10.0) / 10)[:, None].astype("float32")
Y = 2 * X


def model(rate: float = 0.1, **compiled: Any) -> Any:
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)])
    accumulated = compiled.pop("accumulated", None)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, gradient_accumulation_steps=accumulated)
    made.compile(optimizer, "mse", metrics=["mae"], **compiled)
    return made


def fit(*callbacks: Any, made: Any = None, rows: int = 10, validate: bool = True, **chosen: Any) -> Any:
    given: dict[str, Any] = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0, **chosen}
    made = made or model()
    if validate:
        given["validation_data"] = (X, Y)
    made.fit(X[:rows], Y[:rows], callbacks=list(callbacks), **given)
    return made


def weight(made: Any) -> float:
    return float(keras.ops.sum(keras.ops.stop_gradient(made.trainable_variables[0])))


class Weights(TrainerCallback):
    """Callback that notes the weights. JAX's are elsewhere within an epoch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_log(self, model: Any, **_: Any) -> None:
        self.seen.append(weight(model))


def logs(ours: Recorder) -> list[dict[str, Any]]:
    return [told["logs"] for told in ours.of("on_log")]


def events() -> Any:
    ours = Recorder()
    made = fit(KerasCallbacks([ours], logging_steps=2), epochs=1)
    told = ours.of("on_step_end")[0]
    made.evaluate(X, Y, verbose=0, callbacks=[callbacks := KerasCallbacks([alone := Recorder()])])
    made.predict(X, verbose=0, callbacks=[callbacks])
    return {
        "events": ours.events,
        "epochs": [each["epoch"] for each in ours.of("on_step_end")],
        "max_steps": told["args"].max_steps,
        "is_model": told["model"] is made and told["optimizer"] is made.optimizer,
        "metrics": sorted(ours.of("on_evaluate")[0]["metrics"]),
        "alone": alone.names(),
        "alone_metrics": sorted(alone.of("on_evaluate")[0]["metrics"]),
    }


def losses() -> Any:
    """Return the losses.

    The weight stays 0, so a row's loss is the square of its y. Of nine rows the last batch is a half.
    """
    every, third, epoch = Recorder(), Recorder(), Recorder()
    fit(KerasCallbacks([every], logging_steps=1), made=model(0.0), rows=9)
    fit(KerasCallbacks([third], logging_steps=3), made=model(0.0), rows=9)
    fit(KerasCallbacks([epoch]), made=model(0.0), rows=9)
    rows = (Y[:9] ** 2).reshape(-1)
    batches = [rows[at : at + 2] for at in range(0, 9, 2)]
    return {
        "every": [each.get("loss") for each in logs(every)],
        "steps": [float(told["metrics"]["loss"]) for told in every.of("on_train_metrics")],
        "third": [each.get("loss") for each in logs(third)],
        "epoch": logs(epoch),
        "true": [float(each.mean()) for each in batches],
        "true_third": [float(np.concatenate(each).mean()) for each in (batches[:3], [*batches[3:], batches[0]])]
        + [float(np.concatenate(batches[1:4]).mean())],
        "true_epoch": float(rows.mean()),
    }


def executions() -> Any:
    if backend == "torch":
        return None  # Keras refuses it there
    ours = Recorder(only=("on_step_begin", "on_step_end", "on_log"))
    made = fit(KerasCallbacks([ours], logging_steps=2), made=model(steps_per_execution=2), epochs=1)
    return {"events": ours.events, "iterations": int(made.optimizer.iterations)}


def accumulation() -> Any:
    ours = Recorder(only=("on_step_begin", "on_substep_end", "on_step_end", "on_epoch_end"))
    made = fit(KerasCallbacks([ours]), made=model(accumulated=2), epochs=2, validate=False)
    return {"events": ours.events, "iterations": int(made.optimizer.iterations)}


def a_second_fit_goes_on() -> Any:
    ours = Recorder(only=("on_train_begin", "on_step_end"))
    made = fit(callback := KerasCallbacks([ours]), epochs=1)
    fit(callback, made=made, epochs=1)
    return {"events": ours.events, "max_steps": ours.of("on_step_end")[-1]["args"].max_steps}


def ends(ask: str) -> Any:
    ended = {}
    at = {"on_step_end": 3, "on_log": 4, "on_evaluate": 5, "on_epoch_end": 5}
    for event, step in list(at.items())[:: 2 if backend == "tensorflow" else 1]:  # it takes its time for each `fit`
        with tempfile.TemporaryDirectory() as folder:
            ours = Recorder(only=("on_step_end", "on_evaluate", "on_save", "on_train_end"))
            asks = [Asks(event, step, ask), ours]
            made = fit(KerasCallbacks(asks, logging_steps=2, output_dir=folder))
            files = sorted(each.name for each in Path(folder).iterdir())
            ended[event] = {"events": ours.events, "files": files, "iterations": int(made.optimizer.iterations)}
    return ended


def flags() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("skyward.training").addHandler(handler)
        ours = Recorder(only=("on_save", "on_log_step", "on_log", "on_epoch_end"))
        asks = [Asks("on_step_begin", 1, "should_save"), Asks("on_step_end", 3, "should_log")]
        asks += [Asks("on_step_end", at, flag) for at in (1, 2) for flag in ("should_evaluate", "should_epoch_stop")]
        silent = Recorder(only=("on_optimizer_step", "on_pre_optimizer_step"))
        fit(KerasCallbacks([*asks, ours, silent], output_dir=folder), epochs=1)
        logging.getLogger("skyward.training").removeHandler(handler)
        return {"events": ours.events, "said": said, "saved": [Path(e["checkpoint"]).name for e in ours.of("on_save")]}


class Tensors(Counts):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mean": np.arange(3.0)}


def resume() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        made = fit(KerasCallbacks([Tensors(), Asks("on_step_end", 7, "stop")], output_dir=folder, logging_steps=2))
        ours, state = Recorder(only=("on_train_begin", "on_epoch_begin", "on_step_end")), Tensors()
        again = model()
        callback = KerasCallbacks([ours, state], output_dir=folder, logging_steps=2, resume_from_checkpoint=True)
        stopped, stopped_at = weight(made), []
        reads = Recorder(only=())
        reads.on_train_begin = lambda model, **_: stopped_at.append(weight(model))  # type: ignore[attr-defined]
        callback.callbacks.add(reads)
        fit(callback, made=again, epochs=3)
        missing = KerasCallbacks([], output_dir=folder, resume_from_checkpoint=f"{folder}/none.weights.h5")
        try:
            fit(missing)
            error = None
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}".replace(folder, "")
        assert state.loaded is not None
        return {
            "events": ours.events,
            "epochs": [each["epoch"] for each in ours.of("on_epoch_begin")],
            "max_steps": ours.of("on_step_end")[0]["args"].max_steps,
            "loaded": [state.loaded["steps"], list(state.loaded["mean"])],
            "steps": state.steps,
            "is_same_weight": stopped_at == [stopped],
            "logged": [each["step"] for each in callback._run.state.log_history if "loss" in each],
            "initial_epoch": again._initial_epoch,  # Keras has no other name for it
            "error": error,
        }


def weights() -> Any:
    seen = Weights()
    fit(KerasCallbacks([seen], logging_steps=1), epochs=1)
    return seen.seen


def diverges() -> Any:
    """Train on data that are no numbers from the third batch on."""
    spoiled = Y.copy()
    spoiled[4:] = float("nan")
    ours, made = Recorder(only=("on_log",)), model()
    callbacks = KerasCallbacks([DivergenceDetector(threshold=100.0, action="abort"), ours], logging_steps=2)
    made.fit(X, spoiled, batch_size=2, epochs=2, shuffle=False, verbose=0, callbacks=[callbacks])
    return {"iterations": int(made.optimizer.iterations), "losses": [str(each.get("loss")) for each in logs(ours)]}


def passes_over() -> Any:
    """Train a run that becomes NaN after its checkpoint of step 2. It saves another one when it is stopped."""
    with tempfile.TemporaryDirectory() as folder:
        spoiled = Y.copy()
        spoiled[4:] = float("nan")
        saves, ours = Recorder(only=("on_save",)), Recorder(only=("on_train_begin",))
        asks = Asks("on_step_end", 2, "should_save")
        callbacks = KerasCallbacks([asks, DivergenceDetector(), saves], output_dir=folder, logging_steps=1)
        model().fit(X, spoiled, batch_size=2, epochs=2, shuffle=False, verbose=0, callbacks=[callbacks])
        again = KerasCallbacks([ours], output_dir=folder, resume_from_checkpoint=True)
        weights = [float(weight(fit(again, epochs=1)))]
        return {
            "saved": [Path(e["checkpoint"]).name for e in saves.of("on_save")],
            "begun": ours.events,
            "sane": weights[0] < 9,
        }


def main() -> None:
    gc.enable()
    gc.freeze()
    keras.utils.set_random_seed(0)
    found = {
        "events": events(),
        "losses": losses(),
        "executions": executions(),
        "accumulation": accumulation(),
        "second": a_second_fit_goes_on(),
        "stop": ends("should_training_stop"),
        "abort": ends("abort"),
        "flags": flags(),
        "resume": resume(),
        "weights": weights(),
        "diverges": diverges(),
        "passes over": passes_over(),
    }
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
