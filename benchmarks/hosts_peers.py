"""Peers that reach a host by ssh: skyward, and Ray Client and a Dask Client through one tunnel to the same host.

Each is a context manager that yields a `Caller`. Everything that a peer runs on the host ends with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts.bed import Bed
from tests.hosts.host import Host

PEERS_FOLDER = "/opt/peers"
_PORTS = {"ray": 10001, "dask": 8786}
_START_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Ways to call functions on one pool.

    `call` makes a call and waits for it. `futures` submits many calls and waits for all. `map` is the fastest way that
    the library's documentation names for many calls of one function.
    """

    call: Callable[..., Any]
    futures: Callable[[Callable[..., Any], int], list[Any]]
    map: Callable[[Callable[[int], int], range], list[int]]


@contextlib.contextmanager
def skyward(bed: Bed, host: str, image: Any, *, transport: str | None = None) -> Iterator[Caller]:
    """Connect skyward. `host` is a name of the bed's ssh configuration."""
    import skyward as sky

    provider = sky.SSH(hosts=[host], config_file=str(bed.folder / "bench_config"), transport=transport)  # type: ignore[arg-type]
    with sky.ComputePool(provider, concurrency=2, image=image, logs=False, console=False) as pool:

        def call(function: Callable[..., Any], *args: Any) -> Any:
            return sky.compute(function)(*args) >> pool

        def futures(function: Callable[..., Any], count: int) -> list[Any]:
            compute = sky.compute(function)
            return [future.result() for future in [compute() > pool for _ in range(count)]]

        yield Caller(call=call, futures=futures, map=pool.map)


@contextlib.contextmanager
def ray(port: int) -> Iterator[Caller]:
    """Connect a Ray Client. `port` is this end of the tunnel."""
    import ray as ray_module

    environment = {"env_vars": {"PYTHONPATH": f"{PEERS_FOLDER}:{PEERS_FOLDER}/ours"}}
    ray_module.init(f"ray://127.0.0.1:{port}", runtime_env=environment, logging_level="ERROR")
    remotes: dict[Any, Any] = {}

    def remote(function: Callable[..., Any]) -> Any:
        return remotes.setdefault(function, ray_module.remote(function))

    def group(function: Callable[[int], int], items: range) -> list[int]:
        return [function(item) for item in items]

    def grouped(function: Callable[[int], int], items: range) -> list[int]:
        task, size = ray_module.remote(group), max(1, len(items) // 8)
        parts = [task.remote(function, items[at : at + size]) for at in range(0, len(items), size)]
        return [value for part in ray_module.get(parts) for value in part]

    try:
        yield Caller(
            call=lambda function, *args: ray_module.get(remote(function).remote(*args)),
            futures=lambda function, count: list(ray_module.get([remote(function).remote() for _ in range(count)])),
            map=grouped,
        )
    finally:
        ray_module.shutdown()


@contextlib.contextmanager
def dask(port: int) -> Iterator[Caller]:
    """Connect a Dask Client. `port` is this end of the tunnel."""
    from distributed import Client

    with Client(f"tcp://127.0.0.1:{port}", timeout=30) as client:
        yield Caller(
            call=lambda function, *args: client.submit(function, *args, pure=False).result(),
            futures=lambda function, count: list(
                client.gather([client.submit(function, pure=False) for _ in range(count)])
            ),
            map=lambda function, items: list(
                client.gather(client.map(function, items, pure=False, batch_size=max(1, len(items) // 8)))
            ),
        )


@contextlib.contextmanager
def tunnel(bed: Bed, host: Host) -> Iterator[dict[str, int]]:
    """Run Ray and Dask on the host, with 2 workers each, and one ssh connection that forwards a local port to each."""
    _install_peers(host)
    logs: list[subprocess.Popen[bytes]] = []
    ports = {name: _free_port() for name in _PORTS}
    forwards = [f"-L127.0.0.1:{ports[name]}:127.0.0.1:{there}" for name, there in _PORTS.items()]
    logs.append(subprocess.Popen(["ssh", "-F", str(bed.ssh_config), "-N", *forwards, f"root@{host.name}"]))
    try:
        logs.append(_on(bed, host, "ray.scripts.scripts", *_RAY))
        logs.append(_on(bed, host, "distributed.cli.dask_scheduler", *_DASK_SCHEDULER))
        logs.append(_on(bed, host, "distributed.cli.dask_worker", *_DASK_WORKER))
        for port in _PORTS.values():
            _wait_for_port(host, port)
        yield ports
    finally:
        for process in reversed(logs):
            process.terminate()
            process.wait()
        for process in host.started_processes():
            host.run("kill", "-9", str(process.pid), check=False)


_RAY = ("start", "--head", "--block", "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--num-cpus=2")
_RAY += ("--ray-client-server-port=10001", "--disable-usage-stats", "--object-store-memory=300000000")
_DASK_SCHEDULER = ("--host=127.0.0.1", "--port=8786", "--no-dashboard")
_DASK_WORKER = ("tcp://127.0.0.1:8786", "--nworkers=2", "--nthreads=1", "--no-dashboard", "--host=127.0.0.1")


def _install_peers(host: Host) -> None:
    """Copy this environment's packages as they are. The host has the same minor version of Python."""
    there = host.path(PEERS_FOLDER)
    if not there.exists():
        shutil.copytree(sysconfig.get_path("purelib"), there, symlinks=True)
    (there / "ours").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("workloads.py"), there / "ours" / "workloads.py")


def _on(bed: Bed, host: Host, module: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = f"PYTHONPATH={PEERS_FOLDER}:{PEERS_FOLDER}/ours exec python3 -m {module} {' '.join(arguments)}"
    log = open(bed.folder / f"{module}.log", "wb")  # noqa: SIM115  # it outlives this function
    return subprocess.Popen(
        ["ssh", "-tt", "-F", str(bed.ssh_config), f"root@{host.name}", command],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
    )


def _wait_for_port(host: Host, port: int) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    probe = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
    while host.run("python3", "-c", probe, check=False).returncode:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on port {port} of {host.name} after {_START_LIMIT_S:.0f} s")
        time.sleep(0.2)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def echo_round_trips(bed: Bed, host: str, *, count: int, size: int = 100) -> list[float]:
    """Return the seconds from a write to `ssh host cat` until its echo is read: the network, and ssh at both ends."""
    argv = ["ssh", "-F", str(bed.ssh_config), f"root@{host}", "cat"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as cat:
        assert cat.stdin is not None
        assert cat.stdout is not None
        found = []
        for _ in range(count + 20):
            begin = time.perf_counter()
            cat.stdin.write(b"x" * size)
            got = 0
            while got < size:
                got += len(cat.stdout.read(size - got) or b"")
            found.append(time.perf_counter() - begin)
        cat.stdin.close()
    return found[20:]


def upload_seconds(bed: Bed, host: str, data: memoryview) -> float:
    """Return the seconds of sending these bytes to `ssh host 'cat > /dev/shm/x'`, log-in excluded (for skyward too)."""
    command = "read go; cat > /dev/shm/upload; echo done; rm /dev/shm/upload"
    argv = ["ssh", "-F", str(bed.folder / "bench_config"), f"root@{host}", command]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as upload:
        assert upload.stdin is not None
        assert upload.stdout is not None
        upload.stdin.write(b"go\n")
        time.sleep(0.5)  # logged in
        begin = time.perf_counter()
        while data:
            data = data[os.write(upload.stdin.fileno(), data[: 1 << 20]) :]
        upload.stdin.close()
        upload.stdout.read()
        return time.perf_counter() - begin
