"""Pools on a user's Ray cluster of two hosts, in the oldest version of Ray that skyward supports.

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
from tests.hosts.base import USERS_PYTHON, USERS_RAY
from tests.hosts.faults import Place
from tests.hosts.users_ray import UsersRay
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 60.0
NewPool = Callable[..., sky.ComputePool]


@pytest.fixture(scope="module")
def cluster(users_ray: Callable[[int], UsersRay]) -> Iterator[UsersRay]:
    cluster = users_ray(2)
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def new_pool(cluster: UsersRay, place: Callable[[int], Place]) -> Iterator[NewPool]:
    """Return a function that returns a pool of two nodes on the cluster. Afterwards, nothing of the pools is there."""
    shell = cluster.hosts[0].command_inside()

    def give(*, pip: tuple[str, ...] = (), mine: int = 0, **options: Any) -> sky.ComputePool:
        provider = sky.RayCluster(shell, python=USERS_PYTHON, resources={"mine": mine})
        image = sky.Image(pip=pip, pip_index_url=place(2).index.simple)
        return sky.ComputePool(provider, nodes=2, image=image, logs=False, **options)

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


def test_calls_use_a_ray_of_their_own_in_the_version_of_the_cluster(new_pool: NewPool) -> None:
    @sky.compute(cpus=1)
    @sky.integrations.ray_cluster(object_store_gib=0.1)
    def use_ray(rows: int) -> tuple[str, str, int, int]:
        import ray.data
        import ray.train
        from ray.train.data_parallel_trainer import DataParallelTrainer

        def train() -> None:
            context = ray.train.get_context()
            ray.train.report({"workers": context.get_world_size()})

        ray.init(logging_level="ERROR")
        total = ray.data.range(rows).map(lambda row: {"x": 2 * row["id"]}).sum("x")
        workers = ray.train.ScalingConfig(
            num_workers=2, placement_strategy="STRICT_SPREAD", trainer_resources={"CPU": 0}
        )
        trained = DataParallelTrainer(train, scaling_config=workers).fit()
        return sys.executable, ray.__version__, total, trained.metrics["workers"]

    with new_pool() as pool:
        assert use_ray(100) @ pool == [(USERS_PYTHON, USERS_RAY, 9900, 2)]


def test_a_placement_group_that_stays_pending_says_what_is_lacking(new_pool: NewPool) -> None:
    asked = r"2 nodes, each with CPU=1, GPU=1, accelerator_type:H100=0.001; 0 of the cluster's 2 nodes are that large"
    with pytest.raises(NoCapacity, match=asked):
        new_pool(accelerator="H100", provision_timeout_s=1.0).start()
    with pytest.raises(NoCapacity, match=r"each with CPU=1, mine=2; 0 of the cluster's 2 nodes .* 2 of mine free"):
        new_pool(mine=2, provision_timeout_s=1.0).start()
