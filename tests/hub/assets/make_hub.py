"""Make the asset of the hub's own tables: a data folder with each kind of row. Run it when a release has new tables:

    .venv/bin/python tests/hub/assets/make_hub.py hub-0003.tar.gz

The number is that of the revision. Keep the assets of earlier revisions: hubs of every release open forever. `token` in
the archive is the text of the owner's token. Times are those of a clock that counts from START.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import itertools
import math
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from skyward.hub.model.access import Actor, Role
from skyward.hub.model.batches import Batch
from skyward.hub.model.capacity import MachineSetSpec
from skyward.hub.model.jobs import AttemptEnd, JobSpec
from skyward.hub.model.notices import NoticeRules
from skyward.hub.model.points import PointColumns
from skyward.hub.model.quotas import JobQuotaSpec, Quota
from skyward.hub.model.registry import ModelMetric, ModelStatus, Stage
from skyward.hub.model.runs import DatasetInput, ModelLink, RunState
from skyward.hub.model.sweeps import Direction, Parameter, TrialChange, TrialState
from skyward.hub.services.hub import Hub
from skyward.hub.services.jobs.jobs import NewJob
from skyward.hub.store.database import Database
from skyward.hub.store.folder_blobs import FolderBlobs
from skyward.hub.store.runs import find_run

START = 1_700_000_000_000


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "hub")
        clock = itertools.count(START)
        database = Database(f"sqlite:///{data}/hub.db", clock=lambda: next(clock))
        rules = NoticeRules(commands=["/bin/true"])
        token = asyncio.run(fill(Hub(database, FolderBlobs(data / "blobs"), rules=rules)))
        (data / "token").write_text(token)
        pack(data, target)


async def fill(hub: Hub) -> str:
    """Add a row to each table, and return the owner's token."""
    await hub.people.prepare("owner")
    owner = await hub.access.actor_named("owner", None)
    token = await hub.people.create_token(owner, "laptop")
    await add_people(hub, owner)
    experiment = (await hub.tracking.create_experiment(owner, "digits", {"team": "vision"})).id
    gone = (await hub.tracking.create_experiment(owner, "gone")).id
    await hub.tracking.delete_experiment(owner, gone)
    await add_lost_run(hub, owner)
    for state in RunState:
        if state is not RunState.LOST:
            await hub.tracking.create_run(owner, experiment, run_id=state.value, name=f"the {state.value} one")
            await hub.tracking.update_run(owner, state.value, state=state)
    await hub.tracking.create_run(owner, experiment, run_id="deleted")
    await hub.tracking.delete_run(owner, "deleted")
    await fill_run(hub, owner, "running")
    await add_models(hub, owner, experiment)
    await add_pool(hub, owner)
    await add_job(hub, owner)
    await add_sweep(hub, owner)
    await hub.people.create_run_token(owner, "running")
    await hub.close()
    return token.text


async def add_people(hub: Hub, owner: Actor) -> None:
    await hub.people.create_project(owner, "vision", "Sees.")
    await hub.quotas.set_limits(owner, "vision", {Quota.RUNS: 1000, Quota.ARTIFACT_BYTES: 10**9})
    await hub.people.create_user(owner, "ada")
    await hub.people.set_member(owner, "vision", "ada", Role.RESEARCHER)
    await hub.people.create_user(owner, "robot", is_service=True)


async def add_lost_run(hub: Hub, owner: Actor) -> None:
    facts = {"experiment": "digits", "name": "the lost one"}
    await hub.tracking.accept_batch(owner, "lost", Batch("client", 1, [["run", facts]]))
    lost = await hub.tracking.mark_lost(2**60)  # a time at which its heartbeat is overdue
    assert lost == ["lost"], lost


async def fill_run(hub: Hub, owner: Actor, run: str) -> None:
    """Add parameters, tags, points in chunks and in the tail, a dataset, a command and artifacts."""
    await hub.tracking.log_params(owner, run, {"lr": "0.1", "depth": "3"})
    await hub.tracking.set_tags(owner, run, {"kind": "small"})
    points = PointColumns()
    for step in range(1000):
        points.append("loss", step, START + step, 1.0 / (step + 1))
    for step, value in enumerate((math.nan, math.inf, -math.inf, 2.5)):
        points.append("odd", step, START + step, value)
    await hub.tracking.log_points(owner, run, points)
    row = await hub.database.read(find_run, owner.project, run)
    assert row is not None
    assert hub.database.sealer.seal(row.pk, merges=True)
    later = PointColumns()
    for step in range(1000, 1010):
        later.append("loss", step, START + step, 1.0 / (step + 1))
    later.append("odd", 4, START + 4, math.nan)
    await hub.tracking.log_points(owner, run, later)
    dataset = DatasetInput("digits", "0a1b2c", "http", "{}", "[]", "{}", {"mlflow.data.context": "training"})
    await hub.tracking.log_inputs(owner, run, [dataset], [])
    await hub.tracking.send_command(owner, run, "save")
    for key, text in (("notes.txt", "hello"), ("model/weights", "weights"), ("model/copy", "weights")):
        await hub.tracking.put_artifact(owner, run, key, stream(text))


async def add_sweep(hub: Hub, owner: Actor) -> None:
    sweep = (await hub.sweeps.create_sweep(owner, "rates", "made", [Direction.MINIMIZE])).id
    params = {"x": Parameter(0.5, '{"name": "FloatDistribution"}')}
    change = TrialChange(key="first", params=params, steps={0: 1.5, 1: math.nan}, user_attrs={"seed": "7"})
    trial = (await hub.sweeps.create_trial(owner, sweep, change)).id
    await hub.sweeps.change_trial(owner, trial, TrialChange(key="e", state=TrialState.COMPLETED, values=[math.inf]))


async def stream(text: str) -> AsyncIterator[bytes]:
    yield text.encode()


async def add_models(hub: Hub, owner: Actor, experiment: str) -> None:
    registry = hub.registry
    logged = await registry.create_logged_model(
        owner, experiment, name="net", kind="net", run_id="running", params={"depth": "3"}, tags={"size": "small"}
    )
    metrics = [
        ModelMetric("accuracy", value, START, step, "running", logged.id) for step, value in enumerate((0.9, math.nan))
    ]
    await registry.log_model_metrics(owner, metrics)
    await registry.finalize_logged_model(owner, logged.id, ModelStatus.READY)
    await hub.tracking.put_artifact(owner, f"models/{logged.id}", "weights", stream("logged"))
    await hub.tracking.log_inputs(owner, "running", [], [ModelLink(logged.id, "output", 3)])
    await registry.create_model(owner, "digits", {"task": "vision"}, "Reads digits.")
    await registry.create_version(
        owner, "digits", "runs:/running/model", run_id="running", tags={"best": "yes"}, description="The first."
    )
    await registry.create_version(owner, "digits", f"models:/{logged.id}", model_id=logged.id)
    await registry.create_version(owner, "digits", "s3://weights/of/digits")
    await registry.move_version(owner, "digits", 2, Stage.PRODUCTION)
    await registry.set_alias(owner, "digits", "champion", 2)
    await registry.delete_version(owner, "digits", 3)


async def add_pool(hub: Hub, owner: Actor) -> None:
    facts = {"name": "training", "provider": "local", "nodes": 2, "started_at": START}
    events = [
        ["e", START + 5, "pool.ready", None, {}],
        ["e", START + 6, "call", 0, {"ok": True}],
        ["e", START + 9, "pool.closed", None, {"reason": "with block ended", "calls": 1, "failed": 0}],
    ]
    await hub.pools.accept_pool_batch(owner, "1" * 32, Batch("client", 1, [["pool", facts], *events]))


async def add_job(hub: Hub, owner: Actor) -> None:
    """Add a job that ran to its end."""
    await hub.capacity.declare(owner, MachineSetSpec(name="local", provider={"type": "local"}, nodes=2))
    await hub.quotas.set_job_quota(owner, "project", "default", JobQuotaSpec(weight=2.0, devices={"A100": 8}))
    call = hashlib.sha256(b"call").hexdigest()
    await hub.jobs.put_job_blob(owner, call, stream("call"))
    spec = JobSpec(nodes=2, image={"pip": ["numpy"]}, notify=[{"command": ["/bin/true"]}])
    new = NewJob(name="fit", spec=spec, blobs={"call": call}, key="monday")
    job = (await hub.jobs.submit(owner, new)).id
    later = NewJob(name="test", spec=JobSpec(after=[job]), is_held=True)
    await hub.jobs.submit(owner, later)
    assert await hub.leader.leads()
    await hub.scheduler.step()
    (launch,) = (await hub.launchers.poll(owner, "here")).start
    runner = await hub.access.actor_for(launch.token, None) if launch.token else owner
    await hub.attempts.beat(runner, job, 1, is_running=True, cost_usd=0.5)
    await hub.attempts.add_to_feed(runner, job, 1, "output", 0, b"step 1\n")
    await hub.attempts.add_to_feed(runner, job, 1, "items", 0, b"item 1\n")
    await hub.attempts.put_result(runner, job, 1, "value", stream("value"))
    await hub.attempts.end(runner, job, 1, AttemptEnd.COMPLETED, cost_usd=0.75)


def pack(data: Path, target: Path) -> None:
    """Write an archive that is the same for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(data.rglob("*")):
            if path.is_file() and not path.name.endswith(".lock"):
                member = tarfile.TarInfo(f"hub/{path.relative_to(data)}")
                member.size = path.stat().st_size
                archive.addfile(member, io.BytesIO(path.read_bytes()))
    with target.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:
        packed.write(buffer.getvalue())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
