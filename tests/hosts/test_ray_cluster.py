"""Pools on a user's Ray cluster of two hosts, in the oldest and the newest version of Ray that skyward supports.

`kubectl exec` cannot be had here. A command that enters a host stands in for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyward as sky
from skyward.errors import NoCapacity
from skyward.values.machine import LogLine
from tests.hosts.base import USERS_RAYS
from tests.hosts.faults import Place
from tests.hosts.fixtures import NewUsersRay
from tests.hosts.users_ray import UsersRay
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 60.0
NewPool = Callable[..., sky.ComputePool]


@pytest.fixture(scope="module", params=USERS_RAYS)
def cluster(users_ray: NewUsersRay, request: pytest.FixtureRequest) -> Iterator[UsersRay]:
    cluster = users_ray(2, request.param)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def new_pool(cluster: UsersRay, place: Callable[[int], Place]) -> Iterator[NewPool]:
    """Return a function that returns a pool of two nodes on the cluster. Afterwards, nothing of the pools is there."""
    shell = cluster.hosts[0].command_inside()

    def give(*, pip: tuple[str, ...] = (), mine: int = 0, **options: Any) -> sky.ComputePool:
        provider = sky.RayCluster(shell, python=cluster.python, resources={"mine": mine})
        image = sky.Image(pip=pip, pip_index_url=place(2).index.simple)
        return sky.ComputePool(provider, nodes=2, image=image, **{"logs": False, **options})

    def left() -> list[str]:
        commands = [process.command for host in cluster.hosts for process in host.started_processes()]
        folders = [path.name for host in cluster.hosts for path in host.path("/tmp/skyward-0").glob("*")]
        return folders + [command for command in commands if "skyward" in command or "ShellBridge" in command]

    yield give
    until(lambda: not left(), within_s=LIMIT_S)


def test_calls_have_the_packages_of_the_image_and_nothing_of_ray(cluster: UsersRay, new_pool: NewPool) -> None:
    @sky.compute
    def look() -> tuple[str, bool, list[str]]:
        import importlib.util

        import threadpoolctl  # noqa: F401

        return (
            os.uname().nodename,
            bool(importlib.util.find_spec("ray")),
            [n for n in os.environ if n.startswith("RAY")],
        )

    with new_pool(pip=("threadpoolctl",), mine=1) as pool:
        answers = look() @ pool
        assert sorted(answers) == [(host.name, False, []) for host in cluster.hosts]


def test_calls_use_a_ray_of_their_own_in_the_version_of_the_cluster(cluster: UsersRay, new_pool: NewPool) -> None:
    @sky.compute(cpus=1)
    @sky.integrations.ray_cluster(object_store_gib=0.1)
    def use_ray(rows: int) -> tuple[str, str, int, list[int]]:
        os.environ["RAY_TRAIN_V2_ENABLED"] = "1"  # as in the newest one without it
        import ray.data
        import ray.train
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        class Worlds:
            def __init__(self) -> None:
                self.seen: list[int] = []

            def see(self, size: int) -> list[int]:
                self.seen.append(size)
                return self.seen

        def train() -> None:
            ray.get(worlds.see.remote(ray.train.get_context().get_world_size()))

        ray.init(logging_level="ERROR")
        worlds = ray.remote(num_cpus=0)(Worlds).remote()
        total = ray.data.range(rows).map(lambda row: {"x": 2 * row["id"]}).sum("x")
        workers = ray.train.ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD")
        DataParallelTrainer(train, scaling_config=workers).fit()
        return sys.executable, ray.__version__, total, ray.get(worlds.see.remote(0))

    with new_pool() as pool:
        assert use_ray(100) @ pool == [(cluster.python, cluster.version, 9900, [2, 2, 0])]


def test_calls_have_the_dashboard_of_their_ray_and_tune(cluster: UsersRay, new_pool: NewPool) -> None:
    @sky.compute(cpus=1)
    @sky.integrations.ray_cluster(dashboard=True, object_store_gib=0.1)
    def tune() -> tuple[str, str, list[int]]:
        import json
        import urllib.request

        import ray
        from ray import tune

        address = ray.init(logging_level="ERROR").dashboard_url
        token = os.environ["RAY_AUTH_TOKEN"]
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"http://{address}/api/version", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            version = json.load(reply)["ray_version"]
        results = tune.Tuner(
            lambda config: {"y": config["x"] ** 2}, param_space={"x": tune.grid_search([1, 2, 3])}
        ).fit()
        return token, version, sorted(result.metrics["y"] for result in results)

    lines: list[LogLine] = []
    with new_pool(logs=lines.append) as pool:
        ((token, version, squares),) = tune() @ pool
        assert (version, squares) == (cluster.version, [1, 4, 9])
        until(lambda: any(line.text.endswith(f"token is {token}") for line in lines))


def test_a_placement_group_that_stays_pending_says_what_is_lacking(new_pool: NewPool) -> None:
    asked = r"2 nodes, each with CPU=1, GPU=1, accelerator_type:H100=0.001; 0 of the cluster's 2 nodes are that large"
    with pytest.raises(NoCapacity, match=asked) as lacking:
        new_pool(accelerator="H100", provision_timeout_s=1.0).start()
    assert (lacking.value.field, str(lacking.value.value)) == ("accelerator", "H100 80GB")
    text = r"each with CPU=1, mine=2; 0 of the cluster's 2 nodes .* 2 of mine free"
    with pytest.raises(NoCapacity, match=text) as lacking:
        new_pool(mine=2, provision_timeout_s=1.0).start()
    assert (lacking.value.field, lacking.value.value) == ("resources", {"mine": 2})
