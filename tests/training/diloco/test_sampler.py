"""`DiLoCoSampler` end to end: workers of one server share the rows of a data set, under loops of torch and trainers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from skyward.errors import UsageError
from skyward.training import DiLoCoCallback
from skyward.training.diloco import DiLoCoSampler, DiLoCoServer, DiLoCoWorker, sampler
from tests.doctests import run_examples
from tests.training.diloco.runs import TOKEN, make_model, serving, together, worker_of
from tests.training.diloco.test_callback import LIGHTNING
from tests.training.trainer.regression import Line, run
from tests.waiting import until

ROWS, H, BATCH = 24, 3, 2


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows that tell which of them were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return {"x": torch.tensor(index / ROWS), "labels": torch.tensor(1.0)}


def steps_of(worker: DiLoCoWorker, rows: Rows, **options: Any) -> Iterator[int]:
    """Yield the number of each step, across epochs, before it is counted."""
    loader = DataLoader(rows, BATCH, sampler=DiLoCoSampler(rows, worker, **options))
    number = 0
    while True:
        for _ in loader:
            yield number
            worker.count_step()
            number += 1


def train(server: DiLoCoServer, name: str, rows: Rows, steps: int, *, shuffle: bool = True, **options: Any) -> None:
    with worker_of(server, options.pop("model", None) or make_model(), None, name, **options) as worker:
        for number in steps_of(worker, rows, shuffle=shuffle):
            if number == steps:
                break


def test_workers_read_each_row_once_in_an_epoch() -> None:
    """Two workers read 12 rows in a round, and 24 in an epoch: each ends with a round."""
    rows = {"a": Rows(), "b": Rows()}
    with serving(make_model(), num_workers=2) as server:
        together(*(partial(train, server, name, rows[name], 4 * H) for name in rows))
    epochs = [rows["a"].read[at : at + 12] + rows["b"].read[at : at + 12] for at in (0, 12)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * 2
    assert epochs[0] != epochs[1]


def test_a_worker_that_joins_reads_on_where_the_other_is() -> None:
    rows = {"a": Rows(), "b": Rows()}
    with serving(make_model()) as server, worker_of(server, make_model(), None, "a") as first:
        steps = steps_of(first, rows["a"], shuffle=False)
        for _ in range(H):
            next(steps)

        def go_on() -> None:
            until(lambda: len(server.status()["workers"]) == 2)
            for _ in range(H + 1):  # the first of them ends the round
                next(steps)

        together(partial(train, server, "b", rows["b"], H, shuffle=False), go_on)
    assert rows["a"].read[: 4 * H] == [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16]
    assert rows["b"].read[: 2 * H] == [7, 9, 11, 13, 15, 17]


def test_fragments_that_travel_beside_training_leave_no_row_twice() -> None:
    """Each worker reads on between sending a fragment and its answer. Those rows are not dealt again."""
    rows = {"a": Rows(), "b": Rows()}
    options: dict[str, Any] = {"sync_every": 6, "num_fragments": 2, "fragment_sync_delay": 1}
    with serving(make_model(), num_workers=2) as server:
        together(*(partial(train, server, name, rows[name], 6, **options) for name in rows))
    assert sorted(rows["a"].read[:12] + rows["b"].read[:12]) == list(range(ROWS))


def test_a_worker_that_resumes_reads_the_same_rows_again() -> None:
    def read(worker: DiLoCoWorker, steps: int) -> list[int]:
        rows = Rows()
        loader = iter(DataLoader(rows, BATCH, sampler=DiLoCoSampler(rows, worker)))
        for _ in range(steps):
            next(loader)
            worker.count_step()
        return rows.read

    with serving(make_model()) as server:
        first = worker_of(server, make_model(), None, "a")
        first.start()
        read(first, H + 1)
        state = json.loads(json.dumps(first.state_dict()))
        rest = read(first, 4)
        second = worker_of(server, make_model(), None, "a")
        second.load_state_dict(state)
        with second:
            assert read(second, 4) == rest


def test_an_asynchronous_server_deals_no_rows() -> None:
    with (
        serving(make_model(), async_mode=True) as server,
        worker_of(server, make_model(), None, "a") as worker,
        pytest.raises(UsageError, match="DiLoCoSampler: its server deals no rows"),
    ):
        next(iter(DiLoCoSampler(range(4), worker)))


def test_without_a_server_all_rows_are_read() -> None:
    callback = DiLoCoCallback()
    plain = DiLoCoSampler(range(5), callback, shuffle=False)
    assert [*plain, *plain] == [0, 1, 2, 3, 4] * 2
    shuffled = DiLoCoSampler(range(100), DiLoCoCallback(), seed=3)
    state = shuffled.state_dict()
    epochs = list(shuffled), list(shuffled)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100))
    assert epochs[0] != epochs[1]
    shuffled.load_state_dict(state)
    assert list(shuffled) == epochs[0]


def test_the_length_is_that_of_one_worker() -> None:
    assert len(DiLoCoSampler(range(10), DiLoCoCallback())) == 10
    assert len(DiLoCoSampler(range(10), DiLoCoCallback(), num_workers=3)) == 3
    assert len(DiLoCoSampler(range(2), DiLoCoCallback(), num_workers=3)) == 1


def test_illegal_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="data_source: has no rows"):
        DiLoCoSampler([], DiLoCoCallback())
    with pytest.raises(UsageError, match="num_workers=0: must be a whole number >= 1"):
        DiLoCoSampler(range(3), DiLoCoCallback(), num_workers=0)


def test_the_example_runs() -> None:
    assert run_examples(sampler) > 3


# Trainers -------------------------------------------------------------------------------------------------------------


def test_a_trainer_shares_rows_with_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_TOKEN", TOKEN)
    rows = {"a": Rows(), "b": Rows()}
    with serving(num_workers=2) as server:
        joining = DiLoCoCallback(server.address, sync_every=H, worker_id="a", heartbeat_interval=0)
        loader = DataLoader(rows["a"], BATCH, sampler=DiLoCoSampler(rows["a"], joining))
        together(
            lambda: run(tmp_path, callbacks=[joining], data=loader, max_steps=2 * H, save_strategy="no"),
            partial(train, server, "b", rows["b"], 2 * H, model=Line()),
        )
        assert server.status()["round"] == 2
    assert sorted(rows["a"].read[:12] + rows["b"].read[:12]) == list(range(ROWS))


STEPS = ROWS // BATCH


def huggingfaces(folder: Path, joining: DiLoCoCallback, rows: Rows) -> None:
    from skyward.training import HFCallbacks
    from tests.training.frameworks.hf.test_callbacks import trainer

    made = trainer(folder, HFCallbacks([joining]), max_steps=STEPS)
    made.get_train_dataloader = lambda: DataLoader(rows, BATCH, sampler=DiLoCoSampler(rows, joining))
    made.train()


def lightnings(folder: Path, joining: DiLoCoCallback, rows: Rows) -> None:
    import lightning.pytorch as lightning

    from skyward.training import LightningCallbacks
    from tests.training.frameworks.lightning.test_callbacks import Line as Module

    trainer = lightning.Trainer(
        default_root_dir=folder,
        max_steps=STEPS,
        callbacks=[LightningCallbacks([joining], logging_steps=1)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(
        rows,
        BATCH,
        sampler=DiLoCoSampler(rows, joining),
        collate_fn=lambda read: (torch.stack([row["x"] for row in read]),),
    )
    trainer.fit(Module(), loader)


@pytest.mark.parametrize("train", [huggingfaces, pytest.param(lightnings, marks=LIGHTNING)])
def test_the_trainers_of_others_read_each_row_once_in_an_epoch(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_TOKEN", TOKEN)
    rows = Rows()
    with serving() as server:
        train(tmp_path, DiLoCoCallback(server.address, sync_every=H, worker_id="a", heartbeat_interval=0), rows)
        assert server.status()["round"] == STEPS / H
    assert sorted(rows.read[:ROWS]) == list(range(ROWS))
