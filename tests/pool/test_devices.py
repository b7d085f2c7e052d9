"""Pools on a machine with GPUs: device files in a mount namespace stand for them. No driver is needed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

import skyward as sky
from skyward.errors import NoCapacity
from skyward.values.machine import PoolSpec

_ENTER = """
set -e
mount -t tmpfs none "$1"
for file in null zero full random urandom tty; do touch "$1/$file"; mount --bind "/dev/$file" "$1/$file"; done
ln -s /proc/self/fd "$1/fd"; mkdir "$1/shm"; mount --bind /dev/shm "$1/shm"
for name in $2; do touch "$1/nvidia$name"; done
mount --move "$1" /dev
shift 2
exec "$@"
"""


@pytest.mark.root
def test_shared_gpus_are_reported_and_nodes_of_one_machine_divide_them(tmp_path: Path) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    program = [sys.executable, "-c", "from tests.pools_with_gpus import main; main()", str(tmp_path)]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", _ENTER, "sh", str(devices), "0 1 -uvm", *program],
        capture_output=True,
        check=False,
        text=True,
        timeout=100,
        env={**environment, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["two nodes"] == [[], [["0", 1], ["1", 1]], [False, False], []]
    (warning,), seen, shared, files = said["three nodes"]
    assert warning.startswith("nodes=3: nodes on one machine share its 2 GPUs")
    assert files == ["pools_with_gpus.py"], "it points at the user's line"
    assert (seen, shared) == ([["0", 1], ["1", 1], ["0", 1]], [True] * 3)
    (warning,), seen, shared, _ = said["chosen"]
    assert warning.startswith("nodes=2: nodes on one machine share its 1 GPU,")
    assert (seen, shared) == ([["1", 1], ["1", 1]], [True] * 2), "what the user chose is left alone"
    assert said["imported ahead"] == [True, False], "not where that would have initialised CUDA"
    assert said["refused"].startswith(
        "local: accelerator=2x H100 80GB for each of 2 nodes, but tasks on this machine see 2"
    )
    assert said["two gangs"] == [[], []], "each slot has a GPU of its own, and so has each gang"
    (warning,), lines = said["two gangs of four slots"]
    assert warning.startswith("concurrency=4:"), "two slots share a GPU"
    assert len(lines) == 1, "once for two functions"
    assert "'meet' starts beside 'meet', which runs on the same 1 GPU of node 0" in lines[0]


@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
def test_another_architecture_is_refused(architecture: Literal["x86_64", "arm64"]) -> None:
    if architecture == {"aarch64": "arm64"}.get(platform.machine(), platform.machine()):
        assert sky.Local().offers(PoolSpec(architecture=architecture))
    else:
        with pytest.raises(NoCapacity, match=f"local: architecture='{architecture}', but this machine is"):
            sky.Local().offers(PoolSpec(architecture=architecture))


def test_a_missing_accelerator_is_refused_before_anything_starts() -> None:
    wanted = sky.accelerators.H100(count=64)
    with pytest.raises(NoCapacity, match=r"local: accelerator=64x H100 80GB, but tasks on this machine see .*; leave"):
        sky.Local().offers(PoolSpec(accelerator=wanted))
    with pytest.raises(NoCapacity, match="local: accelerator=64x H100 80GB"):
        sky.ComputePool(sky.Local(), accelerator=wanted).start()
