"""The callback counts the tokens of each trainer's batches, unless the user counts them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from skyward.training import (
    DiLoCoCallback,
    HFCallbacks,
    LightningCallbacks,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from skyward.training.diloco.token_count import TokenCount
from tests.training.diloco.runs import TOKEN, serving

TOKENS = 7
STEPS, BATCH = 2, 4


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(TOKENS) % 5
        return {"input_ids": ids, "labels": ids}


class Reader(nn.Module):
    """A model of text, as those of Hugging Face are called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.out(self.embedding(input_ids))
        assert labels is not None
        return {"loss": nn.functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


class Sees(TrainerCallback):
    """Notes the tokens that the worker has counted since its base round, after each step."""

    def __init__(self, joining: DiLoCoCallback) -> None:
        self.joining = joining
        self.counts: list[int] = []

    def on_step_end(self, **kwargs: Any) -> None:
        self.counts.append(self.joining.state_dict()["tokens"])


class CountsItself(TrainerCallback):
    def __init__(self, joining: DiLoCoCallback) -> None:
        self.joining = joining

    def on_pre_optimizer_step(self, **kwargs: Any) -> None:
        self.joining.count_tokens(3)


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DILOCO_TOKEN", TOKEN)
    with serving(weighting="tokens") as server:
        yield DiLoCoCallback(server.address, sync_every=100, worker_id="a", heartbeat_interval=0)


def arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def ours(folder: Path, *callbacks: TrainerCallback) -> None:
    Trainer(Reader(), TrainingArguments(**arguments(folder)), train_dataset=Texts(), callbacks=[*callbacks]).train()


def huggingfaces(folder: Path, *callbacks: TrainerCallback) -> None:
    import transformers

    chosen = transformers.TrainingArguments(**arguments(folder), report_to="none")
    transformers.Trainer(Reader(), chosen, train_dataset=Texts(), callbacks=[HFCallbacks(callbacks)]).train()


def lightnings(folder: Path, *callbacks: TrainerCallback) -> None:
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]  # it has no types here
        def __init__(self) -> None:
            super().__init__()
            self.reader = Reader()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.reader(batch["input_ids"], batch["labels"])["loss"]  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_steps=STEPS,
        accumulate_grad_batches=2,
        callbacks=[LightningCallbacks(callbacks)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Texts(), batch_size=BATCH))


LIGHTNING = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


@pytest.mark.parametrize("train", [ours, huggingfaces, pytest.param(lightnings, marks=LIGHTNING)])
def test_a_trainer_counts_tokens_by_itself(train: Any, joining: DiLoCoCallback, tmp_path: Path) -> None:
    sees = Sees(joining)
    train(tmp_path, joining, sees)
    in_a_step = 2 * BATCH * TOKENS
    assert sees.counts == [in_a_step, 2 * in_a_step]


def test_tokens_that_the_user_counts_replace_those(joining: DiLoCoCallback, tmp_path: Path) -> None:
    sees = Sees(joining)
    ours(tmp_path, joining, CountsItself(joining), sees)
    assert sees.counts == [3, 6]


def test_only_batches_of_text_in_training_count() -> None:
    counted: list[int] = []
    model = Reader()
    count = TokenCount(model, counted.append)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    model(ids, ids)
    model(input_ids=ids.clone(), labels=ids)
    with torch.no_grad():
        model(ids.clone(), ids)
    model.eval()(ids.clone(), ids)
    assert counted == [6, 6]
    images = nn.Linear(3, 1)
    with_images = TokenCount(images, counted.append)
    images(torch.zeros(2, 3))
    for copied in (copy.deepcopy(model.train()), pickle.loads(pickle.dumps(model))):
        copied(ids.clone(), ids)
    count.close()
    with_images.close()
    model(ids.clone(), ids)
    assert counted == [6, 6]
