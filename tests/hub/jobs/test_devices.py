"""Jobs that share the GPUs of this machine, which a stand-in of the driver's program lists."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import hub
from skyward.hub.runner.runner import restrict
from tests.hub.jobs.calls import devices
from tests.hub.jobs.hub_process import HubProcess
from tests.stand_in_gpus import GPUS, install_smi
from tests.waiting import until


def test_two_jobs_on_one_node_and_a_gang_see_different_devices(
    own_hub: HubProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", install_smi(tmp_path, GPUS))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    own_hub.restart()
    machines = {"name": "gpus", "provider": {"type": "local"}, "nodes": 2, "devices": 4, "accelerator": "H100"}
    with own_hub.client() as client:
        assert client.post("/v1/capacity", json=machines).status_code == 201
    file = tmp_path / "go"
    pair = [hub.submit(devices(str(file)), accelerator="H100") for _ in range(2)]
    gang = hub.submit(devices(str(file)), accelerator=sky.accelerators.H100(count=2), nodes=2, on="all")
    until(lambda: [job.status for job in (*pair, gang)] == ["running"] * 3, 90)
    own = {pair[0].id: {(0, 0)}, pair[1].id: {(0, 1)}, gang.id: {(0, 2), (0, 3), (1, 6), (1, 7)}}
    for job, sample in samples_of(own_hub, set(own)).items():
        listed = {(gpu["node"], gpu["gpu"]) for gpu in sample}
        assert listed <= own[job]  # a node that told nothing yet is missing
        assert listed
        for gpu in sample:
            number = gpu["gpu"]
            load = {"busy": number / 10, "memory_used_gib": number, "celsius": 40 + number}
            assert {name: gpu[name] for name in load} == pytest.approx(load)
    file.touch()
    assert [job.result(60) for job in pair] == ["0", "1"]
    assert gang.result(60) == ["2,3", "6,7"]
    own_hub.until_clean()


def samples_of(process: HubProcess, jobs: set[str]) -> dict[str, list[dict[str, Any]]]:
    """Follow the events of GPUs until each of these jobs has one, and return their first samples."""
    found: dict[str, list[dict[str, Any]]] = {}
    headers = {"Last-Event-ID": "0"}
    with process.client() as client, client.stream("GET", "/v1/events?kind=gpu", headers=headers) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                body = json.loads(line.removeprefix("data: "))["detail"]
                found.setdefault(body["job"], body["gpus"])
            if jobs <= found.keys():
                break
    return {job: found[job] for job in jobs}


def test_other_machines_get_the_variable_by_their_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    image = {"env": {"A": "1", "CUDA_VISIBLE_DEVICES": "0"}}
    restrict({"provider": {"type": "ssh"}, "devices": 4}, [1], [0, 2], image)
    chosen = {"CUDA_VISIBLE_DEVICES": "0,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert image == {"env": {"A": "1", **chosen}}
    whole: dict[str, object] = {}
    restrict({"provider": {"type": "ssh"}, "devices": 2}, [0], [0, 1], whole)
    assert whole == {}
    restrict({"provider": {"type": "local"}, "devices": 2}, [1], [0, 1], image)
    assert image["env"] == {"A": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
