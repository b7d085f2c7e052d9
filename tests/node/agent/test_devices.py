"""Devices that a node finds, and the variables by which a process sees only some of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from skyward.core.limits import default_blob_limit
from skyward.node.agent.devices import NodeDevices, find_devices, mps_environment
from skyward.node.agent.facts import node_facts
from skyward.node.agent.limit_groups import Enforcement
from skyward.values.devices import Grant, share
from skyward.wire.tasks import NodeConfig
from tests.stand_in_gpus import GPUS, MIG, install_smi

NOBODY = {"PATH": "/nowhere"}
"""Environment that leads to no nvidia-smi."""


def make(root: Path, **files: str) -> None:
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def four_gpus(tmp_path: Path) -> Path:
    paths = [*(f"dev/nvidia{number}" for number in (10, 2, 0, 1)), "dev/nvidiactl", "dev/nvidia-uvm"]
    make(tmp_path, **dict.fromkeys(paths, ""))
    return tmp_path


def ids(devices: NodeDevices) -> list[str]:
    return [device.id.partition("/")[2] or device.id for device in devices.devices]


def test_a_machine_without_accelerators_has_none(tmp_path: Path) -> None:
    assert find_devices({**NOBODY, "CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == NodeDevices()


def test_the_drivers_program_tells_kind_identifier_and_memory_of_each_gpu(tmp_path: Path) -> None:
    devices = find_devices({"PATH": install_smi(tmp_path, GPUS)}, tmp_path)
    assert len(devices) == 8
    last = devices.devices[7]
    assert (last.index, last.id, last.kind, last.name, last.memory_gib) == (
        *(7, "GPU-00000007-0000-0000-0000-000000000000", "nvidia", "NVIDIA H100 80GB HBM3"),
        81559 / 1024,
    )


@pytest.mark.parametrize(
    ("chosen", "indexes"),
    [("", []), ("-1", []), ("6, 2", [6, 2]), ("GPU-00000003,1,GPU-nobody,0", [3, 1]), ("1,9,0", [1])],
)
def test_the_users_variable_restricts_what_there_is(tmp_path: Path, chosen: str, indexes: list[int]) -> None:
    env = {"PATH": install_smi(tmp_path, GPUS), "CUDA_VISIBLE_DEVICES": chosen}
    devices = find_devices(env, tmp_path)
    assert [int(device.id.split("-")[1]) for device in devices.devices] == indexes
    assert [device.index for device in devices.devices] == list(range(len(indexes)))
    if len(indexes) > 1:
        last = chosen.split(",")[len(indexes) - 1].strip()
        assert devices.environment((len(indexes) - 1,), env) == {"CUDA_VISIBLE_DEVICES": last}


def test_instances_of_mig_are_devices_of_their_own_and_named_by_identifier(tmp_path: Path) -> None:
    env = {"PATH": install_smi(tmp_path, MIG)}
    devices = find_devices(env, tmp_path)
    assert [(device.name, device.memory_gib) for device in devices.devices] == [
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20.0),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20.0),
        ("NVIDIA A100-SXM4-40GB", 40.0),
    ]
    assert devices.environment((1,), env)["CUDA_VISIBLE_DEVICES"] == "MIG-00000000-1"
    assert devices.environment((0, 1, 2), env)["CUDA_VISIBLE_DEVICES"] == "MIG-00000000-0,MIG-00000000-1,1"
    chosen = find_devices({**env, "CUDA_VISIBLE_DEVICES": "1"}, tmp_path)
    assert chosen.environment((0,), env)["CUDA_VISIBLE_DEVICES"] == "MIG-00000000-1"


@pytest.mark.parametrize("script", ["exit 9", "kill -9 $$", "echo No devices were found; exit 6", "echo '[N/A]'"])
def test_without_the_programs_answer_device_files_count(four_gpus: Path, script: str) -> None:
    program = four_gpus / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    make(four_gpus, **{"proc/driver/nvidia/gpus/0000:00:04.0/information": "Model: \t NVIDIA L4\nIRQ: 1\n"})
    devices = find_devices({"PATH": str(four_gpus)}, four_gpus)
    assert devices.product == "NVIDIA L4"
    assert ids(devices) == ["dev/nvidia0", "dev/nvidia1", "dev/nvidia2", "dev/nvidia10"]
    assert len({device.id for device in devices.devices}) == 4


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("3, 0", ["dev/nvidia10", "dev/nvidia0"]),
        ("1,-1,0", ["dev/nvidia1"]),
        ("GPU-8932f937,MIG-1", ["dev/nvidia0", "dev/nvidia1"]),
    ],
)
def test_the_variable_counts_device_files_too(four_gpus: Path, chosen: str, expected: list[str]) -> None:
    assert ids(find_devices({**NOBODY, "CUDA_VISIBLE_DEVICES": chosen}, four_gpus)) == expected


def amd(root: Path) -> Path:
    for node, identifier in enumerate(("0", "51234", "7")):  # the first is the processor
        folder = f"sys/class/kfd/kfd/topology/nodes/{node}"
        facts = f"unique_id {node * 16}\ndrm_render_minor {127 + node}\n"
        bank = f"heap_type {0 if node == 0 else 1}\nsize_in_bytes {64 * 2**30}\n"
        make(root, **{f"{folder}/gpu_id": identifier, f"{folder}/properties": facts})
        make(root, **{f"{folder}/mem_banks/0/properties": bank})
    make(root, **{"sys/class/drm/renderD128/device/product_name": "AMD Instinct MI210\n"})
    return root


def test_amds_gpus_are_hidden_at_both_levels_of_rocm(tmp_path: Path) -> None:
    devices = find_devices(NOBODY, amd(tmp_path))
    assert [(device.id, device.name, device.memory_gib) for device in devices.devices] == [
        ("GPU-0000000000000010", "AMD Instinct MI210", 64.0),
        ("GPU-0000000000000020", "AMD", 64.0),
    ]
    assert devices.environment((1,), {}) == {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}
    assert devices.environment((), {}) == {"ROCR_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
    chosen = {**NOBODY, "ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1"}
    (one,) = find_devices(chosen, tmp_path).devices
    assert one.id == "GPU-0000000000000010", "HIP counts what ROCr has left"


def test_chips_of_a_tpu_are_found_on_the_bus_and_by_their_files(tmp_path: Path) -> None:
    make(tmp_path / "files", **{"dev/accel0": "", "dev/accel1": ""})
    assert find_devices(NOBODY, tmp_path / "files").product == "TPU"
    for chip in range(4):
        folder = f"sys/bus/pci/devices/0000:00:0{chip}.0"
        make(tmp_path / "bus", **{f"{folder}/vendor": "0x1ae0\n", f"{folder}/device": "0x0063\n"})
    devices = find_devices(NOBODY, tmp_path / "bus")
    assert (devices.product, len(devices), round(devices.devices[0].memory_gib, 1)) == ("TPUv5e", 4, 14.9)
    assert devices.environment((2, 3), {}) == {
        "TPU_VISIBLE_CHIPS": "2,3",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
    assert devices.environment((), {})["JAX_PLATFORMS"] == "cpu"


def test_neuron_devices_are_chosen_by_their_cores(tmp_path: Path) -> None:
    make(tmp_path, **{"dev/neuron0": "", "dev/neuron1": ""})
    make(tmp_path, **{"sys/devices/virtual/neuron_device/neuron0/core_count": "4\n"})
    devices = find_devices(NOBODY, tmp_path)
    assert devices.environment((1,), {}) == {"NEURON_RT_VISIBLE_CORES": "4,5,6,7"}


def test_a_process_that_sees_all_devices_keeps_the_users_environment(tmp_path: Path) -> None:
    env = {"PATH": install_smi(tmp_path, GPUS)}
    devices = find_devices(env, tmp_path)
    everything = tuple(range(8))
    assert devices.environment(everything, env) == {}
    assert devices.environment((), env)["CUDA_VISIBLE_DEVICES"] == "-1"
    assert devices.environment((5,), env) == {"CUDA_VISIBLE_DEVICES": "5", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert NodeDevices().environment((), env) == {}


@pytest.mark.parametrize(
    ("count", "parts", "shares"),
    [(4, 2, [(0, 1), (2, 3)]), (3, 2, [(0,), (1,)]), (2, 4, [(0,), (1,), (0,), (1,)]), (0, 2, [(), ()])],
)
def test_processes_of_a_node_get_equal_shares(count: int, parts: int, shares: list[tuple[int, ...]]) -> None:
    everything = tuple(range(count))
    assert [share(everything, part, parts) for part in range(parts)] == shares


def test_a_grant_names_devices_that_exist(tmp_path: Path) -> None:
    devices = find_devices({"PATH": install_smi(tmp_path, GPUS)}, tmp_path)
    assert devices.of(Grant(), 1, 4).devices == (2, 3)
    assert devices.of(Grant(devices=(1, 9)), 0, 1).devices == (1,)
    assert Grant.parse(Grant(devices=(1, 9), gpu_share=0.5, cpus=2).pack()) == Grant(
        devices=(1, 9), gpu_share=0.5, cpus=2
    )


def test_a_share_of_a_gpu_limits_threads_where_mps_runs(tmp_path: Path) -> None:
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    quarter = Grant(devices=(0,), gpu_share=0.25)
    assert mps_environment(quarter, env) == {}
    (tmp_path / "control").touch()
    assert mps_environment(quarter, env) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    assert mps_environment(Grant(devices=(0,)), env) == {}


def test_facts_are_those_of_the_users_environment(tmp_path: Path) -> None:
    env = (("PATH", install_smi(tmp_path, GPUS)), ("CUDA_VISIBLE_DEVICES", "1,2"))
    config = NodeConfig(
        pool="p", node=0, folder="", slots=1, python=sys.executable, path=(), cwd="", env=env, cores=3, memory_gib=1.5
    )
    facts = node_facts(config, find_devices(dict(env)), Enforcement())
    assert (facts["accelerators"], facts["cpus"], facts["memory_gib"]) == (2, 3, 1.5)
    assert [device["index"] for device in facts["devices"]] == [0, 1]
    assert facts["blob_limit_bytes"] == default_blob_limit()
    assert node_facts(replace(config, blob_limit_bytes=7), find_devices({}), Enforcement())["blob_limit_bytes"] == 7
