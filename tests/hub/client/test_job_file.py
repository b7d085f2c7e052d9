"""Files of jobs: words become units, and mistakes are named before anything is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from skyward.errors import UsageError
from skyward.hub.client.job_file import DEEPEST, LARGEST, job_request, read_job_file, seconds_of
from skyward.hub.http.v1 import job_wire
from skyward.hub.http.v1.jobs import spec_of
from skyward.hub.model.command_jobs import FIELDS

WHOLE = """
name: zen-7b-full
type: training
image: registry.example/train:2.3.0-cu124
command: [python, -m, train, --steps, 5000, --flash, true]
env:
  OMP_NUM_THREADS: 4
secrets: [HF_TOKEN]
resources:
  gpus: 8
  gpu_type: A100
  memory: 512Gi
  cpu: 64
distributed:
  strategy: fsdp
  num_nodes: 4
  gpus_per_node: 8
  backend: nccl
  gang_scheduling: true
  rdma: disabled
  sharding: full_shard
storage:
  datasets: s3://data/zen
  checkpoints: s3://checkpoints/zen
schedule:
  max_duration: 48h
  checkpoint_interval: 30m
  preemptible: true
"""


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    return read_job_file(file)


def test_whole_file_becomes_a_spec_that_the_hub_takes(tmp_path: Path) -> None:
    body = msgspec.json.encode(job_request(read(tmp_path, WHOLE)))
    spec = spec_of(msgspec.json.decode(body, type=job_wire.NewJobIn))
    assert (spec.command, spec.secrets) == (
        ["python", "-m", "train", "--steps", "5000", "--flash", "true"],
        ["HF_TOKEN"],
    )
    assert (spec.on, spec.nodes, spec.ranks_per_node, spec.devices) == ("all", 4, 8, 8)
    assert (spec.accelerator, spec.memory_gib, spec.vcpus) == ("A100", 512.0, 64)
    assert (spec.max_duration_s, spec.is_preemptible) == (172_800.0, True)
    assert spec.image == {
        "container": "registry.example/train:2.3.0-cu124",
        "env": {
            "OMP_NUM_THREADS": "4",
            "SKYWARD_STRATEGY": "fsdp",
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
            "SKYWARD_BACKEND": "nccl",
            "NCCL_IB_DISABLE": "1",
            "SKYWARD_CHECKPOINT_DIR": "s3://checkpoints/zen",
            "SKYWARD_DATASETS": "s3://data/zen",
            "SKYWARD_CHECKPOINT_INTERVAL_S": "1800",
        },
    }


def test_table_of_fields_is_that_of_the_api() -> None:
    schemas: dict[str, type[msgspec.Struct]] = {
        "resources": job_wire.ResourcesIn,
        "distributed": job_wire.DistributedIn,
        "storage": job_wire.StorageIn,
        "schedule": job_wire.ScheduleIn,
    }
    for section, schema in schemas.items():
        assert set(FIELDS[section]) == set(schema.__struct_fields__)
    within = {"spec", "blobs", "code_path", "code_folder"}  # of submissions, not of people
    assert set(FIELDS[""]) == set(job_wire.NewJobIn.__struct_fields__) - within


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("comand: [a]", r"comand: unknown field; did you mean command\?"),
        ("command: [a]\nresources: {gpu: 1}", r"resources.gpu: unknown field; did you mean gpus\?"),
        ("command: [a]\nschedule: {max_duraton: 1h}", r"schedule.max_duraton: .*did you mean max_duration\?"),
        ("command: [a]\nstorage: {bucket: x}", "storage.bucket: unknown field; use one of checkpoints, datasets"),
        ("command: python train.py", r"not a list; no shell reads it, so write \['python', 'train.py'\]"),
        ("name: a", "command: missing"),
        ("command: [a, [b]]", r"command\[1\]=\['b'\]: not text"),
        ("command: [a]\nresources: 3", "resources=3: not a mapping"),
        ("command: [a]\nresources: {memory: lots}", "resources.memory='lots': not a size"),
        ("command: [a]\nresources: {cpu: -1}", "resources.cpu=-1: not a number of processors"),
        ("command: [a]\nschedule: {max_duration: soon}", "schedule.max_duration='soon': not a duration"),
    ],
)
def test_mistake_is_named_with_the_nearest_field(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        job_request(read(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a", "is not a mapping"),
        ("a: [", "cannot be read"),
        ("a: &x [1]\nb: [*x, *x]", r"has an alias, \*x"),
        ("a: !!python/object/apply:os.system [touch canary]", "cannot be read"),
        ("a: " + "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), f"deeper than {DEEPEST} levels"),
        ("a: " + "x" * LARGEST, f"larger than {LARGEST} bytes"),
        ("a: " + "[" * 50_000, f"deeper than {DEEPEST} levels"),
    ],
)
def test_hostile_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read(tmp_path, text)
    assert not Path("canary").exists()


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("48h", 172_800), ("7d", 604_800), ("1h 30m", 5400), (60, 60)]
)
def test_durations_in_words(text: Any, seconds: float) -> None:
    assert seconds_of("time", text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "1h30", "0s", "1y", True, None, "nan"])
def test_other_texts_are_no_durations(text: Any) -> None:
    with pytest.raises(UsageError, match="time=.*: not a duration"):
        seconds_of("time", text)
