"""A word means the same in a callback's `control`, in a `Client` and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyward.cli import main
from skyward.training import TrainerControlCallback
from skyward.training.control import find
from tests.training.trainer.regression import callback, run

WORDS = {"stop": "stop", "save_and_stop": "save-stop", "abort": "abort"}
"""Name of the method, and of the subcommand of `skyward train`."""
SAVED = {
    ("stop", "no"): [],
    ("stop", "epoch"): ["checkpoint-2"],
    ("save_and_stop", "no"): ["checkpoint-2"],
    ("save_and_stop", "epoch"): ["checkpoint-2"],
    ("abort", "no"): [],
    ("abort", "epoch"): [],
}


def by_control(word: str, control: Any) -> None:
    getattr(control, word)()


def by_client(word: str, control: Any) -> None:
    getattr(find("words"), word)()


def by_command_line(word: str, control: Any) -> None:
    options = ["--yes"] if word == "abort" else []
    assert main(["train", WORDS[word], "words", "--wait", "0", *options]) == 0


@pytest.mark.parametrize("way", [by_control, by_client, by_command_line])
@pytest.mark.parametrize(("word", "strategy"), SAVED)
def test_a_word_saves_and_ends_alike_whoever_says_it(tmp_path: Path, word: str, strategy: str, way: Any) -> None:
    def asks(state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            way(word, control)

    # The callback that asks stands first, because commands are taken at the end of a step.
    callbacks = [callback(on_step_end=asks), TrainerControlCallback(job_id="words")]
    made = run(tmp_path, callbacks=callbacks, save_strategy=strategy, max_steps=20)
    assert made.state.global_step == 2
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == SAVED[word, strategy]
