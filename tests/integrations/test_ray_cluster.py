"""Ray's integration: clusters of a real Ray over two nodes of this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import signal
import socket
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import MissingDependency, SlotLost, UsageError
from skyward.integrations.ray_cluster import RayClusterIntegration
from skyward.values.topology import Rank
from tests.waiting import lines_of, until

HEAD = Rank(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node=0,
    node_rank=0,
    nodes=1,
    head_addr="127.0.0.1",
    head_port=20_001,
    local_addr="127.0.0.1",
)


MARK = "RAY_CLUSTER_TEST"
"""Variable by whose value this test knows the processes of its pool: other tests run Ray, too."""
OURS = os.environ.get(MARK) or uuid.uuid4().hex  # on the nodes, which import this file, it is set


LEAN = Path(__file__).parent.parent / "lean"
"""Path of a module that spares each process of Ray a second of work."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sky.ComputePool]:
    """Open a pool whose program has a module of its own on its path. Another program has the ports that Ray prefers."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "of_the_program.py").write_text("def triple(x):\n    return 3 * x\n")
    sys.path[:0] = [str(folder), str(LEAN)]
    with contextlib.ExitStack() as stack:
        for port in (6379, 8265, 10001, 52365):
            with contextlib.suppress(OSError):  # it is another program indeed
                stack.enter_context(socket.create_server(("0.0.0.0", port)))
        image = sky.Image(env={MARK: OURS})
        yield stack.enter_context(sky.ComputePool(provider=sky.Local(), nodes=2, logs=False, image=image))
    del sys.path[:2]


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    yield
    until(lambda: not ray_processes(), within_s=60)


def ray_processes() -> dict[int, str]:
    """Return the command lines of the processes of Ray that belong to this test's pool, by their pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # has ended
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            is_ray = "ray.scripts.scripts" in command or "raylet" in command or "gcs_server" in command
            if is_ray and f"{MARK}={OURS}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = command
    return found


# Of one processor, because Ray starts a worker for each, and each imports Ray.
@sky.compute(cpus=1)
@sky.integrations.ray_cluster(object_store_gib=0.1)
def use_ray() -> dict[str, Any]:
    import time

    import ray
    import ray.data
    from of_the_program import triple  # type: ignore[import-not-found]

    ray.init(logging_level=logging.ERROR)

    @ray.remote(scheduling_strategy="SPREAD")  # type: ignore[untyped-decorator]
    def work(x: int) -> tuple[int, str]:
        time.sleep(0.5)
        return triple(x), ray.get_runtime_context().get_node_id()

    done = ray.get([work.remote(x) for x in range(4)])
    doubled = ray.data.range(100).map(lambda row: {"x": 2 * row["id"]})
    total = doubled.sum("x")
    return {
        "values": [value for value, _ in done],
        "nodes": len({node for _, node in done}),
        "store": sum(node["Resources"]["object_store_memory"] for node in ray.nodes()),
        "total": total,
        "rank": sky.instance_info().rank,  # type: ignore[union-attr]
        "folders": set(re.findall(r"--temp-dir=(\S+)", "\n".join(ray_processes().values()))),
    }


def test_tasks_and_ray_data_run_on_all_nodes_of_the_call(pool: sky.ComputePool) -> None:
    (values,) = use_ray() @ pool
    assert values["values"] == [0, 3, 6, 9]
    assert (values["nodes"], values["rank"], values["total"]) == (2, 0, 9900)
    assert abs(values["store"] / 2**30 - 0.2) < 0.01
    (folder,) = values["folders"]
    until(lambda: not Path(folder).exists())


def test_cluster_that_loses_the_ray_of_a_node_fails_with_its_name(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute(cpus=1)
    @sky.integrations.ray_cluster(object_store_gib=0.1)
    def lose(begun: Path) -> None:
        import time

        with begun.open("a") as file:
            file.write("once\n")
        (member,) = [
            pid for pid, command in ray_processes().items() if "start --block" in command and "--address=" in command
        ]
        os.kill(member, signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(SlotLost, match="Ray ended with code -9 on node 1") as caught:
        lose(tmp_path / "begun") @ pool
    assert caught.value.signal == signal.SIGKILL
    assert lines_of(tmp_path / "begun") == ["once"]


def test_function_runs_as_it_is_outside_a_pool() -> None:
    @sky.compute
    @sky.integrations.ray_cluster
    def add(x: int) -> int:
        return x + 1

    assert add.local(1) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"processes_per_node": 2}, "processes_per_node=2: @ray_cluster starts one Ray node on each node"),
        ({"returns": "ranks"}, "returns='ranks': @ray_cluster runs the function on rank 0 only"),
        ({"dashboard": 8265}, "dashboard=8265: @ray_cluster takes True or False"),
        ({"object_store_gib": 0.01}, "object_store_gib=0.01: @ray_cluster takes a number of GiB >= 0.075"),
        ({"object_store_gib": True}, "object_store_gib=True: @ray_cluster takes a number of GiB"),
        ({"object_store_gb": 1}, "object_store_gib"),
    ],
)
def test_wrong_option_is_refused_where_it_is_written(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        sky.integrations.ray_cluster(**options)


@pytest.mark.parametrize(
    ("missing", "options", "text"),
    [("ray", {}, "ray: not installed here"), ("colorful", {"dashboard": True}, r"ray\[default\]: not installed here")],
)
def test_node_without_ray_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: str, options: dict[str, Any], text: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == missing else found(name, *rest)
    )
    with pytest.raises(MissingDependency, match=text):
        RayClusterIntegration(**options).prepare(HEAD)
