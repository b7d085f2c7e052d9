"""The samples of the integrations' specification, as a user pastes them: run by test_specified_samples.py.

Only the provider, `.cuda()` and the nccl backend are changed, because there is neither a cloud nor a GPU here. Samples
that only need two nodes share a pool, or each of them would import its framework again. Each sample ends with a check
of the specification's promise.

python -m tests.acceptance.specified_samples [SAMPLE...]     # prints one line for each sample
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import skyward as sky

lines: list[str] = []
two_nodes = sky.ComputePool(provider=sky.Local(), nodes=2, logs=lambda line: lines.append(line.text))

# Decorator order: `@sky.compute` is the outermost, an integration below it sets the runtime up on the node.


@sky.compute
@sky.integrations.torch
def rank_environment() -> dict[str, str]:
    import torch.distributed as dist

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {"backend": dist.get_backend(), **{name: os.environ[name] for name in names}}


def decorator_order() -> None:
    assert not {"torch", "jax", "keras", "tensorflow"} & set(sys.modules), "`import skyward` imports a framework"
    assert type(rank_environment()).__name__ == "PendingCompute"
    first, second = rank_environment() @ two_nodes
    alone = rank_environment() >> two_nodes
    assert (first["RANK"], second["RANK"], alone["RANK"]) == ("0", "1", "0")
    assert (first["WORLD_SIZE"], second["WORLD_SIZE"], alone["WORLD_SIZE"]) == ("2", "2", "1")
    assert (first["NODE_RANK"], second["NODE_RANK"]) == ("0", "1")
    assert {first["backend"], second["backend"]} == {"gloo"}
    assert (first["MASTER_ADDR"], first["MASTER_PORT"]) == (second["MASTER_ADDR"], second["MASTER_PORT"])


# Output control stacks with an integration.


@sky.compute
@sky.stdout(only="head")
@sky.integrations.torch
def announce() -> int:
    info = sky.instance_info()
    assert info is not None
    print(f"training on node {info.node}")
    return info.node


def output_control() -> None:
    assert announce() @ two_nodes == [0, 1]
    two_nodes.close()  # then all lines have come
    assert [line for line in lines if "training" in line] == ["training on node 0"]


# PyTorch: DDP averages gradients over the nodes.


@sky.compute
@sky.integrations.torch
def ddp_gradient() -> float:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    layer = torch.nn.Linear(1, 1, bias=False)
    model = DDP(layer)
    model(torch.full((1, 1), 8.0 * (dist.get_rank() + 1))).sum().backward()
    assert layer.weight.grad is not None
    return float(layer.weight.grad)


def pytorch() -> None:
    assert ddp_gradient() @ two_nodes == [12.0, 12.0]  # the mean of 8 and 16


# Keras: the backend stands before Keras is imported, and the seed counts on every node.


@sky.compute
@sky.integrations.keras(backend="jax", seed=42)
def keras_weights() -> tuple[str, int, list[float]]:
    import jax
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    return keras.backend.backend(), jax.process_count(), model.get_weights()[0].ravel().tolist()


def keras() -> None:
    first, second = keras_weights() @ two_nodes
    assert first[:2] == ("jax", 2)
    assert first == second


# JAX: all devices of all nodes form one mesh.


@sky.compute
@sky.integrations.jax()
def jax_devices() -> dict[str, Any]:
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_COUNT")
    return {
        "devices": len(jax.devices()),
        "sum": int(process_allgather(np.array([jax.process_index() + 1])).sum()),
        "environment": {name: os.environ.get(name) for name in names},
    }


def jax() -> None:
    first, second = jax_devices() @ two_nodes
    assert first["devices"] == second["devices"] == 2
    assert first["sum"] == second["sum"] == 3
    assert first["environment"]["JAX_NUM_PROCESSES"] == "2"
    assert second["environment"]["JAX_PROCESS_ID"] == "1"
    assert None not in first["environment"].values(), first["environment"]


# Hugging Face: the Trainer finds the world by itself.


@sky.compute
@sky.integrations.transformers(backend="gloo")
def fine_tune() -> tuple[int, float]:
    import tempfile

    import torch
    from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    rows = [{"input_ids": torch.arange(8) + i, "labels": torch.tensor(i % 2)} for i in range(32)]
    config = DistilBertConfig(vocab_size=50, dim=32, hidden_dim=64, n_layers=1, n_heads=2, num_labels=2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=4,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model=DistilBertForSequenceClassification(config), args=arguments, train_dataset=rows, eval_dataset=rows
        )
        trainer.train()
        return arguments.world_size, trainer.evaluate()["eval_loss"]


def transformers() -> None:
    first, second = fine_tune() @ two_nodes
    assert first == second
    assert first[0] == 2


# joblib and scikit-learn: `n_jobs=-1` goes to the pool, and the default backend is back afterwards.


def square(x: int) -> int:
    return x**2


def joblib_pool() -> None:
    from joblib import Parallel, delayed, effective_n_jobs, parallel_config

    with sky.integrations.JoblibPool(provider=sky.Local(), nodes=2, concurrency=4):
        results = Parallel(n_jobs=-1)(delayed(square)(x) for x in range(100))
        assert effective_n_jobs(-1) == 8
    assert results == [x**2 for x in range(100)]
    with parallel_config(n_jobs=3):
        assert "skyward" not in type(Parallel()._backend).__module__


def search() -> Any:
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    return GridSearchCV(SVC(), {"C": [0.1, 1, 10], "kernel": ["rbf", "linear"]}, cv=3, n_jobs=-1)


def check_search(grid: Any) -> None:
    from sklearn.base import clone
    from sklearn.datasets import load_iris
    from sklearn.model_selection import cross_val_score

    x, y = load_iris(return_X_y=True)
    grid.fit(x, y)
    here = clone(grid).set_params(n_jobs=1).fit(x, y)
    assert grid.best_params_ == here.best_params_
    assert grid.best_score_ == here.best_score_
    assert list(grid.cv_results_["mean_test_score"]) == list(here.cv_results_["mean_test_score"])
    assert len(cross_val_score(grid.best_estimator_, x, y, cv=4, n_jobs=-1)) == 4


def scikit_learn_pool() -> None:
    with sky.integrations.ScikitLearnPool(provider=sky.Local(), nodes=2, concurrency=2):
        check_search(search())


def manual_backend() -> None:
    with sky.integrations.sklearn_backend(two_nodes):
        check_search(search())


SAMPLES: dict[str, Callable[[], None]] = {
    "decorator order": decorator_order,  # first: it looks at what `import skyward` has imported
    "pytorch": pytorch,
    "keras": keras,
    "jax": jax,
    "transformers": transformers,
    "joblib pool": joblib_pool,
    "scikit-learn pool": scikit_learn_pool,
    "manual backend": manual_backend,
    "output control": output_control,  # last: it closes the pool
}


if __name__ == "__main__":
    from tests.acceptance.checks import run_checks

    with two_nodes:
        run_checks(SAMPLES, sys.argv[1:])
