"""Devices of slots, nodes and gangs."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch

import skyward as sky
from skyward.errors import NoCapacity
from skyward.node.agent.devices import find_devices
from tests.gpu.conftest import Device, Figures
from tests.waiting import until

pytestmark = pytest.mark.gpu


def seen() -> tuple[int, int, str | None]:
    """Return the devices that torch sees in a call, the ones its node reports, and the variable that chooses them."""
    info = sky.instance_info()
    assert info is not None
    return torch.cuda.device_count(), info.accelerators, os.environ.get("CUDA_VISIBLE_DEVICES")


def product(matrix: torch.Tensor, device: str) -> torch.Tensor:
    return (matrix.to(device) @ matrix.to(device)).cpu()


def doubled(tensor: torch.Tensor, device: str) -> tuple[torch.Tensor, str]:
    return tensor.to(device) * 2, tensor.device.type


@sky.compute
@sky.integrations.torch
def meet(folder: str, name: str, other: str) -> int:
    """Run beside another such gang. Returns the index of the device that it begins with."""
    Path(folder, name).touch()
    until(lambda: Path(folder, other).exists(), within_s=40)
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def test_a_node_reports_the_devices_that_torch_sees(count: int, figures: Figures) -> None:
    devices = find_devices(os.environ)
    assert len(devices) == count
    figures("kind", devices.product)


def test_a_call_sees_all_devices_of_its_node(pool: sky.ComputePool, count: int) -> None:
    torch_sees, node_tells, _ = sky.compute(seen)() >> pool
    assert torch_sees == node_tells == count


def test_a_call_computes_on_a_device(pool: sky.ComputePool, device: Device) -> None:
    matrix = torch.randn(256, 256, dtype=torch.float64)
    torch.testing.assert_close(sky.compute(product)(matrix, device) >> pool, matrix @ matrix)


def test_a_tensor_on_a_device_arrives_on_the_cpu(pool: sky.ComputePool, device: Device) -> None:
    """The receiver may have no such device."""
    tensor = torch.arange(1_000_000, device=device)
    value, where = sky.compute(doubled)(tensor, device) >> pool
    assert (where, value.device.type) == ("cpu", "cpu")
    assert torch.equal(value, tensor.cpu() * 2)


def test_nodes_of_one_machine_divide_the_devices_or_share_one(two_nodes: sky.ComputePool, count: int) -> None:
    first, second = sky.compute(seen)() @ two_nodes
    for torch_sees, node_tells, _ in (first, second):
        assert torch_sees == node_tells == (max(1, count // 2) if count else 0)
    if count:
        assert (first[2] == second[2]) == (count == 1)


def test_gangs_on_the_same_devices_are_reported_to_each_other(tmp_path: Path, count: int) -> None:
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sky.ComputePool(sky.Local(), concurrency=2, logs=lambda line: lines.append(line.text)) as pool:
            futures = [meet(str(tmp_path), "a", "b") > pool, meet(str(tmp_path), "b", "a") > pool]
            begin_with = [future.result(timeout=50) for future in futures]
    said = [str(each.message) for each in caught if "concurrency=2: the slots of a node share" in str(each.message)]
    told = [line for line in lines if "'meet' starts beside 'meet'" in line]
    assert (len(said), len(told)) == ((1, 1) if count else (0, 0))
    assert begin_with == ([0, 0] if count else [-1, -1])


def test_an_accelerator_is_accepted_by_its_name_and_another_is_refused(device: Device, count: int) -> None:
    if device == "cuda":
        wanted = sky.accelerators.Custom(torch.cuda.get_device_name(0), count=count)
        with sky.ComputePool(sky.Local(), accelerator=wanted) as pool:
            assert (sky.compute(seen)() >> pool)[1] == count
    with pytest.raises(NoCapacity, match="accelerator=1000x H100"):
        sky.ComputePool(sky.Local(), accelerator=sky.accelerators.H100(count=1000)).start()
