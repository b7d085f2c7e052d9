"""TensorFlow's integration: clusters of real workers. Only the nodes import TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import skyward as sky
from skyward.errors import GangHung, TaskTimeout, UsageError
from skyward.integrations.base import integrate, integrations_of
from skyward.integrations.tensorflow import TensorFlowIntegration
from skyward.pool.pool import ComputePool
from skyward.testing import IntegrationSuite
from skyward.values.topology import Peer, Rank
from tests.few_modules import lean_frameworks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder on the path of the nodes."""
    folder = tmp_path_factory.mktemp("modules")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def tensorflow_pool(folder: Path) -> Iterator[ComputePool]:
    """Open one pool for the whole file, so that its nodes import tensorflow once."""
    behind_a_proxy = sky.Image(
        env={"http_proxy": "http://127.0.0.1:9"}
    )  # nothing listens there; gRPC would use it anyway
    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=2, image=behind_a_proxy) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool(tensorflow_pool: ComputePool) -> ComputePool:
    return tensorflow_pool


class TestTensorFlowConforms(IntegrationSuite):
    decorator = staticmethod(sky.integrations.tensorflow)
    framework = "tensorflow"

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, tensorflow_pool: ComputePool) -> ComputePool:
        return tensorflow_pool

    @staticmethod
    def is_initialized() -> bool:
        return "TF_CONFIG" in os.environ  # the strategy, which opens the connections, is the user's to make

    @staticmethod
    def place() -> tuple[int, int]:
        import tensorflow as tf

        cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        return cluster.task_id, cluster.cluster_spec().num_tasks("worker")

    @staticmethod
    def total(value: float) -> float:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        mine = strategy.run(lambda: tf.constant(value, tf.float64))
        return float(strategy.reduce("SUM", mine, axis=None))


# Options and environment ------------------------------------------------------------------------------------------


def test_an_option_out_of_its_range_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="processes_per_node"):
        sky.integrations.tensorflow(processes_per_node="two")  # type: ignore[call-overload]


def test_options_are_shown_on_the_function() -> None:
    @sky.integrations.tensorflow(processes_per_node="auto")
    def train() -> None: ...

    (integration,) = integrations_of(train)
    assert integration == TensorFlowIntegration(processes_per_node="auto")
    assert integration.ranks_per_node == "auto"


def rank(**changes: Any) -> Rank:
    values: dict[str, Any] = {
        "rank": 3,
        "world_size": 4,
        "local_rank": 1,
        "local_world_size": 2,
        "node": 5,
        "node_rank": 1,
        "nodes": 2,
        "head_addr": "10.0.0.1",
        "head_port": 21_000,
        "local_addr": "10.0.0.6",
        "peers": (Peer(node=0, private_ip="10.0.0.1"), Peer(node=5, private_ip="10.0.0.6")),
    }
    return Rank(**{**values, **changes})


def test_every_worker_has_its_own_address_and_port() -> None:
    config = json.loads(TensorFlowIntegration().environment(rank())["TF_CONFIG"])
    assert config == {
        "cluster": {"worker": ["10.0.0.1:21001", "10.0.0.1:21002", "10.0.0.6:21003", "10.0.0.6:21004"]},
        "task": {"type": "worker", "index": 3},
    }


def test_ports_stay_in_their_range_and_ipv6_addresses_are_bracketed() -> None:
    peers = (Peer(node=0, private_ip="fd00::1"), Peer(node=5, private_ip="fd00::6"))
    config = json.loads(TensorFlowIntegration().environment(rank(head_port=29_997, peers=peers))["TF_CONFIG"])
    workers = config["cluster"]["worker"]
    assert workers == ["[fd00::1]:29998", "[fd00::1]:29999", "[fd00::6]:20000", "[fd00::6]:20001"]


def test_neighbours_divide_the_cores_and_leave_each_other_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)

    def chosen(**changes: Any) -> tuple[str | None, str]:
        environment = TensorFlowIntegration().environment(rank(**changes))
        return environment.get("CUDA_VISIBLE_DEVICES"), environment["TF_NUM_INTRAOP_THREADS"]

    assert chosen() == (None, "8")
    assert chosen(accelerators=8, devices=tuple(range(8)), local_world_size=1, local_rank=0) == (None, "16")
    assert chosen(accelerators=4, devices=(0, 1, 2, 3)) == (None, "8"), "its process sees no others"
    assert chosen(accelerators=4, devices=(1, 3)) == ("1,3", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert chosen(accelerators=2, devices=(1,)) == ("GPU-b", "8")


def test_the_users_choices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    environment = TensorFlowIntegration().environment(rank())
    assert {"OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_CPP_MIN_LOG_LEVEL"} <= environment.keys()
    monkeypatch.setenv("OMP_NUM_THREADS", "5,1")
    assert TensorFlowIntegration().environment(rank())["TF_NUM_INTRAOP_THREADS"] == "5"
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "3")
    environment = TensorFlowIntegration().environment(rank())
    assert not {"TF_CPP_MIN_LOG_LEVEL", "TF_NUM_INTRAOP_THREADS"} & environment.keys()


def test_workers_reach_each_other_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    assert "no_grpc_proxy" not in TensorFlowIntegration().environment(rank())
    monkeypatch.setenv("HTTPS_PROXY", "http://10.0.0.99:3128")
    assert TensorFlowIntegration().environment(rank())["no_grpc_proxy"] == "10.0.0.1,10.0.0.6"
    monkeypatch.setenv("no_proxy", "localhost")
    assert TensorFlowIntegration().environment(rank())["no_grpc_proxy"] == "localhost,10.0.0.1,10.0.0.6"


# Training ---------------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_all_workers(pool: ComputePool) -> None:
    x = np.linspace(-1, 1, 8 * 3).reshape(8, 3)
    y = (x.sum(1, keepdims=True) ** 2).astype("float64")

    @sky.compute
    @sky.integrations.tensorflow
    def step() -> Any:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            weight = tf.Variable(tf.ones((3, 1), tf.float64), aggregation=tf.VariableAggregation.MEAN)
        mine_x, mine_y = sky.shard(x, y)

        def train() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.matmul(mine_x, weight) - mine_y) ** 2)
            weight.assign_sub(0.5 * tape.gradient(loss, weight))

        tf.function(lambda: strategy.run(train))()
        return weight.numpy()

    first, second = step() @ pool
    assert (first == second).all()
    # The mean over equal shards is the mean over all.
    expected = np.ones((3, 1)) - 0.5 * 2 / 8 * x.T @ (x @ np.ones((3, 1)) - y)
    np.testing.assert_allclose(first, expected, rtol=1e-12)
    np.testing.assert_allclose(step() >> pool, expected, rtol=1e-12)


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_that_have_ended_stay_until_the_last_one_has_read_their_messages(pool: ComputePool, slow: int) -> None:
    @sky.compute
    @sky.integrations.tensorflow
    def meet() -> bool:
        """Return whether the other worker answers long after its function has ended."""
        import tensorflow as tf

        tf.distribute.MultiWorkerMirroredStrategy()
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        if rank != slow:
            return True
        time.sleep(1)
        host, _, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][1 - slow].rpartition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5):
            return True
        return False

    assert meet() @ pool == [True, True]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_ends_the_wait_of_those_that_have_ended(pool: ComputePool, failing: int) -> None:
    @sky.compute
    @sky.integrations.tensorflow
    def fail() -> None:
        import tensorflow as tf

        tf.distribute.MultiWorkerMirroredStrategy()
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == failing:
            time.sleep(0.5)
            raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        fail().with_options(timeout_s=60) @ pool


def test_keras_fits_on_two_nodes_like_one_process(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.tensorflow
    def fit() -> tuple[list[float], float, list[Any]]:
        import keras
        import tensorflow as tf
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x, y = (x[:1280] / 16).astype("float32"), y[:1280]
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss, metrics=["accuracy"])
        history = model.fit(x, y, batch_size=64, epochs=3, shuffle=False, verbose=0)  # of all workers together
        return history.history["loss"], model.evaluate(x, y, verbose=0)[1], model.get_weights()

    (losses, accuracy, weights), second = fit() @ pool
    assert second[:2] == (losses, accuracy)
    for mine, other in zip(weights, second[2], strict=True):
        assert (mine == other).all()
    alone_losses, alone_accuracy, alone_weights = fit() >> pool
    assert alone_losses[0] > alone_losses[2]
    assert alone_accuracy > 0.6
    np.testing.assert_allclose(losses, alone_losses, rtol=1e-4)
    for mine, other in zip(weights, alone_weights, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)


def test_a_strategy_may_be_made_at_the_top_of_a_module(
    pool: ComputePool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "with_a_strategy.py").write_text(
        "import skyward as sky\nimport tensorflow as tf\n"
        "STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()\n"
        "@sky.compute\n@sky.integrations.tensorflow\n"
        "def workers():\n    return float(STRATEGY.reduce('SUM', STRATEGY.run(lambda: tf.constant(1.0)), axis=None))\n"
    )
    # The client does not need TensorFlow.
    with monkeypatch.context() as patch:
        stub: Any = ModuleType("tensorflow")
        stub.distribute = SimpleNamespace(MultiWorkerMirroredStrategy=lambda: None)
        patch.setitem(sys.modules, "tensorflow", stub)
        module = import_module("with_a_strategy")
    assert module.workers() @ pool == [2.0, 2.0]


def test_ranks_are_forked_from_a_process_that_has_imported_tensorflow(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.tensorflow
    def parents_command() -> bool:
        return b"skyward.node.slot.zygote import main" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()

    assert parents_command() @ pool == [True, True]


class Nothing(TensorFlowIntegration):
    """A gang without a session."""

    name = "nothing"

    @contextlib.contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        yield


def test_the_strategys_own_reduce_is_back_afterwards(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.tensorflow
    def inner() -> bool:
        import tensorflow as tf

        return "reduce" in vars(tf.distribute.MultiWorkerMirroredStrategy)

    def outer() -> tuple[bool, bool]:
        import tensorflow as tf

        return inner.local(), "reduce" in vars(tf.distribute.MultiWorkerMirroredStrategy)

    assert sky.compute(integrate(outer, Nothing()))() >> pool == (True, False)


# Failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before the strategy", "with the strategy"])
def test_a_worker_that_raises_is_the_error_though_the_others_wait_for_it(pool: ComputePool, moment: str) -> None:
    @sky.compute
    @sky.integrations.tensorflow
    def work() -> None:
        import tensorflow as tf

        info = sky.instance_info()
        assert info is not None
        if info.rank == 1 and moment == "before the strategy":
            raise ValueError("bad batch")
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        if info.rank == 1:
            raise ValueError("bad batch")
        strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None)

    begin = time.monotonic()
    with pytest.raises(ValueError, match="bad batch") as raised:
        work() @ pool
    assert time.monotonic() - begin < 60
    assert "Rank 1 of 2 failed first" in "\n".join(raised.value.__notes__)


def test_a_gang_whose_workers_do_not_meet_ends_at_its_timeout(pool: ComputePool) -> None:
    @sky.compute
    @sky.integrations.tensorflow
    def work() -> None:
        import tensorflow as tf

        info = sky.instance_info()
        assert info is not None
        if info.rank == 0:
            tf.distribute.MultiWorkerMirroredStrategy()
        time.sleep(600)

    begin = time.monotonic()
    with pytest.raises(TaskTimeout, match="timeout_s=1"):
        work().with_options(timeout_s=1) @ pool
    assert time.monotonic() - begin < 60


@dataclass(frozen=True, kw_only=True)
class Occupied(TensorFlowIntegration):
    """Integration that binds the port of worker 1 in the first launch, like another program."""

    marker: str

    def environment(self, rank: Rank) -> dict[str, str]:
        environment = super().environment(rank)
        if rank.rank == 1 and not os.path.exists(self.marker):
            Path(self.marker).write_text(environment["TF_CONFIG"])
            _, _, port = json.loads(environment["TF_CONFIG"])["cluster"]["worker"][1].rpartition(":")
            stranger = socket.create_server((rank.local_addr, int(port)))
            stranger.detach()  # it stays open as long as the process
        return environment


def test_a_taken_port_makes_the_gang_meet_at_others(pool: ComputePool, tmp_path: Path) -> None:
    marker = tmp_path / "first-cluster"

    def work() -> tuple[int, str]:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        # A worker that left now would close connections by which the other one still joins.
        Path(tmp_path, str(json.loads(os.environ["TF_CONFIG"])["task"]["index"])).touch()
        while not all(Path(tmp_path, name).exists() for name in "01"):
            time.sleep(0.05)
        return strategy.num_replicas_in_sync, os.environ["TF_CONFIG"]

    (size, _), (_, config) = sky.compute(integrate(work, Occupied(marker=str(marker))))() @ pool
    assert size == 2
    assert json.loads(marker.read_text())["cluster"] != json.loads(config)["cluster"]


def test_a_missing_rank_is_named(pool: ComputePool) -> None:
    def work() -> None:
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            time.sleep(600)

        def total() -> Any:
            return tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))

        tf.function(lambda: strategy.run(total))()

    with pytest.raises(GangHung, match="rank 1 .node 1. is in no collective") as raised:
        sky.compute(hang_timeout_s=2)(sky.integrations.tensorflow(work))() @ pool
    assert raised.value.waiting == (0,)
