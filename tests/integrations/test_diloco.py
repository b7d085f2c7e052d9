"""`sky.integrations.diloco`: ranks are workers of a server in the pool's program, by the pool's own channels."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import skyward as sky
from skyward import integrations
from skyward.errors import CheckpointSaveFailed, UsageError
from skyward.training.diloco import DiLoCoWorker
from skyward.training.diloco.pool_servers import forget
from skyward.wire.task_channel import losses
from tests.channels import Relayed
from tests.few_modules import lean_frameworks
from tests.training.diloco.runs import TOKEN, make_model, serving, state_of, step, together
from tests.training.diloco.runs import train as train_by_http

STEPS, SYNC_EVERY = 6, 3


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Relayed:
    return Relayed(folder=str(tmp_path_factory.mktemp("relays")))


@pytest.fixture(scope="module")
def pool(provider: Relayed) -> Iterator[sky.ComputePool]:
    """Nodes that are reached by a command, as over SSH."""
    with lean_frameworks(), sky.ComputePool(provider, nodes=2, logs=False) as pool:
        yield pool


def train(dies_at: int | None = None) -> dict[str, Any]:
    """Train as a worker whose data depend on its rank. Rank 1 is killed at a step, unless the call was restarted."""
    from skyward.training import DiLoCoCallback

    options = DiLoCoCallback()  # it finds the server by itself, which tests of callbacks use
    assert options.server_addr is not None
    name = options.worker_options["worker_id"]
    torch.set_num_threads(1)  # sums of several threads differ in the last bit
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with DiLoCoWorker(model, optimizer, options.server_addr, **options.worker_options) as worker:
        first_round = worker.state_dict()["base_round"]
        for number in range(STEPS):
            info = sky.instance_info()
            if info is not None and info.rank == 1 and info.restart_count == 0 and number == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            step(model, optimizer, number, data_seed=int(name[-1]))
    return {"name": name, "first_round": first_round, "state": state_of(model), **worker.sync_metrics}


def decorated(**options: Any) -> Any:
    defaults = {"sync_every": SYNC_EVERY, "bf16_comm": False, "heartbeat_timeout": 60.0}
    return sky.compute(sky.integrations.diloco(**defaults | options)(train))


def by_http(workers: int) -> dict[str, torch.Tensor]:
    """Return the parameters after the same training by HTTP."""
    models = [make_model() for _ in range(workers)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with serving(num_workers=workers) as server:
        together(
            *(
                lambda number=number, model=model: train_by_http(
                    server, model, f"call-0-rank-{number}", STEPS, data_seed=number
                )
                for number, model in enumerate(models)
            )
        )
    torch.set_num_threads(threads)
    return state_of(models[0])


def check_equal(found: list[dict[str, Any]], expected: dict[str, torch.Tensor]) -> None:
    for one in found:
        assert one["diloco/sync_count"] == STEPS // SYNC_EVERY
        assert all(torch.equal(one["state"][name], tensor) for name, tensor in expected.items()), one["name"]


def test_each_call_has_a_server_and_equals_training_by_http(pool: sky.ComputePool) -> None:
    """Both transports speak one protocol, and each call begins with its own model."""
    expected = by_http(2)
    function = decorated()
    for found in (function() @ pool, function() @ pool):
        assert [one["name"] for one in found] == ["call-0-rank-0", "call-0-rank-1"]
        assert [one["first_round"] for one in found] == [0, 0]
        check_equal(found, expected)
        make_model().load_state_dict(found[0]["state"], strict=False)  # the result is of use here
    assert not [thread.name for thread in threading.enumerate() if thread.name == "skyward-diloco-server"]


def test_links_that_break_cost_and_double_nothing(pool: sky.ComputePool, provider: Relayed) -> None:
    expected = by_http(2)
    ended = threading.Event()

    def break_links() -> None:
        pause_s = 0.1
        while not ended.wait(pause_s):
            provider.break_links(0)
            pause_s *= 1.5  # on a busy machine, a link needs time to carry anything

    breaker = threading.Thread(target=break_links)
    breaker.start()
    try:
        found = decorated()() @ pool
    finally:
        ended.set()
        breaker.join()
    check_equal(found, expected)


def test_calls_of_two_pools_share_a_server(pool: sky.ComputePool) -> None:
    function = decorated(num_workers=3)
    found: list[list[dict[str, Any]]] = []
    with sky.ComputePool(sky.Local(), logs=False) as other:
        together(lambda: found.append(function() @ pool), lambda: found.append(function() @ other))
    rows = [row for rows in found for row in rows]
    assert sorted(row["name"][-6:] for row in rows) == ["rank-0", "rank-0", "rank-1"]
    assert len({row["name"] for row in rows}) == 3
    check_equal(rows, rows[0]["state"])


def test_a_restarted_call_goes_on_with_its_server(pool: sky.ComputePool) -> None:
    """The killed rank's place is free at once: its process is known to be gone."""
    found = decorated().with_options(max_restarts=1)(SYNC_EVERY + 1) @ pool
    assert [row["name"] for row in found] == ["call-0-rank-0", "call-0-rank-1"]
    assert min(row["first_round"] for row in found) >= 1
    assert all(row["diloco/sync_count"] == STEPS // SYNC_EVERY for row in found)


def test_the_state_stays_in_a_folder_of_the_program(pool: sky.ComputePool, tmp_path: Path) -> None:
    function = decorated(save_dir=str(tmp_path / "global"), num_workers=1)
    assert (function() >> pool)["first_round"] == 0
    saves = sorted(path.name for path in (tmp_path / "global").iterdir() if path.is_dir())
    assert saves[-1].endswith(str(STEPS // SYNC_EVERY))
    assert (function() >> pool)["first_round"] == STEPS // SYNC_EVERY


def fit() -> tuple[float, list[float]]:
    from skyward.training import DiLoCoCallback, Trainer, TrainingArguments
    from tests.training.frameworks import same_records

    args = TrainingArguments(output_dir="out", max_steps=4, logging_steps=2, save_strategy="no", use_cpu=True)
    trainer = Trainer(same_records.Line(), args, train_dataset=same_records.rows(), callbacks=[DiLoCoCallback()])
    trainer.train()
    count = max(record.get("diloco/sync_count", 0) for record in trainer.state.log_history)
    return count, [tensor.sum().item() for tensor in trainer.model.parameters()]


def test_a_callback_without_arguments_joins_in_a_call_and_does_nothing_elsewhere(
    pool: sky.ComputePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function = sky.compute(sky.integrations.diloco(sync_every=2)(fit))
    (count, first), (_, second) = function() @ pool
    assert (count, first) == (2, second)
    assert function.local()[0] == 0


def test_a_server_that_the_program_does_not_know_is_refused(pool: sky.ComputePool) -> None:
    def hold() -> None:
        pass

    function = sky.integrations.diloco(server="elsewhere")(hold)
    forget("elsewhere")
    with pytest.raises(UsageError, match=r"server='elsewhere': the pool's program has no function"):
        sky.compute(function)() >> pool


def train_and_lose(folder: str) -> int:
    """Train one round, and put a file where the folder of the server's saves was."""
    figures = train()
    shutil.rmtree(folder)
    Path(folder).write_text("no folder")
    return int(figures["diloco/sync_count"])


def test_the_end_of_a_pool_raises_for_a_last_state_that_was_not_saved(tmp_path: Path, provider: Relayed) -> None:
    folder = str(tmp_path / "saves")
    function = sky.compute(sky.integrations.diloco(sync_every=SYNC_EVERY, save_dir=folder)(train_and_lose))
    problem = f"save_dir='{folder}': the last state of server '{__name__}.train_and_lose' could not be saved"
    with lean_frameworks():
        pool = sky.ComputePool(provider, nodes=1, logs=False).start()
        assert function(folder) >> pool == STEPS // SYNC_EVERY  # its result is not lost
        with pytest.raises(CheckpointSaveFailed, match=re.escape(problem)):
            pool.close()
        assert not pool.is_active
        pool.close()  # it is said once


def test_the_error_of_a_block_has_a_note_of_what_a_service_of_its_pool_has_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(losses, "skyward.tests", lambda pool: CheckpointSaveFailed(f"lost in {pool}"))
    with pytest.raises(LookupError) as caught, sky.ComputePool(sky.Local()) as pool:
        raise LookupError
    assert caught.value.__notes__ == [f"lost in {pool.job_id}"]


def test_an_address_in_a_program_needs_a_task() -> None:
    model = make_model()
    with pytest.raises(UsageError, match=r"server_addr='pool://x': .* runs in no task"):
        DiLoCoWorker(model, None, "pool://x")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sync_every": 0}, "sync_every=0: "),
        ({"num_workers": 1, "min_workers": 2}, "num_workers=1: must be a whole number >= 2"),
        ({"syncevery": 5}, "syncevery"),
        ({"nodes_per_worker": 0}, "nodes_per_worker=0: "),
    ],
)
def test_illegal_options_are_refused_where_they_are_written(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        integrations.diloco(**options)


def test_it_stands_below_compute() -> None:
    with pytest.raises(UsageError, match=r"@diloco: stands above @sky.compute"):
        integrations.diloco(sync_every=5)(sky.compute(train))


def fit_as_ranks() -> tuple[int, int, list[float], list[int]]:
    """Train with DDP inside a worker: each rank reads rows of its own. Rank 0 must not read for all."""
    from skyward.training import DDPTrainer, DDPTrainingArguments, DiLoCoCallback
    from skyward.training.diloco import DiLoCoSampler
    from tests.training.frameworks import same_records

    read: list[int] = []

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return same_records.rows()[index % 4]

    info = sky.instance_info()
    assert info is not None
    args = DDPTrainingArguments(
        output_dir=f"out-{info.node}",
        max_steps=4,
        per_device_train_batch_size=2,
        logging_steps=2,
        save_strategy="no",
        use_cpu=True,
        seed=info.node,
        dispatch_batches=False,
    )
    joining = DiLoCoCallback()
    loader = torch.utils.data.DataLoader(Rows(), 2, sampler=DiLoCoSampler(Rows(), joining))
    with pytest.raises(UsageError, match=r"dispatch_batches=True: .*DiLoCoSampler.*; set dispatch_batches=False"):
        DDPTrainer(same_records.Line(), replace(args, dispatch_batches=True), train_dataset=loader).train()
    trainer = DDPTrainer(same_records.Line(), args, train_dataset=loader, callbacks=[joining])
    trainer.train()
    count = max(record.get("diloco/sync_count", 0) for record in trainer.state.log_history)
    return info.node, count, [tensor.sum().item() for tensor in trainer.model.parameters()], read


def test_the_ranks_of_a_process_group_are_one_worker(pool: sky.ComputePool) -> None:
    joined = sky.integrations.diloco(sync_every=2, num_workers=2)(fit_as_ranks)
    function = sky.compute(sky.integrations.torch(backend="gloo", processes_per_node=2, returns="ranks")(joined))
    futures = [function() > pool.node(node) for node in (0, 1)]
    rows = [row for future in futures for row in future.result(120)]
    assert [node for node, _, _, _ in rows] == [0, 0, 1, 1]
    assert [count for _, count, _, _ in rows] == [2, 0, 2, 0]  # rank 0 of each worker has the figures
    assert all(state == rows[0][2] for _, _, state, _ in rows)
    once = [index for _, _, _, read in rows for index in read]
    assert len(set(once)) == len(once)


def fit_paced() -> tuple[int, list[float]]:
    """Train on equal batches beside a worker that claims to be far faster, until the server's advice is followed."""
    from skyward.training import DiLoCoCallback, TrainerState
    from skyward.training.diloco.client import DiLoCoClient

    joining = DiLoCoCallback()
    assert joining.server_addr is not None
    rank = torch.distributed.get_rank()
    if rank == 0:
        client, fast = DiLoCoClient(joining.server_addr), {"worker": "fast", "session": "session of fast"}
        client.ask("/join", fast)
        client.ask("/heartbeat", {**fast, "figures": {"steps_per_second": 1e9}})
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    joining.on_train_begin(state=TrainerState(), model=model, optimizer=optimizer)
    followed, logs = torch.zeros(1), dict[str, Any]()
    for number in itertools.count():
        step(model, optimizer, number)
        joining.on_log_step(logs)
        followed += logs.get("diloco/sync_every") == 1
        torch.distributed.broadcast(followed, 0)
        if followed == 5:  # steps after the change
            break
    joining.on_train_end()
    return int(logs.get("diloco/sync_every", 0)), [tensor.sum().item() for tensor in model.parameters()]


def test_all_ranks_of_a_worker_follow_the_advice_of_dylu(pool: sky.ComputePool) -> None:
    joined = sky.integrations.diloco(
        sync_every=8, dylu=True, heartbeat_interval=0.01, async_mode=True, num_workers=2, num_fragments=2
    )(fit_paced)
    function = sky.compute(sky.integrations.torch(backend="gloo", processes_per_node=2, returns="ranks")(joined))
    (sync_every, state), (_, other) = (function() > pool.node(0)).result(120)
    assert sync_every == 1
    assert state == other


def fit_apart() -> None:
    """Train on rows of this rank alone, without DDP."""
    from skyward.training import DiLoCoCallback, TrainerState

    info = sky.instance_info()
    assert info is not None
    seed = info.rank or 0
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    joining = DiLoCoCallback()
    joining.on_train_begin(state=TrainerState(), model=model, optimizer=optimizer)
    try:
        for number in range(4):
            step(model, optimizer, number, data_seed=seed)
    finally:
        joining.close()


def test_ranks_that_do_not_train_as_one_are_refused(pool: sky.ComputePool) -> None:
    """Otherwise the progress of all but rank 0 would be lost in each round."""
    joined = sky.integrations.diloco(sync_every=2, heartbeat_interval=0)(fit_apart)
    function = sky.compute(sky.integrations.torch(backend="gloo", processes_per_node=2)(joined))
    with pytest.raises(UsageError, match=r"have trained apart, so they are not one worker; wrap the model in Distrib"):
        (function() > pool.node(0)).result(120)


def fit_shards(options: dict[str, Any], *, is_sharded: bool = True) -> list[torch.Tensor]:
    """Train in a loop of one's own, as a callback's trainer does. Return the whole parameters."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from skyward.training import DiLoCoCallback, TrainerState

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    if is_sharded:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    joining = DiLoCoCallback(**options)
    joining.on_train_begin(state=TrainerState(), model=model, optimizer=optimizer)
    for number in range(6):
        step(model, optimizer, number)
    joining.on_train_end()
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach() for tensor in model.parameters()]


@pytest.mark.parametrize("more", [{}, {"num_fragments": 2, "fragment_sync_delay": 1}], ids=["whole", "streaming"])
def test_a_model_that_is_sharded_over_ranks_is_one_worker(
    more: dict[str, Any], pool: sky.ComputePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks have shards of uneven sizes, and equal batches. So they end as a model of one rank does."""
    options = {"sync_every": 2, "bf16_comm": False, "heartbeat_interval": 0, **more}
    joined = sky.integrations.diloco(num_workers=1)(fit_shards)
    function = sky.compute(sky.integrations.torch(backend="gloo", processes_per_node=2, returns="ranks")(joined))
    ranks = (function(options) > pool.node(0)).result(120)
    monkeypatch.setenv("DILOCO_TOKEN", TOKEN)
    with serving() as server:
        expected = fit_shards({"server_addr": server.address, **options}, is_sharded=False)
    for rank in ranks:
        for value, other in zip(rank, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


def fit_in_group() -> tuple[int | None, int, int, int, int, list[torch.Tensor]]:
    """Train with DDP inside a group of nodes. Return the places in call and group, and the parameters."""
    import torch.distributed as dist

    from skyward.training import DiLoCoCallback, TrainerState

    info = sky.instance_info()
    assert info is not None
    torch.set_num_threads(1)
    model = make_model()
    whole = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    joining, logs = DiLoCoCallback(), dict[str, Any]()
    joining.on_train_begin(state=TrainerState(), model=whole, optimizer=optimizer)
    try:
        for number in range(STEPS):
            step(whole, optimizer, number, data_seed=info.rank or 0)
        joining.on_log_step(logs)
        joining.on_train_end()
    finally:
        joining.close()
    count = int(logs.get("diloco/sync_count", 0))
    return info.rank, dist.get_rank(), dist.get_world_size(), count, info.total_workers, [*state_of(model).values()]


def in_groups(nodes_per_worker: int, **options: Any) -> Any:
    joined = sky.integrations.diloco(
        sync_every=SYNC_EVERY, bf16_comm=False, nodes_per_worker=nodes_per_worker, heartbeat_timeout=60.0
    )(fit_in_group)
    return sky.compute(sky.integrations.torch(backend="gloo", returns="ranks", **options)(joined))


def check_groups_of_two(rows: list[Any]) -> None:
    """Check that of 4 ranks in the call, 2 by 2 have trained as one worker, and all end with one model."""
    assert [row[:5] for row in rows] == [(n, n % 2, 2, (n + 1) % 2 * STEPS // SYNC_EVERY, 4) for n in range(4)]
    assert all(torch.equal(one, other) for row in rows for one, other in zip(row[-1], rows[0][-1], strict=True))


def test_each_node_of_a_call_is_a_worker_with_a_process_group(pool: sky.ComputePool) -> None:
    check_groups_of_two(in_groups(1, processes_per_node=2)() @ pool)


def test_each_pair_of_nodes_is_a_worker_with_a_process_group() -> None:
    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=4, logs=False) as pool:
        check_groups_of_two(in_groups(2)() @ pool)


def test_workers_of_several_ranks_that_cannot_be_are_refused(pool: sky.ComputePool) -> None:
    with pytest.raises(UsageError, match=r"nodes_per_worker=3: does not divide the 2 nodes of this call"):
        in_groups(3)() @ pool
    with pytest.raises(UsageError, match=r"nodes_per_worker=2: .*need one process group.*; add @sky.integr"):
        decorated(nodes_per_worker=2)() @ pool
