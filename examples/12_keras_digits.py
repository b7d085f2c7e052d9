"""Train a convolutional network on scikit-learn's digits with Keras on JAX: one model, two nodes.

python examples/12_keras_digits.py
JAX_PLATFORMS=cpu python examples/12_keras_digits.py    # on a machine with a single GPU: JAX wants one for each node
"""

from __future__ import annotations

import skyward as sky


@sky.compute
@sky.integrations.keras(backend="jax", seed=0, distribution="data_parallel")
@sky.stdout(only="head")
def train(epochs: int) -> tuple[float, float, int]:
    import jax
    import keras
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x = (x / 16).reshape(-1, 8, 8, 1).astype("float32")
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])

    # Each rank gives its own part, in batches of 16: a step is taken with the 32 samples of both.
    x_train, y_train = sky.shard(x_train, y_train, shuffle=True, drop_last=True)
    show = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: print(f"epoch {epoch + 1:2d}  loss {logs['loss']:.4f}", flush=True)
    )
    model.fit(x_train, y_train, batch_size=16, epochs=epochs, verbose=0, callbacks=[show])

    # The loss and the accuracy are those of all ranks, for what each of them gives.
    _, accuracy = model.evaluate(*sky.shard(x_test, y_test, drop_last=True), batch_size=225, verbose=0)
    return accuracy, float(keras.ops.norm(model.trainable_variables[0])), jax.device_count()


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        first, second = train(epochs=8) @ pool
        assert first == second  # accuracy, and the size of a weight: it is one model
        accuracy, _, devices = first
        print(f"trained on {devices} devices: test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
