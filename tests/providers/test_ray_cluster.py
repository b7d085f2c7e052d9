"""Pools on a Ray cluster that exists. A command that runs here stands in for `kubectl exec`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.bootstrap.ray.files import STUB, program, program_files
from skyward.errors import NoCapacity, ProviderError, UsageError
from skyward.events import ignore
from skyward.values.machine import Machine, PoolSpec
from tests.few_modules import few_modules
from tests.providers.raylets import LIMIT_S, Raylets
from tests.ssh.server import Server, needs_sshd
from tests.waiting import until

LEASE_S = 30.0
"""Lease of nodes that nobody tells to end. A busy machine may take ten seconds between two commands of their setup."""
BASE = Path(f"/tmp/skyward-{os.getuid()}")


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    with (
        tempfile.TemporaryDirectory(prefix="sky-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        few_modules(Path(folder, "config")),
    ):
        raylets = Raylets(Path(folder))
        try:
            raylets.start(1)
            yield raylets
        finally:
            raylets.end()


def provider(raylets: Raylets, **options: Any) -> sky.RayCluster:
    given: dict[str, Any] = {"address": raylets.address, "python": sys.executable, "lease_s": 60.0} | options
    return sky.RayCluster(raylets.shell(), **given)


def look() -> dict[str, Any]:
    """Describe the process of a task."""
    names = sorted(name for name in os.environ if name.startswith("RAY"))
    return {
        "pid": os.getpid(),
        "python": sys.executable,
        "ray": names,
        "has_ray": "ray" in sys.modules,
        "cache": os.environ["XDG_CACHE_HOME"],
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def is_left(raylets: Raylets, pool: str) -> list[str]:
    """Return what a pool has left on the machine: its folders, and the processes that it made Ray start."""
    folders = [path.name for path in BASE.glob(f"{raylets.named(pool)}*")]
    return folders + [f"{what} {pid}" for what in ("driver.py", "ray::ShellBridge") for pid in raylets.processes(what)]


def nothing_is_left(raylets: Raylets, *pools: str) -> None:
    """Return when pools have left nothing on the machine. The error at the deadline says what is left."""
    left: list[str] = []

    def look() -> bool:
        left[:] = [name for pool in pools for name in is_left(raylets, pool)]
        return not left

    try:
        until(look, within_s=LEASE_S + LIMIT_S)
    except AssertionError as error:
        error.add_note(f"left: {', '.join(left)}")
        raise


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


# Without a cluster ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shell": []}, r"shell=\[\]: neither a host nor a command"),
        ({"shell": "a b"}, "shell='a b': a command in one text"),
        ({"python": ""}, "python='': must be a text"),
        ({"resources": {"disk": -1}}, r"resources\['disk'\]=-1: must be a number >= 0"),
        ({"lease_s": 0}, "lease_s=0: must be a number of seconds > 0"),
    ],
)
def test_options_that_are_not_legal_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=rf"RayCluster\.{message}"):
        sky.RayCluster(options.pop("shell", "head"), **options)


def test_a_plan_has_a_bundle_for_each_node() -> None:
    cluster = sky.RayCluster("me@head:2222", resources={"disk": 2, "CPU": 0})
    spec = PoolSpec(nodes=2, vcpus=4, memory_gib=1.5, accelerator=sky.accelerators.A100(count=2))
    bundle = {"memory": 1610612736, "GPU": 2, "accelerator": "A100", "disk": 2}
    assert cluster.plan(spec, cluster.offers(spec)[0], "pool") == [bundle] * 2


def test_a_container_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Image\.container='debian:12': .* leave it out"):
        sky.RayCluster("head").offers(PoolSpec(image=sky.Image(container="debian:12")))


@pytest.mark.parametrize(
    ("facts", "image", "message"),
    [
        (["3.9.2", "2.60.0"], sky.Image(), "is Python 3.9.2, and skyward needs 3.11; install a cluster with Python"),
        (
            ["3.99.1", "2.60.0"],
            sky.Image(),
            r"is Python 3.99.1, and this is 3.*; install Python 3.* and Ray",
        ),
        (
            ["3.99.1", "2.49.1"],
            sky.Image(pip=["numpy"]),
            r"has Ray 2.49.1, and skyward needs 2.50; install 'ray>=2.50'",
        ),
        (
            ["3.99.1", ""],
            sky.Image(pip=["numpy"]),
            "Python 3.99.1 has no Ray; name the cluster's own Python by its path",
        ),
    ],
)
def test_versions_that_are_not_supported_are_named(
    tmp_path: Path, facts: list[str], image: sky.Image, message: str
) -> None:
    python = script(tmp_path / "python", f"echo '{json.dumps(facts)}'")
    refuses(sky.RayCluster(["env"], python=python), message, image)


def test_a_python_that_does_not_run_is_named() -> None:
    refuses(sky.RayCluster(["env"], python="no-such-python"), "python='no-such-python': .*; name the cluster's Python")


def test_a_shell_that_is_not_there_is_named() -> None:
    refuses(sky.RayCluster(["no-such-kubectl", "exec"]), r"shell=\['no-such-kubectl', 'exec'\]: there is no command")


def refuses(cluster: sky.RayCluster, message: str, image: sky.Image | None = None) -> None:
    spec = PoolSpec(image=image or sky.Image())
    with pytest.raises(UsageError, match=message):
        cluster.launch(spec, cluster.offers(spec), "refused", [0], lambda event: None)


# On a cluster ---------------------------------------------------------------------------------------------------------


class Losing:
    """A pool of two nodes that loses one, and gets another."""

    def __init__(self, raylets: Raylets) -> None:
        self._replaced = 0
        cluster = provider(raylets, lease_s=120.0)  # a busy machine takes long to start another bridge
        self.pool = sky.ComputePool(cluster, nodes=2, name=raylets.named("losing"), logs=False, on_event=self._on_event)

    def _on_event(self, event: sky.events.Event) -> None:
        self._replaced += isinstance(event, sky.events.NodeReplaced)

    def pids(self, *, after_losses: int = 0) -> set[int]:
        """Return the processes of both nodes, once `after_losses` nodes have been replaced in all."""
        until(lambda: self._replaced >= after_losses, within_s=2 * LIMIT_S)
        return {answer["pid"] for answer in sky.compute(look)() @ self.pool}


@pytest.fixture(scope="class")
def losing(raylets: Raylets) -> Iterator[Losing]:
    losing = Losing(raylets)
    with losing.pool:
        yield losing
    nothing_is_left(raylets, "losing")


@pytest.mark.slow
class TestPool:
    """Tests that share one pool, in this order: the last one loses a node. The fixture sees that nothing is left."""

    def test_calls_run_in_the_clusters_python(self, raylets: Raylets, losing: Losing) -> None:
        answers = sky.compute(look)() @ losing.pool
        assert [answer["python"] for answer in answers] == [sys.executable] * 2
        assert [answer["ray"] for answer in answers] == [[], []]
        assert not any(answer["has_ray"] for answer in answers)
        assert all(raylets.environment["XDG_CACHE_HOME"] == answer["cache"] for answer in answers)
        assert [answer["gpus"] for answer in answers] == ["-1", "-1"], "they have asked for none"
        until(lambda: len(raylets.processes("ray::ShellBridge")) == 2, within_s=LIMIT_S)
        large = bytes(3_000_000)
        assert sky.compute(len)(large) @ losing.pool == [3_000_000] * 2
        assert sky.compute(bytes)(3_000_000) >> losing.pool == large

    def test_a_bridge_that_is_killed_is_a_way_and_no_call(self, raylets: Raylets, losing: Losing) -> None:
        before = losing.pids()
        for pid in raylets.processes("ray::ShellBridge"):
            os.kill(pid, signal.SIGKILL)  # Ray loses its own processes
        assert sky.compute(len)("four") @ losing.pool == [4, 4]
        assert losing.pids() == before

    def test_a_lost_node_is_replaced(self, losing: Losing) -> None:
        first = losing.pids()
        os.kill(losing.pool.agent_pids()[1], signal.SIGKILL)
        second = losing.pids(after_losses=1)
        assert len(first & second) == 1


@pytest.mark.slow
def test_nodes_are_launched_again_when_a_raylet_or_the_driver_was_killed(raylets: Raylets) -> None:
    """A pool launches a lost node again once its lease is over. Here nobody waits for that."""
    cluster, spec, name = provider(raylets, lease_s=LEASE_S), PoolSpec(nodes=2), raylets.named("killed")

    def launch(*nodes: int) -> list[Machine]:
        return cluster.launch(spec, cluster.offers(spec), name, list(nodes), ignore)

    def runs(machine: Machine) -> bool:
        return bool(machine.handle.connection.run("exit 3", timeout_s=LIMIT_S).code == 3)

    first = launch(0, 1)
    raylets.end_node(1)
    raylets.start_node(2)  # where the bundle moves to
    (moved,) = [machine for machine in first if machine.peer.private_ip == "127.0.0.2"]
    (stayed,) = [machine for machine in first if machine is not moved]
    cluster.terminate([moved])
    (again,) = launch(moved.node)
    assert again.peer.private_ip == "127.0.0.3"
    assert runs(stayed)

    (driver,) = raylets.processes("driver.py")
    os.kill(driver, signal.SIGKILL)  # Ray then removes the placement group and the bridges
    until(lambda: not raylets.processes("driver.py"), within_s=LIMIT_S)
    cluster.terminate([stayed])
    assert not list(BASE.glob(f"{name}-ray-*")), "nobody else would remove the driver's folder"
    (node,) = launch(stayed.node)
    cluster.terminate([again])  # the next driver does not know it
    assert runs(node)
    cluster.terminate([node])
    nothing_is_left(raylets, "killed")  # the leases of the others have run out


@pytest.mark.slow
def test_a_driver_waits_for_its_first_node_and_ends_with_the_last(raylets: Raylets) -> None:
    order = {"address": raylets.address, "pool": "driver", "lease_s": 60.0}
    start = {"name": raylets.named("driver"), "before": "", "files": program_files(), "order": order}
    command = [*raylets.shell(), sys.executable, "-c", program("bootstrap/ray/start.py")]
    started = subprocess.run(command, input=json.dumps(start), stdout=subprocess.PIPE, text=True, check=True)
    path = json.loads(started.stdout)["listens"]

    def ask(order: dict[str, Any]) -> Any:
        stub = [sys.executable, str(Path(path).parent / STUB), path, "ask", json.dumps(order)]
        return json.loads(subprocess.run(stub, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])

    of_another = {"release": {"0": "of an earlier driver"}}
    assert ask(of_another) == {"released": True}
    node = ask({"place": {"0": {"CPU": 1}}, "limit_s": LIMIT_S})["placed"]["0"]
    assert ask(of_another) == {"released": True}
    assert ask({"ended": "nothing"}) == {}
    assert ask({"release": {"0": node["ticket"]}}) == {"released": True}
    nothing_is_left(raylets, "driver")


@pytest.mark.slow
def test_pools_have_different_accelerators(raylets: Raylets) -> None:
    @sky.compute
    def devices() -> tuple[str | None, int]:
        info = sky.instance_info()
        assert info is not None
        return os.environ.get("CUDA_VISIBLE_DEVICES"), info.accelerators

    def pool(name: str, **options: Any) -> sky.ComputePool:
        cluster = provider(raylets, resources={"CPU": 0})
        return sky.ComputePool(cluster, name=raylets.named(name), accelerator="RTX_4090", logs=False, **options)

    with pool("first") as first, pool("second") as second:
        assert sorted(devices() >> opened for opened in (first, second)) == [("0", 1), ("1", 1)]
        lacks = r"a node with GPU=1, accelerator_type:GeForce-RTX-4090=0.001; 1 of .* with 0 of GPU free"
        with pytest.raises(NoCapacity, match=lacks):
            pool("third", provision_timeout_s=1.0).start()
    nothing_is_left(raylets, "first", "second", "third")


@pytest.mark.slow
def test_room_that_is_not_there_is_named(raylets: Raylets) -> None:
    name = raylets.named("large")
    pool = sky.ComputePool(provider=provider(raylets), nodes=3, name=name, logs=False, provision_timeout_s=1.0)
    with pytest.raises(
        NoCapacity, match=r"3 nodes, each with CPU=1; 2 of the cluster's 2 nodes are that large"
    ) as raised:
        pool.start()
    assert "let the cluster grow" in str(raised.value)
    nothing_is_left(raylets, "large")


@pytest.mark.slow
def test_an_address_without_ray_is_named(raylets: Raylets) -> None:
    pool = sky.ComputePool(provider(raylets, address="nonsense"), name=raylets.named("nobody"), logs=False)
    with pytest.raises(ProviderError, match=r"RayCluster\.address='nonsense': Ray through env: .*; see `ray status`"):
        pool.start()
    nothing_is_left(raylets, "nobody")


CLIENT = """
import sys
import skyward as sky

host, key, public, name, options = eval(sys.argv[1])
shell = sky.SSHHost(host=host[0], port=host[1], key_file=key, host_keys=[public])
# Its lines of sh make tasks leave the cluster's Python.
image = sky.Image(run=["true"])
with sky.ComputePool(sky.RayCluster(shell, **options), nodes=2, name=name, image=image, logs=False) as pool:
    print(*sky.compute(lambda: __import__("sys").executable)() @ pool, flush=True)
    sky.compute(lambda: __import__("time").sleep(600))() @ pool
"""


@pytest.mark.slow
def test_an_ssh_host_is_a_way_in_and_nothing_is_left_of_a_client_that_is_killed(
    raylets: Raylets, tmp_path: Path
) -> None:
    needs_sshd()
    server = Server(tmp_path, environment=" ".join(f"{name}={value}" for name, value in raylets.environment.items()))
    server.start()
    host = (server.host, server.port), str(server.key), server.public_host_key
    options = {"address": raylets.address, "python": sys.executable, "lease_s": LEASE_S}
    command = [sys.executable, "-c", CLIENT, repr((*host, raylets.named("orphan"), options))]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        pythons = client.stdout.readline().split()
        assert len(pythons) == 2
        assert all(python.startswith(raylets.environment["XDG_CACHE_HOME"]) for python in pythons)
        assert is_left(raylets, "orphan")
        client.kill()
        client.wait(LIMIT_S)
        nothing_is_left(raylets, "orphan")
    finally:
        client.kill()
        client.communicate(timeout=LIMIT_S)
        server.stop()
