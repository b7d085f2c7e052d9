"""The facades with evaluations in another process, and on a node of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.training.evaluation import Timeline
from skyward.training.sakura import SakuraHFCallback
from tests.few_modules import lean_frameworks
from tests.training.frameworks.hf.test_evaluation import Inline, trainer
from tests.training.frameworks.lightning.test_evaluation import Line as LightningLine
from tests.training.frameworks.lightning.test_evaluation import beside, loader
from tests.training.frameworks.models import DATA, Line, error_of, perplexity, tiny_lora, token_rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


def test_hf_evaluates_on_a_node_of_a_pool(tmp_path: Path) -> None:
    timeline = Timeline()
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        ours = SakuraHFCallback(
            model_factory=Line,
            eval_fn=error_of,
            eval_payload=DATA[:4],
            val_compute=pool.node(1),
            timeline=timeline,
            on_backpressure="block",
            verbose=False,
        )
        inline = Inline(error_of, DATA[:4])
        trainer(tmp_path, inline, ours).train()
    assert [row["loss"] for row in ours.history] == [each["loss"] for each in inline.metrics]
    assert {row["worker"] for row in ours.history} == {"node 1"}


def test_hf_with_peft_evaluates_in_another_process(tmp_path: Path) -> None:
    rows = token_rows()
    inline = Inline(perplexity, rows)
    ours = SakuraHFCallback(
        model_factory=tiny_lora,
        eval_fn=perplexity,
        eval_payload=rows,
        val_compute="subprocess",
        gate="always",
        on_backpressure="block",
        verbose=False,
    )
    trainer(tmp_path, inline, ours, model=tiny_lora(), data=rows, learning_rate=0.05).train()
    assert [row["loss"] for row in ours.history] == [each["loss"] for each in inline.metrics]


def test_lightning_evaluates_in_another_process(tmp_path: Path) -> None:
    here = beside(tmp_path, LightningLine(), val_loader=loader())
    with lean_frameworks():
        there: Any = beside(tmp_path, LightningLine(), val_loader=loader(), val_compute="subprocess")
    assert [record.metrics for record in there.records] == [record.metrics for record in here.records]
    assert {row["worker_name"] for row in there.history} == {"subprocess"}
