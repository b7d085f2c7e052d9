"""Train on scikit-learn's digits with TensorFlow's MultiWorkerMirroredStrategy, on two nodes.

python examples/13_tensorflow.py
"""

from __future__ import annotations

import skyward as sky


@sky.compute
@sky.integrations.tensorflow  # the strategy finds its workers by TF_CONFIG
@sky.stdout(only="head")
def train(epochs: int) -> tuple[float, int]:
    import keras
    import tensorflow as tf
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)

    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

    show = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: print(f"epoch {epoch + 1:2d}  loss {logs['loss']:.4f}", flush=True)
    )
    # Every worker has all the data; the strategy gives each its half of every batch of 64.
    model.fit(x_train, y_train, batch_size=64, epochs=epochs, verbose=0, callbacks=[show])
    _, accuracy = model.evaluate(x_test, y_test, batch_size=450, verbose=0)
    return accuracy, strategy.num_replicas_in_sync


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        results = train(epochs=10) @ pool
        accuracy, replicas = results[0]
        assert results[1] == results[0]
        print(f"trained on {replicas} replicas: test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
