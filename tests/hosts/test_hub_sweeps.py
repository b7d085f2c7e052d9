"""Sweeps of a hub on SSH hosts, whose trials keep their checkpoints in an S3."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

import skyward as sky
from skyward import hub
from skyward.hub.client import capacity
from tests.hosts.bed import Bed
from tests.hosts.faults import nothing_runs_on
from tests.hosts.host import Host
from tests.hosts.index import PackageIndex
from tests.hub.jobs.hub_process import HubProcess
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(400)]

INTERVAL, SIZE, GENERATIONS = 20, 4, 3
GATE = "/tmp/gate"
"""File without which members wait before the last step of the second generation."""


# In functions, so that they travel by value: this module is not on the nodes.


def where() -> Any:
    import os

    return sky.compute(lambda: os.uname().nodename)


def member_of_a_population() -> Any:
    import time

    import skyward as sky
    from skyward import hub

    def member(trial: Any) -> float:
        """Train one interval, from the checkpoint of an earlier attempt or from that of the parent."""
        import torch

        from skyward.hub import HubLogger
        from skyward.training import Trainer, TrainerCallback, TrainingArguments

        class Line(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(1, 1, bias=False)
                torch.nn.init.zeros_(self.layer.weight)

            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"loss": ((self.layer(x) - labels) ** 2).mean()}

        def weight() -> float:
            return float(next(made.model.parameters()).detach())

        class Own(TrainerCallback):
            def on_train_begin(
                self, optimizer: Any = None, lr_scheduler: Any = None, state: Any = None, **_: Any
            ) -> None:
                for group in optimizer.param_groups:
                    group["lr"] = group["initial_lr"] = trial["rate"]
                lr_scheduler.base_lrs = [trial["rate"]] * len(lr_scheduler.base_lrs)
                run.log_metrics({f"begin.{trial.attempt}": weight(), f"step.{trial.attempt}": state.global_step}, 0)

            def on_step_end(self, state: Any = None, **_: Any) -> None:
                run.log_metrics({"weight": weight()}, state.global_step)
                while state.global_step == 2 * trial["interval"] - 1 and not Path(trial["gate"]).exists():
                    Path(f"{trial['gate']}.{trial.number}").touch()
                    time.sleep(0.05)
                    if trial.should_stop:
                        return

        run: Any = hub.active_run()
        last = trial.steps[1]
        torch.set_num_threads(1)
        rows = [{"x": torch.tensor([x / 10]), "labels": torch.tensor([x / 5])} for x in range(10)]
        made = Trainer(
            Line(),
            TrainingArguments(
                output_dir=trial.folder,
                max_steps=last,
                per_device_train_batch_size=2,
                learning_rate=trial["rate"],
                lr_scheduler_type="constant",
                save_strategy="steps",
                save_steps=last,
                eval_strategy="steps",
                eval_steps=last,
                logging_steps=last,
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=rows,
            eval_dataset=rows,
            callbacks=[Own(), HubLogger(system_metrics_every_s=None)],
        )
        made.train(resume_from_checkpoint=trial.checkpoint)
        return (weight() - 2) ** 2

    return sky.compute(member)


@pytest.fixture
def s3(bed: Bed) -> Iterator[dict[str, str]]:
    """Run an S3 that the hosts reach, with one bucket, and return the variables of its clients."""
    server = ThreadedMotoServer(ip_address=bed.address, port=0, verbose=False)
    server.start()
    env = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{bed.address}:{server.get_host_and_port()[1]}",
    }
    client_of(env).create_bucket(Bucket="sweeps")
    yield env
    server.stop()


def client_of(env: dict[str, str]) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=env["AWS_ENDPOINT_URL"],
        region_name=env["AWS_DEFAULT_REGION"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


def checkpoints_of(env: dict[str, str]) -> dict[int, set[str]]:
    """Return trial -> names of its checkpoints in the bucket."""
    found: dict[int, set[str]] = {}
    for page in client_of(env).get_paginator("list_objects_v2").paginate(Bucket="sweeps", Prefix="lines/"):
        for item in page.get("Contents", []):
            _, trial, checkpoint, *_ = item["Key"].split("/")
            if checkpoint.startswith("checkpoint-"):
                found.setdefault(int(trial.removeprefix("trial-")), set()).add(checkpoint)
    return found


def value(run: str, name: str, step: int = 0) -> float:
    history = hub.run(run).history(name)
    found = [float(one) for at, one in zip(history.steps, history.values, strict=True) if at == step]
    assert len(found) == 1, (name, step, found)
    return found[0]


def test_a_population_on_hosts_moves_weights_through_an_s3_and_makes_way(
    hub_process: HubProcess,
    hosts: Callable[[int], list[Host]],
    bed: Bed,
    s3_index: PackageIndex,
    s3: dict[str, str],
) -> None:
    provider = {"type": "ssh", "hosts": [host.name for host in hosts(2)], "config_file": str(bed.ssh_config)}
    capacity.declare("lab", {**provider, "lease_s": 10.0}, nodes=2, labels=["lab"])
    pip = [f"{name}=={version(name)}" for name in ("torch", "numpy", "s3fs")]
    sweep = hub.sweep(
        member_of_a_population(),
        {"rate": {"type": "log_uniform", "min": 1e-4, "max": 0.1}},
        name="lines",
        metric="distance",
        strategy="pbt",
        population={"size": SIZE, "generations": GENERATIONS, "ready_interval": INTERVAL},
        base_config={"interval": INTERVAL, "gate": GATE},
        seed=3,
        nodes=2,
        labels=["lab"],
        image=sky.Image(
            pip=pip,
            pip_index_url=s3_index.simple,
            env={**s3, "SKYWARD_CHECKPOINT_DIR": "s3://sweeps/lines", "OMP_NUM_THREADS": "1"},
        ),
    )
    two = hosts(2)
    until(lambda: sum(len(list(host.path("/tmp").glob("gate.*"))) for host in two) == 2 or has_failed(sweep), 200)
    assert not has_failed(sweep)
    urgent = hub.submit(
        where()(), on="all", nodes=2, labels=["lab"], priority="high", image=sky.Image(pip_index_url=s3_index.simple)
    )
    assert sorted(urgent.result(200)) == sorted(host.name for host in hosts(2))
    waiting = checkpoints_of(s3)
    for host in hosts(2):
        host.run("touch", GATE)
    sweep.wait(200)
    job = sweep.job
    assert job is not None
    assert job.result(60)["end"] == "completed"
    assert [attempt.end for attempt in job.attempts] == ["stopped", "completed"]

    trials = sweep.trials
    assert [(trial.state, trial.error) for trial in trials] == [("completed", None)] * (SIZE * GENERATIONS)
    with hub_process.client() as client:
        rows = client.get(f"/v1/sweeps/{sweep.id}/trials?since=0").json()["trials"]
    attrs = {row["number"]: {name: json.loads(text) for name, text in row["system_attrs"].items()} for row in rows}
    moved = 0
    for trial in trials:
        run, own = str(trial.run), attrs[trial.number]
        generation, parent = own["skyward:generation"], own["skyward:parent"]
        first, last = generation * INTERVAL, (generation + 1) * INTERVAL
        assert list(hub.run(run).history("weight").steps) == list(range(first + 1, last + 1)), "the curve has a seam"
        if parent is not None:
            moved += attrs[parent]["skyward:member"] != own["skyward:member"]
            assert value(run, "begin.1") == value(str(trials[parent].run), "weight", first), "it has other weights"
        if f"checkpoint-{last - 1}" in waiting.get(trial.number, ()):
            assert value(run, "step.2") == last - 1
            assert value(run, "begin.2") == value(run, "weight", last - 1)
    assert moved >= 1, "no weights have moved"
    made_way = [names for names in waiting.values() if f"checkpoint-{2 * INTERVAL - 1}" in names]
    assert len(made_way) == 2, waiting
    kept = checkpoints_of(s3)
    assert sweep.best.number in kept
    assert len(kept) < len(trials), "folders from which no member can begin are removed"
    hub_process.until_clean()
    nothing_runs_on(hosts(2), 30)
    for host in hosts(2):
        host.run("sh", "-c", f"rm -f {GATE}*")


def has_failed(sweep: hub.Sweep) -> bool:
    return any(trial.error for trial in sweep.trials)
