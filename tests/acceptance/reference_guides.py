"""The guides of the reference skyward in its decorator form, on `sky.Local()`: run by test_reference_guides.py.

Each function below does the same as the guide of that number, with the same names, operators and options. The data is
made here or ships with scikit-learn, and the sizes are small. If a guide names something that does not exist in this
skyward, the name stays: the error has to give the right name, and the guide then runs in that form.

python -m tests.acceptance.reference_guides [GUIDE...]     # prints one line for each guide
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import skyward as sky

# 01 hello, 02 parallel execution, 03 broadcast


@sky.compute
def add(a: int, b: int) -> int:
    return a + b


@sky.compute
def total_of(numbers: list[int]) -> int:
    return sum(numbers)


@sky.compute
def partition(data: list[int]) -> dict[str, int]:
    info = sky.instance_info()
    assert info is not None
    mine = sky.shard(data)
    return {"node": info.node, "size": len(mine), "sum": sum(mine)}


def hello() -> None:
    with sky.ComputePool(provider=sky.Local()):
        assert add(1, 2) >> sky == 3


def parallel_execution() -> None:
    with sky.ComputePool(provider=sky.Local()) as pool:
        assert sky.gather(*[total_of(chunk) for chunk in ([1, 2, 3], [4, 5, 6], [7, 8, 9])]) >> pool == (6, 15, 24)
        first, second = (add(2, 3) & add(4, 5)) >> pool
        assert (first, second) == (5, 9)
        assert sorted(sky.gather(*[total_of([i] * 1000) for i in range(5)], stream=True) >> pool) == [
            1000 * i for i in range(5)
        ]


def broadcast() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=4) as pool:
        parts = partition(list(range(1000))) @ pool
        assert [part["node"] for part in parts] == [0, 1, 2, 3]
        assert sum(part["sum"] for part in parts) == sum(range(1000))


# 04 using accelerators: without a GPU, the guide's own fallback


@sky.compute
def accelerator_info() -> dict[str, Any]:
    import torch

    info = sky.instance_info()
    assert info is not None
    return {"accelerators": info.accelerators, "cuda": torch.cuda.is_available()}


def accelerators() -> None:
    wanted = sky.accelerators.T4()
    assert (wanted.name, wanted.count) == ("T4", 1)
    with sky.ComputePool(provider=sky.Local()) as pool:
        seen = accelerator_info() >> pool
        assert bool(seen["accelerators"]) == seen["cuda"]


# 05 data sharding


@sky.compute
def shard_of(xs: list[list[float]], ys: list[int]) -> tuple[int, list[int]]:
    x, y = sky.shard(xs, ys, shuffle=True, seed=42)
    assert all(round(row[0]) == label for row, label in zip(x, y, strict=True))
    return len(x), list(y)


@sky.compute
def shard_types() -> list[str]:
    import numpy as np

    return [type(sky.shard(data)).__name__ for data in (list(range(100)), tuple(range(100)), np.arange(100))]


def data_sharding() -> None:
    labels = list(range(1000))
    with sky.ComputePool(provider=sky.Local(), nodes=4, image=sky.Image(env={"GUIDE": "05"})) as pool:
        shards = shard_of([[float(label)] for label in labels], labels) @ pool
        assert sorted(label for _, ys in shards for label in ys) == labels
        assert [size for size, _ in shards] == [250] * 4
        assert shard_types() @ pool == [["list", "tuple", "ndarray"]] * 4


# 06 PyTorch distributed


@sky.compute
@sky.integrations.torch
def train_ddp(epochs: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    info = sky.instance_info()
    assert info is not None
    torch.manual_seed(0)
    x = torch.randn(512, 8)
    dataset = TensorDataset(x, (x.sum(dim=1) > 0).long())
    model: nn.Module = nn.Linear(8, 2)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    accuracy = 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        correct = seen = 0
        for xs, ys in loader:
            optimizer.zero_grad()
            output = model(xs)
            nn.functional.cross_entropy(output, ys).backward()
            optimizer.step()
            correct += int((output.argmax(dim=1) == ys).sum())
            seen += len(ys)
        stats = torch.tensor([correct, seen], dtype=torch.float64)
        dist.all_reduce(stats, op=dist.ReduceOp.SUM)
        accuracy = float(stats[0] / stats[1])
    return {"node": info.node, "is_head": info.is_head, "accuracy": accuracy}


def pytorch_distributed() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        first, second = train_ddp(epochs=3) @ pool
        assert (first["is_head"], second["is_head"]) == (True, False)
        assert first["accuracy"] == second["accuracy"] > 0.8


# 07 Keras training: one model on each node, each with its shard


@sky.compute
@sky.integrations.jax()
@sky.integrations.keras(backend="jax")
def train_keras(epochs: int) -> dict[str, Any]:
    import keras
    from sklearn.datasets import load_digits

    info = sky.instance_info()
    assert info is not None
    x, y = load_digits(return_X_y=True)
    x, y = sky.shard(x / 16.0, y, shuffle=True, seed=42)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, epochs=epochs, batch_size=32, verbose=0)
    return {
        "node": info.node,
        "backend": keras.backend.backend(),
        "samples": len(x),
        "accuracy": float(history.history["accuracy"][-1]),
    }


def keras_training() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        first, second = train_keras(epochs=15) @ pool
        assert (first["backend"], first["samples"], second["samples"]) == ("jax", 899, 898)
        assert first["accuracy"] > 0.6


# 08 Hugging Face fine-tuning: one node, no integration; a model from a configuration instead of the hub


@sky.compute
def finetune(epochs: int, output_dir: str) -> dict[str, Any]:
    import numpy as np
    import torch
    from datasets import Dataset
    from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 50, size=(128, 16))
    rows = Dataset.from_dict({"input_ids": tokens.tolist(), "labels": (tokens[:, 0] > 25).astype(int).tolist()})
    config = DistilBertConfig(vocab_size=50, dim=32, hidden_dim=64, n_layers=1, n_heads=2, num_labels=2)

    def accuracy(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}

    trainer = Trainer(
        model=DistilBertForSequenceClassification(config),
        args=TrainingArguments(
            output_dir=output_dir,
            num_train_epochs=epochs,
            per_device_train_batch_size=16,
            eval_strategy="epoch",
            save_strategy="no",
            fp16=torch.cuda.is_available(),
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=accuracy,
    )
    loss = trainer.train().training_loss
    return {"train_loss": loss, "eval_accuracy": trainer.evaluate()["eval_accuracy"]}


def huggingface_finetuning() -> None:
    with tempfile.TemporaryDirectory() as folder, sky.ComputePool(provider=sky.Local()) as pool:
        result = finetune(epochs=2, output_dir=folder) >> pool
        assert 0 < result["train_loss"] < 1.5
        assert 0 <= result["eval_accuracy"] <= 1


# 09 scikit-learn grid search, 10 joblib concurrency


def grid_search() -> None:
    from sklearn.datasets import load_digits
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import Pipeline
    from sklearn.svm import SVC

    x, y = load_digits(return_X_y=True)
    grid = [
        {"clf": [RandomForestClassifier(random_state=42)], "clf__n_estimators": [5, 10]},
        {"clf": [SVC()], "clf__C": [0.1, 1]},
    ]
    refused("Worker", "concurrency=4")
    with sky.integrations.ScikitLearnPool(provider=sky.Local(), nodes=2, concurrency=2):
        search = GridSearchCV(Pipeline([("clf", SVC())]), grid, cv=3, scoring="accuracy", n_jobs=-1)
        search.fit(x[:600], y[:600])
    assert type(search.best_params_["clf"]).__name__ == "SVC"
    assert len(search.cv_results_["params"]) == 4


def nap(x: int) -> int:
    time.sleep(0.01)
    return 2 * x


def joblib_concurrency() -> None:
    from joblib import Parallel, delayed

    with sky.integrations.JoblibPool(provider=sky.Local(), nodes=2, concurrency=10):
        assert Parallel(n_jobs=-1)(delayed(nap)(i) for i in range(400)) == [2 * i for i in range(400)]


# 11 local containers: the provider is `sky.Local()`


@sky.compute
def environment(name: str) -> str:
    return os.environ.get(name, "not set")


@sky.compute
def position() -> tuple[int, int, bool]:
    info = sky.instance_info()
    assert info is not None
    return info.node, info.total_nodes, info.is_head


def local_containers() -> None:
    refused("Container", "sky.Local")
    with sky.ComputePool(provider=sky.Local(), nodes=1, image=sky.Image(env={"MY_VAR": "it works"})) as pool:
        assert environment("MY_VAR") >> pool == "it works"
    with sky.ComputePool(provider=sky.Local(), nodes=3) as pool:
        assert position() @ pool == [(0, 3, True), (1, 3, False), (2, 3, False)]


# 12 several providers: does not exist yet, and says so


def multi_provider() -> None:
    refused("Spec", "any_of")
    refused("VastAI", "sky.SSH")


# 13 streaming


@sky.compute
def fibonacci(n: int) -> Iterator[int]:
    a, b = 0, 1
    for _ in range(n):
        yield a
        a, b = b, a + b


@sky.compute
def running_mean(data: Iterator[float]) -> list[float]:
    total, means = 0.0, []
    for count, x in enumerate(data, 1):
        total += x
        means.append(total / count)
    return means


@sky.compute
def moving_average(data: Iterator[float], window: int = 3) -> Iterator[float]:
    from collections import deque

    last: deque[float] = deque(maxlen=window)
    for x in data:
        last.append(x)
        yield sum(last) / len(last)


def streaming() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=1) as pool:
        assert list(fibonacci(10) >> pool) == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]
        assert running_mean(iter([1.0, 2.0, 3.0, 4.0])) >> pool == [1.0, 1.5, 2.0, 2.5]
        assert list(moving_average(iter([1.0, 2.0, 3.0, 4.0]), window=2) >> pool) == [1.0, 1.5, 2.5, 3.5]


# 14 worker executors


@sky.compute
def burn(task_id: int, seconds: float) -> tuple[int, int]:
    start, rounds = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        rounds += 1
    return task_id, rounds


def worker_executors() -> None:
    refused("Worker", "executor=")
    for executor in ("thread", "process"):
        with sky.ComputePool(provider=sky.Local(), concurrency=2, executor=executor, nodes=2) as pool:
            results = sky.gather(*(burn(i, 0.02) for i in range(8)), stream=True) >> pool
            assert sorted(task_id for task_id, _ in results) == list(range(8))


# 15 a torch model as argument and as value


@sky.compute
def fit(model: Any, x: Any, y: Any, epochs: int) -> Any:
    import torch

    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(epochs):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model.cpu()


def torch_model_roundtrip() -> None:
    import torch

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    index = sky.PipIndex(url="https://download.pytorch.org/whl/cpu", packages=["torch"])
    image = sky.Image(pip=["torch"], pip_indexes=[index])
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = x.sum(dim=1, keepdim=True)
    model = Classifier()
    before = float(torch.nn.functional.mse_loss(model(x), y))
    with sky.ComputePool(provider=sky.Local(), memory_gb=1, image=image) as pool:
        trained = fit(model, x, y, epochs=50) >> pool
    assert type(trained) is Classifier
    assert float(torch.nn.functional.mse_loss(trained(x), y)) < before / 4


def refused(name: str, advice: str) -> None:
    """Check that the name does not exist, and that the error tells a user of the reference what to write."""
    error = ""
    try:
        getattr(sky, name)
    except AttributeError as caught:
        error = str(caught)
    assert name in error, f"sky.{name} exists: run this guide as the reference has it"
    assert advice in error, error


GUIDES = {
    "01 hello": hello,
    "02 parallel execution": parallel_execution,
    "03 broadcast": broadcast,
    "04 using accelerators": accelerators,
    "05 data sharding": data_sharding,
    "06 pytorch distributed": pytorch_distributed,
    "07 keras training": keras_training,
    "08 huggingface finetuning": huggingface_finetuning,
    "09 scikit grid search": grid_search,
    "10 joblib concurrency": joblib_concurrency,
    "11 local containers": local_containers,
    "12 multi provider": multi_provider,
    "13 streaming": streaming,
    "14 worker executors": worker_executors,
    "15 torch model roundtrip": torch_model_roundtrip,
}


if __name__ == "__main__":
    from tests.acceptance.checks import run_checks

    run_checks(GUIDES, sys.argv[1:])
