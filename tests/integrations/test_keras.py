"""Keras's integration on its three backends. Only the nodes import Keras."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.errors import UsageError
from skyward.integrations.base import integrations_of
from skyward.integrations.keras import KerasBackend, KerasIntegration
from skyward.pool.pool import ComputePool
from skyward.testing import IntegrationSuite
from skyward.values.launch import ProcessLaunch
from tests.few_modules import lean_frameworks
from tests.integrations.test_tensorflow import rank

BACKENDS: tuple[KerasBackend, ...] = ("jax", "torch", "tensorflow")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder on the path of the nodes."""
    folder = tmp_path_factory.mktemp("modules")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def keras_pool(folder: Path) -> Iterator[ComputePool]:
    """Open one pool for the whole file, so that its nodes import each backend once.

    Its environment is wrong about Keras.
    """
    image = sky.Image(env={"KERAS_BACKEND": "numpy"})
    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=2, image=image) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool(keras_pool: ComputePool) -> ComputePool:
    return keras_pool


class TestKerasConforms(IntegrationSuite):
    """The conformance suite on jax, which is the default."""

    decorator = staticmethod(sky.integrations.keras)
    framework = "keras"

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, keras_pool: ComputePool) -> ComputePool:
        return keras_pool

    @staticmethod
    def is_initialized() -> bool:
        import jax
        import keras

        return keras.config.backend() == "jax" and bool(jax.distributed.is_initialized())

    @staticmethod
    def place() -> tuple[int, int]:
        import jax

        return jax.process_index(), jax.process_count()

    @staticmethod
    def total(value: float) -> float:
        import jax.numpy as jnp
        from jax.experimental.multihost_utils import process_allgather

        return float(process_allgather(jnp.float32(value)).sum())


# Options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"backend": "theano"}, "backend"),
        ({"backend": None}, "backend"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"seed": True}, "seed"),
        ({"distribution": "model_parallel"}, "distribution"),
        ({"processes_per_node": "two"}, "processes_per_node"),
    ],
)
def test_an_option_out_of_its_range_is_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match=field):
        sky.integrations.keras(**options)


def test_options_are_shown_on_the_function() -> None:
    @sky.integrations.keras(backend="torch", seed=7, distribution="data_parallel", processes_per_node="auto")
    def train() -> None: ...

    (integration,) = integrations_of(train)
    options: dict[str, Any] = {"seed": 7, "distribution": "data_parallel", "processes_per_node": "auto"}
    assert integration == KerasIntegration(backend="torch", **options)
    assert integration.ranks_per_node == "auto"


@every_backend
def test_it_builds_on_the_integration_of_its_backend(backend: KerasBackend) -> None:
    integration = KerasIntegration(backend=backend, processes_per_node=2)
    assert (integration.runtime.name, integration.runtime.ranks_per_node) == (backend, 2)
    environment = integration.environment(rank())
    assert environment.pop("KERAS_BACKEND") == backend
    assert environment == integration.runtime.environment(rank())


def test_the_backend_is_chosen_before_any_import_of_the_ranks() -> None:
    tensorflow = sky.integrations.tensorflow
    stacked = tensorflow(sky.integrations.keras(backend="torch")(lambda: None))
    preload = ProcessLaunch(integrations=integrations_of(stacked)).preload
    assert preload.index("KERAS_BACKEND=torch") < preload.index("tensorflow") < preload.index("keras")


# The backend and its runtime --------------------------------------------------------------------------------------


@every_backend
def test_a_module_that_imports_keras_at_its_top_has_the_backend(
    pool: ComputePool, folder: Path, monkeypatch: pytest.MonkeyPatch, backend: KerasBackend
) -> None:
    (folder / f"training_{backend}.py").write_text(
        "import os\nimport keras\nimport skyward as sky\n"
        "AT_THE_TOP = os.environ['KERAS_BACKEND'], keras.config.backend()\n"
        "@sky.compute\n"
        f"@sky.integrations.keras(backend={backend!r})\n"
        "def chosen():\n"
        "    return AT_THE_TOP, type(keras.Variable(1.0).value).__module__.partition('.')[0]\n"
    )
    # The client does not need Keras.
    with monkeypatch.context() as patch:
        stub: Any = ModuleType("keras")
        stub.config = SimpleNamespace(backend=lambda: "none")
        patch.setitem(sys.modules, "keras", stub)
        patch.setenv("KERAS_BACKEND", "the client's")
        module = import_module(f"training_{backend}")
    library = "jaxlib" if backend == "jax" else backend
    assert module.chosen() @ pool == [((backend, backend), library)] * 2


def test_another_backend_in_the_process_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnNothing(KerasIntegration):
        @property
        def runtime(self) -> Any:
            return SimpleNamespace(session=lambda rank: contextlib.nullcontext())

    stub: Any = ModuleType("keras")
    stub.config = SimpleNamespace(backend=lambda: "tensorflow")
    stub.__spec__ = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "keras", stub)
    with (
        pytest.raises(UsageError, match="backend='torch': keras already runs on tensorflow"),
        OnNothing(backend="torch").session(rank()),
    ):
        pass


def test_with_torch_there_is_one_group(pool: ComputePool) -> None:
    def world() -> tuple[int, int]:
        import torch
        import torch.distributed as dist

        total = torch.ones(1)
        dist.all_reduce(total)
        return int(total.item()), torch.initial_seed()

    torch, keras = sky.integrations.torch(seed=5), sky.integrations.keras(backend="torch")
    assert sky.compute(torch(keras(world)))() @ pool == [(2, 5)] * 2
    assert sky.compute(keras(torch(world)))() @ pool == [(2, 5)] * 2


def test_with_tensorflow_there_is_one_cluster(pool: ComputePool) -> None:
    def workers() -> int:
        import tensorflow as tf

        return int(tf.distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync)

    tensorflow, keras = sky.integrations.tensorflow, sky.integrations.keras(backend="tensorflow")
    assert sky.compute(tensorflow(keras(workers)))() @ pool == [2, 2]
    assert sky.compute(keras(tensorflow(workers)))() @ pool == [2, 2]


@every_backend
def test_ranks_are_forked_from_a_process_that_has_imported_keras(pool: ComputePool, backend: KerasBackend) -> None:
    @sky.compute
    @sky.integrations.keras(backend=backend)
    def parents_command() -> bool:
        return b"skyward.node.slot.zygote import main" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()

    assert parents_command() @ pool == [True, True]


@every_backend
def test_a_seed_sets_every_generator_alike_on_one_node_and_on_all(pool: ComputePool, backend: KerasBackend) -> None:
    def draw() -> tuple[float, float, float]:
        import keras

        return random.random(), float(np.random.rand()), float(keras.random.uniform((1,))[0])

    seeded = sky.compute(sky.integrations.keras(backend=backend, seed=11)(draw))
    first, second = seeded() @ pool
    assert first == second
    assert first == seeded() >> pool
    random.seed(11)
    np.random.seed(11)
    assert first[:2] == (random.random(), float(np.random.rand()))
    other, another = sky.compute(sky.integrations.keras(backend=backend)(draw))() @ pool
    assert len({first, other, another}) == 3


# Training ---------------------------------------------------------------------------------------------------------

Weights = list[Any]


def digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x[:1280] / 16).astype("float32"), y[:1280]


def train(x: Any, y: Any, batch_size: int) -> tuple[list[float], float, Weights]:
    """Return the losses of the epochs, the accuracy in the last, and the weights."""
    import keras

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    fitted = model.fit(x, y, batch_size=batch_size, epochs=3, shuffle=False, verbose=0)
    return fitted.history["loss"], fitted.history["accuracy"][-1], model.get_weights()


@pytest.mark.parametrize("backend", [pytest.param("jax", marks=pytest.mark.slow), "torch"])
def test_by_default_each_rank_trains_its_own_model_on_its_shard(pool: ComputePool, backend: KerasBackend) -> None:
    x, y = digits()

    @sky.compute
    @sky.integrations.keras(backend=backend, seed=1)
    def apart(x: Any, y: Any) -> tuple[list[float], float, Weights]:
        x, y = sky.shard(x, y)
        return train(x, y, batch_size=64)

    ranks = apart(x, y) @ pool
    for number in range(2):
        losses, _, weights = apart(*sky.shard(x, y, node=number, total_nodes=2)) >> pool
        np.testing.assert_allclose(ranks[number][0], losses, rtol=1e-5)
        for mine, alone in zip(ranks[number][2], weights, strict=True):
            np.testing.assert_allclose(mine, alone, atol=1e-5)
    assert abs(ranks[0][2][0] - ranks[1][2][0]).max() > 1e-3


# On TensorFlow, test_tensorflow.py does the same with a strategy of the user's.
@pytest.mark.parametrize("backend", ["jax", "torch", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_together_ranks_train_like_one_process(pool: ComputePool, backend: KerasBackend) -> None:
    x, y = digits()

    @sky.compute
    @sky.integrations.keras(backend=backend, seed=1, distribution="data_parallel")
    def together() -> tuple[list[float], float, Weights]:
        info = sky.instance_info()
        assert info is not None
        assert info.world_size is not None
        if backend == "tensorflow":  # its strategy divides each batch
            return train(x, y, batch_size=64)
        # The batches are the same: of each, the rank's part.
        each = 64 // info.world_size
        mine = np.arange(len(x)).reshape(-1, info.world_size, each)[:, info.rank].reshape(-1)
        return train(x[mine], y[mine], batch_size=each)

    (losses, accuracy, weights), second = together() @ pool
    assert second[:2] == (losses, accuracy)
    for mine, other in zip(weights, second[2], strict=True):
        assert (mine == other).all()
    alone_losses, alone_accuracy, alone_weights = together() >> pool
    assert alone_losses[2] < 0.9 * alone_losses[0]
    np.testing.assert_allclose(losses, alone_losses, rtol=1e-4)
    assert accuracy == pytest.approx(alone_accuracy, abs=2 / len(x))
    for mine, alone in zip(weights, alone_weights, strict=True):
        np.testing.assert_allclose(mine, alone, atol=1e-4)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_without_a_seed_ranks_that_train_together_begin_alike(pool: ComputePool, backend: KerasBackend) -> None:
    @sky.compute
    @sky.integrations.keras(backend=backend, distribution="data_parallel")
    def first_weight() -> float:
        import keras

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        return float(model.get_weights()[0][0, 0])

    drawn = [first_weight() @ pool for _ in range(2)]
    assert all(first == second for first, second in drawn)
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_model_that_ranks_have_trained_together_is_saved_and_loaded_alone(
    pool: ComputePool, tmp_path: Path, backend: KerasBackend
) -> None:
    paths = [str(tmp_path / f"{number}.keras") for number in range(2)]

    @sky.compute
    @sky.integrations.keras(backend=backend, seed=1, distribution="data_parallel")
    def fit() -> Any:
        import keras

        x = np.linspace(-1, 1, 32, dtype="float32").reshape(16, 2)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(*sky.shard(x, x.sum(1), drop_last=True), batch_size=4, verbose=0)
        info = sky.instance_info()
        assert info is not None
        assert info.rank is not None
        if sky.is_head or backend == "jax":
            model.save(paths[info.rank])
        return model.get_weights()

    @sky.compute
    @sky.integrations.keras(backend=backend)
    def load() -> Any:
        import keras

        return keras.saving.load_model(paths[0]).get_weights()

    first, _ = fit() @ pool
    for trained, saved in zip(first, load() >> pool, strict=True):
        assert (trained == saved).all()


@pytest.mark.parametrize(
    ("backend", "method", "size", "numbers"),
    [
        ("torch", "fit", 65, r"batches in an epoch: \[2, 1\]"),
        ("jax", "fit", 67, r"samples: \[34, 33\]"),  # two batches in both, and the last ones differ
        ("jax", "evaluate", 65, r"samples: \[33, 32\]"),
    ],
)
def test_unequal_parts_are_an_error_and_no_hang(
    pool: ComputePool, backend: KerasBackend, method: str, size: int, numbers: str
) -> None:
    @sky.compute
    @sky.integrations.keras(backend=backend, seed=1, distribution="data_parallel")
    def run() -> None:
        import keras

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        x = np.ones((size, 2), "float32")
        getattr(model, method)(*sky.shard(x, x[:, :1]), batch_size=32, verbose=0)

    with pytest.raises(UsageError, match=f"unequal numbers of {numbers}.*drop_last=True"):
        run() @ pool


@every_backend
def test_a_rank_that_raises_within_fit_is_the_error_though_the_others_wait(
    pool: ComputePool, backend: KerasBackend
) -> None:
    @sky.compute
    @sky.integrations.keras(backend=backend, seed=1, distribution="data_parallel")
    def fit() -> None:
        import keras

        info = sky.instance_info()
        assert info is not None

        def stumble(epoch: int, logs: Any) -> None:
            if info.rank == 1 and epoch == 1:
                raise ValueError("bad batch")

        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
        model.compile("sgd", "mse")
        x = np.ones((64, 64), "float32")
        stumbling = keras.callbacks.LambdaCallback(on_epoch_begin=stumble)
        model.fit(x, x[:, :10], epochs=100_000, verbose=0, callbacks=stumbling)

    begin = time.monotonic()
    with pytest.raises(ValueError, match="bad batch") as raised:
        fit() @ pool
    assert time.monotonic() - begin < 60
    assert "Rank 1 of 2 failed first" in "\n".join(raised.value.__notes__)


# On torch, where skyward averages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss scaled"])
def test_on_torch_a_step_is_taken_with_the_mean_of_the_gradients(pool: ComputePool, scaled: bool) -> None:
    x = np.linspace(-1, 1, 8 * 3, dtype="float32").reshape(8, 3)
    y = x.sum(1, keepdims=True) ** 2

    @sky.compute
    @sky.integrations.keras(backend="torch", distribution="data_parallel")
    def step() -> Any:
        import keras

        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        optimizer = keras.optimizers.SGD(0.5)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
        model.compile(optimizer, "mse")
        model.train_on_batch(*sky.shard(x, y))
        return model.get_weights()[0]

    first, second = step() @ pool
    assert (first == second).all()
    expected = np.ones((3, 1)) - 0.5 * 2 / 8 * x.T @ (x @ np.ones((3, 1)) - y)
    np.testing.assert_allclose(first, expected, rtol=1e-5)


def test_on_torch_a_variable_that_one_rank_does_not_use_is_moved_in_both(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.keras(backend="torch", distribution="data_parallel")
    def step() -> list[float]:
        import keras
        import torch

        info = sky.instance_info()
        assert info is not None
        used, other, nobodys = (keras.Variable(1.0) for _ in range(3))
        optimizer = keras.optimizers.SGD(1.0)
        loss = used.value * 2.0 if info.rank == 0 else used.value * 4.0 + other.value * 6.0
        loss.backward()
        variables = [used, other, nobodys]
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)
        return [float(v.value) for v in variables]

    assert step() @ pool == [[1 - 3.0, 1 - 3.0, 1.0]] * 2


def test_on_torch_the_results_of_fit_are_alike_and_callbacks_decide_alike(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.keras(backend="torch", distribution="data_parallel")
    def fit() -> tuple[dict[str, list[float]], Weights]:
        import keras

        info = sky.instance_info()
        assert info is not None
        x, y = sky.shard(*digits())
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization()])
        model.add(keras.layers.Dropout(0.2))
        model.add(keras.layers.Dense(10))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        if info.rank == 1:  # as if only one had loaded the result of another training
            model.set_weights([weight + 1 for weight in model.get_weights()])
        # From its own part alone, each rank would decide otherwise.
        stopping = keras.callbacks.EarlyStopping("val_accuracy", patience=0)
        fitted = model.fit(
            x, y, epochs=8, batch_size=64, verbose=0, callbacks=[stopping], validation_data=(x[:10], y[:10])
        )
        return fitted.history, model.get_weights()

    (history, weights), (other_history, other_weights) = fit() @ pool
    assert history == other_history
    for mine, other in zip(weights, other_weights, strict=True):
        assert (mine == other).all()


def test_on_torch_keras_is_restored_afterwards(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.keras(backend="torch")
    def outer() -> list[tuple[bool, bool]]:
        import keras

        from skyward.integrations.keras_parallel import data_parallel
        from skyward.node.slot.runtime import current_rank

        seen = []

        def look() -> None:
            seen.append(("fit" in vars(keras.Model), "apply" in vars(keras.optimizers.Optimizer)))

        mine = current_rank()
        assert mine is not None
        look()
        with data_parallel(keras, mine, is_seeded=True):
            look()
        look()
        return seen

    assert outer() @ pool == [[(False, False), (True, True), (False, False)]] * 2


def test_buckets_hold_tensors_of_one_kind_up_to_a_size() -> None:
    # The choice of tensors that are sent together changes no result, only the time of gangs of several GPUs.
    from skyward.integrations.keras_parallel import _buckets

    def tensor(kind: str, mebibytes: float) -> Any:
        number = int(mebibytes * 2**20)
        return SimpleNamespace(dtype=kind, device="cpu", numel=lambda: number, element_size=lambda: 1)

    tensors = [tensor("a", 10), tensor("b", 1), tensor("a", 10), tensor("a", 10), tensor("b", 1), tensor("a", 60)]
    assert _buckets(tensors) == [[0, 2], [1, 4], [3], [5]]


# Devices of jax ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("upper", ["keras", "jax"])
def test_options_of_jax_apply_in_any_order_and_idle_devices_are_reported_once(pool: ComputePool, upper: str) -> None:
    def train(distribution: str | None) -> tuple[int, str, list[tuple[str, bool]]]:
        import os
        import warnings

        import jax
        import keras
        import numpy as np

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if distribution:
                keras.distribution.set_distribution(keras.distribution.DataParallel(devices=jax.local_devices()))
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            for _ in range(2):
                model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=8, verbose=0)
        here = sys._getframe().f_code.co_filename
        told = [(str(w.message), w.filename == here) for w in caught if "devices" in str(w.message)]
        return jax.local_device_count(), os.environ["JAX_LOCAL_DEVICE_COUNT"], told

    decorators = [sky.integrations.keras(backend="jax"), sky.integrations.jax(local_device_count=4)]
    for decorate in decorators if upper == "jax" else reversed(decorators):
        train = decorate(train)
    ((*count, told),) = sky.compute(train)(None) @ pool.node(0)
    assert count == [4, "4"]
    ((message, is_at_fit),) = told
    assert message.startswith("distribution=None: the model trains on one of this rank's 4 devices;")
    assert is_at_fit
    if upper == "keras":
        assert (sky.compute(train)("own") >> pool)[2] == [], "the function has distributed it itself"
