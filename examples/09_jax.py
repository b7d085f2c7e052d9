"""Train a small network on scikit-learn's digits with JAX, on the devices of two nodes.

python examples/09_jax.py
JAX_PLATFORMS=cpu python examples/09_jax.py    # on a machine with a single GPU, which JAX gives to one process only
"""

from __future__ import annotations

import skyward as sky


@sky.compute
@sky.integrations.jax
@sky.stdout(only="head")
def train(epochs: int, learning_rate: float) -> tuple[float, int]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    # The devices of all processes, in one row: batches are split over it, parameters are the same everywhere.
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    def logits(parameters, x):
        (hidden, bias), (output, output_bias) = parameters
        return jax.nn.relu(x @ hidden + bias) @ output + output_bias

    def loss_of(parameters, x, y):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits(parameters, x)), y[:, None], axis=1).mean()

    @jax.jit
    def step(parameters, velocity, x, y):
        # The batch is one array over all nodes, so this is the gradient of the whole batch: JAX adds the psum.
        loss, gradient = jax.value_and_grad(loss_of)(parameters, x, y)
        velocity = jax.tree.map(lambda v, g: 0.9 * v - learning_rate * g, velocity, gradient)
        return jax.tree.map(jnp.add, parameters, velocity), velocity, loss

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        x.astype(np.float32) / 16, y, test_size=0.25, random_state=0, stratify=y
    )
    x_train, y_train = sky.shard(x_train, y_train)  # of this process

    first, second = jax.random.split(jax.random.key(0))  # the same key and so the same weights in every process
    parameters = [
        (jax.random.normal(first, (64, 64)) / 8, jnp.zeros(64)),
        (jax.random.normal(second, (64, 10)) / 8, jnp.zeros(10)),
    ]
    parameters = jax.device_put(parameters, everywhere)
    velocity = jax.tree.map(jnp.zeros_like, parameters)

    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(x_train))
        losses = []
        for rows in np.split(order[: len(order) // 32 * 32], len(order) // 32):
            batch = [jax.make_array_from_process_local_data(split, part[rows]) for part in (x_train, y_train)]
            parameters, velocity, loss = step(parameters, velocity, *batch)
            losses.append(loss)
        print(f"epoch {epoch + 1:2d}  loss {jnp.stack(losses).mean():.4f}", flush=True)

    guesses = jax.jit(logits)(parameters, jax.device_put(x_test, everywhere)).argmax(1)
    return (guesses == y_test).mean().item(), jax.device_count()


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        # `@` is every node: one program over all their devices. The value of each node is that of its first process.
        results = train(epochs=10, learning_rate=0.1) @ pool
        accuracy, devices = results[0]
        assert results[1] == results[0]
        print(f"trained on {devices} devices: test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
