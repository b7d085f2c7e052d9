"""Accelerators that a node reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyward.node.agent.facts import Devices, devices_of_machine, node_facts


def make(root: Path, *paths: str) -> None:
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


@pytest.fixture
def four_gpus(tmp_path: Path) -> Path:
    make(tmp_path, *(f"dev/nvidia{number}" for number in (10, 2, 0, 1)), "dev/nvidiactl", "dev/nvidia-uvm")
    return tmp_path


def test_a_machine_without_accelerators_has_none(tmp_path: Path) -> None:
    assert devices_of_machine({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == Devices()


def test_gpus_are_found_and_named_by_number_and_by_file(four_gpus: Path) -> None:
    make(four_gpus, "proc/driver/nvidia/gpus/0000:00:04.0/information")
    (four_gpus / "proc/driver/nvidia/gpus/0000:00:04.0/information").write_text("Model: \t NVIDIA L4\nIRQ: 1\n")
    files = ("dev/nvidia0", "dev/nvidia1", "dev/nvidia2", "dev/nvidia10")
    assert devices_of_machine({}, four_gpus) == Devices(
        "NVIDIA L4", "CUDA_VISIBLE_DEVICES", ("0", "1", "2", "3"), files
    )


@pytest.mark.parametrize(
    ("chosen", "ids"),
    [
        ("", ()),
        ("-1", ()),
        ("3, 0", ("dev/nvidia10", "dev/nvidia0")),
        ("1,-1,0", ("dev/nvidia1",)),
        ("1,9,0", ("dev/nvidia1",)),
        ("GPU-8932f937,MIG-1", ("GPU-8932f937", "MIG-1")),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(four_gpus: Path, chosen: str, ids: tuple[str, ...]) -> None:
    assert devices_of_machine({"CUDA_VISIBLE_DEVICES": chosen}, four_gpus).ids == ids


def test_devices_of_other_makers_are_found(tmp_path: Path) -> None:
    make(tmp_path / "tpu", "dev/accel0", "dev/accel1")
    make(tmp_path / "neuron", "dev/neuron0")
    kfd = "sys/class/kfd/kfd/topology/nodes/{}/gpu_id"
    make(tmp_path / "amd", *(kfd.format(node) for node in range(3)))
    for node, identifier in enumerate(("0", "51234", "7")):  # the first is the processor
        (tmp_path / "amd" / kfd.format(node)).write_text(identifier)
    found = {name: devices_of_machine({}, tmp_path / name) for name in ("tpu", "neuron", "amd")}
    assert {name: (devices.kind, len(devices.ids)) for name, devices in found.items()} == {
        "tpu": ("TPU", 2),
        "neuron": ("Neuron", 1),
        "amd": ("AMD", 2),
    }


@pytest.mark.parametrize(
    ("names", "nodes", "parts"),
    [
        ("0 1 2 3", 2, ["0 1", "2 3"]),
        ("0 1 2", 2, ["0", "1"]),
        ("3 5", 4, ["3", "5", "3", "5"]),
        ("", 2, ["", ""]),
    ],
)
def test_nodes_of_one_machine_divide_its_devices(names: str, nodes: int, parts: list[str]) -> None:
    devices = Devices("NVIDIA", "CUDA_VISIBLE_DEVICES", tuple(names.split()), tuple(names.split()))
    assert [" ".join(devices.part(node, nodes)) for node in range(nodes)] == parts


def test_facts_are_those_of_the_users_environment() -> None:
    assert node_facts({"CUDA_VISIBLE_DEVICES": ""})["accelerators"] == 0
