"""Keras without `validation_data=`: each epoch's weights are scored beside the next one, on any backend.

python examples/30_keras_evaluation.py [torch] [jax] [tensorflow]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import skyward as sky

BACKENDS = ("torch", "jax", "tensorflow")


def make_model() -> Any:
    """What is trained, and what workers put weights into: compiled, for they call `evaluate`."""
    import keras

    layers = [keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([*layers, keras.layers.Dropout(0.1)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


def score(model: Any, data: Any) -> dict[str, float]:
    """Runs on the worker."""
    scores: dict[str, float] = model.evaluate(*data, verbose=0, return_dict=True)
    return scores


@sky.compute
def train(folder: str) -> str:
    import keras
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    from skyward.training.evaluation import Timeline
    from skyward.training.sakura import SakuraKerasCallback

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split((x / 16).astype("float32"), y, random_state=0)
    keras.utils.set_random_seed(0)
    model = make_model()
    timeline = Timeline()
    beside = SakuraKerasCallback(
        model_factory=make_model,
        val_fn=score,
        val_payload=(x_test, y_test),  # sent to a worker once
        val_compute=None,  # a thread of this process; or "subprocess", or a pool or a node of it
        model_path=f"{folder}/best.weights.h5",  # gets the weights that were scored best
        monitor="val_accuracy",
        gate="always",
        timeline=timeline,
        verbose=False,
    )
    stop = keras.callbacks.EarlyStopping("val_accuracy", mode="max", patience=4, restore_best_weights=True)
    model.fit(x_train, y_train, batch_size=64, epochs=8, verbose=0, callbacks=[stop, beside])

    timeline.html(f"{folder}/timeline.html")
    restored = score(model, (x_test, y_test))["accuracy"]  # EarlyStopping has put the best weights back
    assert beside.best_val_loss is not None
    epochs = len(beside.history)
    is_best = abs(restored - beside.best_val_loss) < 1e-6
    waited = timeline.summary()
    return (
        f"{keras.config.backend()}: best accuracy of {epochs} epochs {beside.best_val_loss:.3f}, restored: {is_best}; "
        f"copies took {waited.snapshot_s / waited.snapshots * 1e3:.1f} ms each"
    )


def main() -> None:
    for backend in sys.argv[1:] or BACKENDS:
        image = sky.Image(env={"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"})
        with tempfile.TemporaryDirectory() as folder, sky.ComputePool(provider=sky.Local(), image=image) as pool:
            print(train(folder) >> pool)
            print("  written:", *sorted(each.name for each in Path(folder).iterdir()))


if __name__ == "__main__":
    main()
