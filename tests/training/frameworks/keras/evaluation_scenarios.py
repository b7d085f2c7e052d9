"""Scenarios that test_keras.py runs once for each backend, in a separate process. It prints the results as JSON."""

# ruff: noqa: E402  # TensorFlow is put out of the way before Keras is imported

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

backend = os.environ["KERAS_BACKEND"]
if backend != "tensorflow":
    sys.modules["tensorflow"] = None  # type: ignore[assignment]  # Keras does without
gc.disable()  # until all is imported: it stays

import keras
import numpy as np

from skyward.errors import UsageError
from skyward.training import JsonLogger, KerasCallbacks
from skyward.training.evaluation import Timeline
from skyward.training.frameworks.keras.models import KerasFactory
from skyward.training.sakura import SakuraKerasCallback
from tests.waiting import until

X = np.linspace(-1, 1, 24, dtype="float32").reshape(12, 2)
Y = (2 * X[:, :1] - X[:, 1:]).astype("float32")
said: list[str] = []


def make(*, is_compiled: bool = True, units: int = 3, run_eagerly: bool = True) -> Any:
    """Make an eager model, except for one scenario: on two backends each fit would compile for seconds."""
    layers = [keras.Input((2,)), keras.layers.Dense(units, activation="tanh"), keras.layers.BatchNormalization()]
    made = keras.Sequential([*layers, keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    if is_compiled:
        made.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], run_eagerly=run_eagerly)
    return made


def make_unbuilt() -> Any:
    """Make a model as Keras's guides write it: without an Input."""
    layers = [keras.layers.Dense(3, activation="tanh"), keras.layers.BatchNormalization()]
    made = keras.Sequential([*layers, keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], run_eagerly=True)
    return made


def evaluate(model: Any, payload: Any) -> Any:
    return model.evaluate(*payload, verbose=0, return_dict=True)


class Weights(keras.callbacks.Callback):  # type: ignore[misc]  # Any to mypy
    """Callback that keeps the weights at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[list[Any]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.at.append(self.model.get_weights())


def fit(*callbacks: Any, epochs: int = 4, **chosen: Any) -> Any:
    keras.utils.set_random_seed(7)
    made = make(**chosen)
    made.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return made


def beside(val_fn: Any = evaluate, **chosen: Any) -> Any:
    given = {"model_factory": make, "val_payload": (X, Y), "verbose": False, "gate": "always", **chosen}
    return SakuraKerasCallback(val_fn=val_fn, **given)


def is_same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def scored(callback: Any, epochs: int) -> list[float]:
    """Return the callback's rows, by epoch."""
    rows = {each["epoch"]: each for each in callback.history}
    return [rows[at]["loss"] for at in range(epochs)]


def rows() -> Any:
    timeline = Timeline()
    weights, callback = Weights(), beside(timeline=timeline)
    made = fit(weights, callback, run_eagerly=False)
    inline = []
    for at in weights.at:
        fresh = make()
        fresh.set_weights(at)
        inline.append(evaluate(fresh, (X, Y)))
    plain = fit(alone := Weights(), run_eagerly=False)
    return {
        "history": callback.history,
        "inline": inline,
        "keras": {name: values for name, values in made.history.history.items() if name.startswith("val_")},
        "best": callback.best_val_loss,
        "is_same_training": is_same(made.get_weights(), plain.get_weights()) and is_same(weights.at[1], alone.at[1]),
        "losses": [made.history.history["loss"], plain.history.history["loss"]],
        "tracks": {name: len(spans) for name, spans in timeline.tracks().items()},
        "threads": [each.name for each in threading.enumerate() if each.name.startswith("skyward")],
    }


class Script:
    """Evaluation whose val_loss follows from its number of calls, which determines early stopping."""

    def __init__(self, *losses: float) -> None:
        self.losses = list(losses)

    def __call__(self, model: Any, payload: Any) -> Any:
        return {"val_loss": self.losses.pop(0)}


LOSSES = (0.9, 0.5, 0.3, 0.6, 0.7, 0.8, 0.9, 1.0)


def decisions() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
        plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0)
        kept = keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}-{{val_loss:.1f}}.weights.h5", save_best_only=True)
        kept.save_weights_only = True
        weights = Weights()
        model_path = f"{folder}/best.weights.h5"
        callback = beside(Script(*LOSSES), model_path=model_path)
        made = fit(stop, plateau, kept, weights, callback, epochs=8)
        written, best, other = sorted(os.listdir(folder)), make(), make()
        best.load_weights(model_path)
        other.load_weights(f"{folder}/3-0.3.weights.h5")
        return {
            "epochs": len(weights.at),
            "restored": is_same(made.get_weights(), weights.at[2]),
            "best": [is_same(best.get_weights(), weights.at[2]), callback.best_val_loss],
            "checkpoint": is_same(other.get_weights(), weights.at[2]),
            "written": written,
            "rate": float(made.optimizer.learning_rate),
            "keras": made.history.history["val_loss"],
            "given_back": "on_epoch_end" not in vars(stop),
            "record": json.loads(Path(f"{model_path}.json").read_text())["epoch"],
        }


def inline() -> Any:
    """Evaluate so that results exist at the end of their own epoch."""
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    seen: list[Any] = []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs.get("val_loss")))
    weights = Weights()
    made = fit(look, stop, weights, beside(Script(*LOSSES), gate="sync"), epochs=8)
    return {
        "seen": seen,
        "restored": is_same(made.get_weights(), weights.at[2]),
        "keras": made.history.history["val_loss"],
    }


def failures() -> Any:
    found = {}
    wrong = {
        "uncompiled": beside(model_factory=lambda: make(is_compiled=False)),
        "other": beside(model_factory=lambda: make(units=5)),
        "raises": beside(lambda model, payload: 1 / 0),
        "number": beside(lambda model, payload: 0.5),
    }
    plain = fit(epochs=1).get_weights()
    for name, callback in wrong.items():
        made = fit(callback, epochs=1)
        (row,) = callback.history
        found[name] = [row["status"], row.get("error"), is_same(made.get_weights(), plain)]
    unbuilt = beside(model_factory=make_unbuilt)
    fit(unbuilt, epochs=1)
    found["built"] = [unbuilt.history[0]["status"], unbuilt.history[0].get("error")]
    try:
        KerasFactory(make_unbuilt, None)()
    except UsageError as error:
        found["unbuilt"] = ["failed", str(error), True]
    try:
        fit(beside(lambda model, payload: 1 / 0, on_error="raise"), epochs=2)
    except ZeroDivisionError:
        found["raised"] = ["", "", True]
    return found


def ages() -> Any:
    """Hold evaluations until the third epoch has ended."""
    go = threading.Event()

    def waits(model: Any, payload: Any) -> Any:
        assert go.wait(60)
        return {"val_loss": 0.5}

    def let_it_end(epoch: int, logs: Any) -> None:
        if epoch == 2:
            go.set()
            # `pending` counts evaluations that have ended and are not reported yet: here all of them.
            until(lambda: "0 open" in repr(callback._evaluations.evaluator))

    let_go = keras.callbacks.LambdaCallback(on_epoch_end=let_it_end)
    stop = keras.callbacks.EarlyStopping("val_loss", patience=0)
    callback = beside(waits, drain="lazy", max_pending=1, max_age_steps=3)
    made = fit(let_go, stop, callback, epochs=4)
    return {
        "status": [[each["epoch"], each["status"], each.get("skipped")] for each in callback.history],
        "best": callback.best_val_loss,
        "keras": [None if each != each else each for each in made.history.history["val_loss"]],
        "stop_best": stop.best,
    }


def others() -> Any:
    """Add our loggers, an unknown metric, and Keras's own validation."""
    said.clear()
    with tempfile.TemporaryDirectory() as folder:
        logs = KerasCallbacks([JsonLogger()], logging_dir=folder)
        stop = keras.callbacks.EarlyStopping("val_accuracy", mode="max", patience=1)
        fit(logs, stop, beside(Script(*LOSSES), val_freq=2), epochs=4)
        records = json.loads(Path(folder, "trainer_logs.json").read_text())
    made = make()
    made.fit(X, Y, epochs=2, verbose=0, validation_data=(X, Y), callbacks=[beside()])
    return {
        "records": [[each["global_step"], each["epoch"], each["eval_loss"]] for each in records if "eval_loss" in each],
        "said": list(said),
        "keras": len(made.history.history["val_loss"]),
    }


def elsewhere() -> Any:
    """Evaluate in another process, which gets the model and the data by value."""
    weights, callback = Weights(), beside(val_compute="subprocess", verbose=True)
    fit(weights, callback, epochs=2)
    fresh = make()
    fresh.set_weights(weights.at[0])
    return {"rows": callback.history, "inline": evaluate(fresh, (X, Y))}


def tensorboard() -> Any:
    if backend != "tensorflow":
        return None  # Keras's needs it
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        fit(keras.callbacks.TensorBoard(folder), beside(Script(*LOSSES)), epochs=3)
        events = EventAccumulator(f"{folder}/validation").Reload()
        return [
            [each.step, round(float(keras.ops.convert_to_numpy(each.tensor_proto.float_val[0])), 3)]
            if each.tensor_proto.float_val
            else [each.step, round(float(np.frombuffer(each.tensor_proto.tensor_content, "float32")[0]), 3)]
            for each in events.Tensors("epoch_loss")
        ]


def stops_on_every_rank() -> Any:
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    weights, callback = Weights(), beside(Script(*LOSSES))
    made = fit(stop, weights, callback, epochs=8)
    told = [[each["epoch"], each["val_loss"]] for each in callback.history]
    return [len(weights.at), is_same(made.get_weights(), weights.at[2]), told]


def raises_on_every_rank() -> Any:
    try:
        fit(beside(lambda model, payload: 1 / 0, on_error="raise"), epochs=3)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def ranks() -> Any:
    """Train two ranks alike. They are forked before this process has trained anything."""

    def rank_main(rank: int, folder: str, said: Any) -> None:
        import torch

        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
        said.put([rank, stops_on_every_rank(), raises_on_every_rank()])
        torch.distributed.barrier()

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        said = context.Queue()
        crew = [context.Process(target=rank_main, args=(rank, folder, said), daemon=True) for rank in range(2)]
        for each in crew:
            each.start()
        found = [said.get(timeout=60) for _ in crew]
        for each in crew:
            each.join(60)
    return [told for _, *told in sorted(found)]


def main() -> None:
    gc.enable()
    gc.freeze()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("skyward.training").addHandler(handler)
    found = {
        "ranks": ranks() if backend == "torch" else None,
        "rows": rows(),
        "decisions": decisions(),
        "inline": inline(),
        "failures": failures(),
        "ages": ages(),
        "others": others(),
        "tensorboard": tensorboard(),
        "elsewhere": elsewhere() if backend == "jax" else None,
    }
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
