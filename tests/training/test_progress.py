"""ProgressCallback and InfoCallback in a file, on a real terminal and in a real notebook."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import nbclient
import nbformat
import pytest

from skyward.errors import UsageError
from skyward.training import Alone, TrainerState
from skyward.training.callbacks import InfoCallback, ProgressCallback
from skyward.training.callbacks.info import facts_of_run
from tests.training.producer import Producer
from tests.waiting import until

ROOT = Path(__file__).parents[2]


def shown(run: Producer, stream: io.StringIO) -> list[str]:
    """Return the lines so far, without their times."""
    lines = stream.getvalue().splitlines()
    return [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "", each) for each in lines]


def started(**options: Any) -> tuple[Producer, io.StringIO]:
    stream = io.StringIO()
    run = Producer([ProgressCallback(output_stream=stream, **options)])
    run.begin()
    return run, stream


# Lines ----------------------------------------------------------------------------------------------------------------


def test_a_file_gets_lines_with_the_columns_whose_metrics_are_logged() -> None:
    run, stream = started()
    run.step(loss=2.5, learning_rate=1e-3, tok_per_sec=12345, mfu=0.421, peak_mem_allocated=[2**30, 3 * 2**30])
    run.step(loss=2.25, learning_rate=1e-3, tok_per_sec=12345, mfu=0.421, peak_mem_allocated=[2**30, 3 * 2**30])
    assert [each.split() for each in shown(run, stream)] == [
        ["step", "epoch", "loss", "lr", "tok/s", "mfu", "peak_mem"],
        ["1", "0.1", "2.50000", "1.00e-03", "12,345", "42.1%", "3.000", "GiB"],
        ["2", "0.2", "2.25000", "1.00e-03", "12,345", "42.1%", "3.000", "GiB"],
    ]
    assert len({len(each) for each in shown(run, stream)}) == 1  # they are columns
    assert "\r" not in stream.getvalue()


def test_a_header_repeats_and_comes_again_when_the_columns_change() -> None:
    run, stream = started(header_interval=3)
    for _ in range(4):
        run.step(loss=1.0)
    run.step(loss=1.0, grad_norm=1.0)
    heads = [at for at, each in enumerate(shown(run, stream)) if "step" in each]
    assert heads == [0, 4, 6]
    run, stream = started(header_interval=0)
    for _ in range(50):
        run.step(loss=1.0)
    assert sum("step" in each for each in shown(run, stream)) == 1
    run, stream = started()
    for _ in range(41):
        run.step(loss=1.0)
    assert sum("step" in each for each in shown(run, stream)) == 3


def test_columns_are_changed_added_and_erased() -> None:
    run, stream = started(
        step_columns={
            "loss": {"fmt": ".1f"},
            "epoch": None,
            "never": None,
            "accuracy": {"label": "acc", "width": 6, "fmt": ".0%"},
            "temperature": {"fmt": lambda value: f"{value} °C"},
        }
    )
    run.step(loss=2.54, accuracy=0.5, temperature=40, unnamed=3)
    assert [each.split() for each in shown(run, stream)] == [
        ["step", "loss", "acc", "temperature"],
        ["1", "2.5", "50%", "40", "°C"],
    ]


def test_the_summary_has_labels_and_suffixes_and_no_erased_metrics() -> None:
    run, stream = started(final_metrics={"train_loss": None, "train_runtime": {"suffix": " seconds"}, "epoch": None})
    run.step()
    run.end(my_metric=3, total_flos=0)  # not known
    lines = [" ".join(each.split()) for each in shown(run, stream)]
    assert lines == ["training has ended", "Runtime: 1.50 seconds", "Steps: 1", "my_metric: 3"]


def test_an_evaluation_is_one_line_although_it_is_reported_twice() -> None:
    run, stream = started()
    run.step(loss=1.0)
    run.evaluate(eval_loss=2.0, eval_runtime=1.0, eval_samples_per_second=9.0, as_hugging_face_does=True)
    run.evaluate(eval_other_loss=3.0)
    assert [each.split() for each in shown(run, stream)][2:] == [
        ["1", "eval_loss:", "2.00000"],
        ["1", "eval_other_loss:", "3.00000"],
    ]


def test_a_value_that_does_not_fit_its_format_is_shown_unformatted() -> None:
    run, stream = started()
    run.step(loss="much", learning_rate=float("nan"), tok_per_sec=float("inf"))
    assert shown(run, stream)[1].split() == ["1", "0.1", "much", "nan", "inf"]


def test_each_line_is_written_once_however_many_callbacks_exist() -> None:
    handlers = {name: list(logging.getLogger(name).handlers) for name in ("", "progress_logger", "info_logger")}
    threads = set(threading.enumerate())
    for _ in range(3):
        ProgressCallback()
        InfoCallback(verbose=True)
    run, stream = started()
    run.step(loss=1.0)
    run.handler.close()
    assert len(shown(run, stream)) == 2
    assert handlers == {name: list(logging.getLogger(name).handlers) for name in handlers}
    until(lambda: set(threading.enumerate()) <= threads)


@pytest.mark.parametrize(("max_steps", "made", "shown"), [(-1, 3, "2.5"), (10, 2, "2"), (10, sys.maxsize, None)])
def test_epochs_are_the_planned_ones(max_steps: int, made: int, shown: str | None) -> None:
    args = SimpleNamespace(max_steps=max_steps, num_train_epochs=2.5)
    facts = facts_of_run(args, TrainerState(max_steps=10, num_train_epochs=made), Alone())
    assert (facts.get("epochs"), facts["steps"]) == (shown, "10")


def test_other_ranks_show_nothing() -> None:
    class Second:
        rank, world_size, local_rank = 1, 2, 1

    stream = io.StringIO()
    run = Producer(
        [ProgressCallback(output_stream=stream), InfoCallback(output_stream=stream)],
        ranks=Second(),  # type: ignore[arg-type]
    )
    run.begin()
    run.step(loss=1.0)
    run.end()
    alone = Producer([ProgressCallback(output_stream=stream)])
    alone.state.is_world_process_zero = False  # a world that is not torch's
    alone.begin()
    alone.step(loss=1.0)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"header_interval": -1}, "header_interval"),
        ({"step_columns": {"loss": {"breadth": 3}}}, r"step_columns\['loss'\]"),
        ({"final_metrics": {"loss": 3}}, r"final_metrics\['loss'\]"),
        ({"output_stream": "printer"}, "output_stream"),
    ],
)
def test_illegal_arguments_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match=field):
        ProgressCallback(**options)


# Bars -----------------------------------------------------------------------------------------------------------------


class Terminal:
    """A pseudo-terminal: text written to `stream` is read from `text`."""

    def __init__(self, columns: int = 100) -> None:
        self.end, other = os.openpty()
        termios.tcsetwinsize(other, (30, columns))
        self.stream: TextIO = os.fdopen(other, "w")
        self._said: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self.end, 65536):
                self._said.append(data)
        except OSError:  # the other end is closed
            return

    def close(self) -> str:
        self.stream.close()
        self._reader.join()
        os.close(self.end)
        return b"".join(self._said).decode()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    import tqdm

    interval, tqdm.tqdm.monitor_interval = tqdm.tqdm.monitor_interval, 0  # no thread of tqdm's in these tests
    yield Terminal()
    tqdm.tqdm.monitor_interval = interval


def test_a_terminal_gets_a_bar_that_begins_at_the_resumed_step_and_rows_above_it(terminal: Terminal) -> None:
    run = Producer([ProgressCallback(output_stream=terminal.stream)])
    run.state.global_step = 6
    run.begin()
    for _ in range(4):
        run.step(loss=1.5)
    run.end()
    text = terminal.close()
    assert "6/10" in text
    assert "5/10" not in text
    assert "10/10" in text
    assert text.count("1.50000") == 4
    assert "training has ended" in text


def test_the_bars_end_follows_max_steps(terminal: Terminal) -> None:
    run = Producer([ProgressCallback(output_stream=terminal.stream)])
    run.begin()
    run.step()
    run.state.max_steps = 5
    run.step()
    run.state.max_steps = -1
    run.step()
    run.end()
    text = terminal.close()
    assert "0/10" in text
    assert "2/5" in text
    assert "3it" in text


def test_an_evaluations_bar_knows_its_length_from_the_last_one(terminal: Terminal) -> None:
    class Loader:
        def __len__(self) -> int:
            return 100

    for loader in (iter(()), Loader()):
        run = Producer([ProgressCallback(output_stream=terminal.stream)], context={"eval_dataloader": loader})
        run.begin()
        run.evaluate(batches=3, eval_loss=1.0)
        run.step()
        run.evaluate(batches=3, eval_loss=0.5)
        run.end()
    text = terminal.close()
    assert "0/100" in text  # as the loader says
    assert text.count("0/3") == 2
    assert "eval_loss: 0.50000" in text


def test_bars_and_lines_can_be_chosen(terminal: Terminal) -> None:
    stream = io.StringIO()
    run = Producer([ProgressCallback(use_tqdm=True, output_stream=stream)])
    run.begin()
    run.step(loss=1.0)
    run.handler.close()
    assert "1/10" in stream.getvalue()
    run = Producer([ProgressCallback(use_tqdm=False, output_stream=terminal.stream)])
    run.begin()
    run.step(loss=1.0)
    run.end()
    assert "%" not in terminal.close()
    without_width = Terminal(columns=0)
    run = Producer([ProgressCallback(output_stream=without_width.stream)])
    run.begin()
    run.step(loss=1.0)
    run.end()
    assert "1.00000" in without_width.close()


NOTEBOOK = """
import sys
sys.path.insert(0, {root!r})
from skyward.training.callbacks import ProgressCallback, InfoCallback
from tests.training.producer import Producer
run = Producer([InfoCallback(), ProgressCallback()], max_steps=3)
run.begin()
for step in range(3):
    run.step(loss=1.5)
run.evaluate(batches=2, eval_loss=1.0)
run.end()
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_notebook_without_widgets_shows_a_bar_as_text() -> None:
    cell: dict[str, Any] = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None}
    cells = [{**cell, "source": NOTEBOOK.format(root=str(ROOT))}]
    notebook: Any = nbformat.from_dict({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})  # type: ignore[no-untyped-call]
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    assert {each.output_type for each in outputs} == {"stream"}  # no HTML, no widget that would stay empty
    text = "".join(each.text for each in outputs)
    assert "3/3" in text
    assert text.count("1.50000") == 3
    assert "eval_loss: 1.00000" in text
    assert "Warning" not in text


# Info -----------------------------------------------------------------------------------------------------------------


def test_info_describes_a_run_with_more_on_request() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(1000, 10), torch.nn.Linear(10, 1))
    model[0].weight.requires_grad_(False)
    loader: Any = torch.utils.data.DataLoader(list(range(64)), batch_size=8)  # type: ignore[arg-type]
    told = {}
    for verbose in (False, True):
        stream = io.StringIO()
        run = Producer(
            [InfoCallback(verbose, output_stream=stream)],
            context={"model": model, "train_dataloader": loader, "optimizer": torch.optim.SGD(model.parameters())},
        )
        run.args.hub_token = "hf_abc"  # type: ignore[attr-defined]
        run.begin()
        told[verbose] = stream.getvalue()
    facts = dict(each.split(":", 1) for each in told[False].splitlines())
    assert {key: value.strip() for key, value in facts.items()} == {
        "model": "Sequential",
        "parameters": "10.02k",
        "trained": "21",
        "examples": "64",
        "steps": "10",
        "batch of a device": "8",
        "batch of a step": "8",
        "ranks": "1",
    }
    assert told[True].startswith(told[False].splitlines()[0].split(":")[0])
    assert "in_features=1000" in told[True]
    assert "SGD" in told[True]
    assert "hf_abc" not in told[True]


def test_info_needs_nothing_but_args_state_and_control() -> None:
    stream = io.StringIO()
    run = Producer([InfoCallback(True, output_stream=stream)])
    run.args = object()  # type: ignore[assignment]
    run.begin()
    assert "ranks" in stream.getvalue()
