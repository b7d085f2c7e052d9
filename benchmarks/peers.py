"""Adapters to the peers behind one Protocol. Each uses its peer as the peer's documentation advises.

The constructor imports the library and `start` makes the pool. So "time to first result" begins at `start`, and the
import is a measure of its own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of the pool. `nodes` is meant for skyward: the other peers have only workers."""

    nodes: int = 1
    workers_per_node: int = 2
    object_store_bytes: int = 800_000_000

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node


class Peer(Protocol):
    """A pool of processes on this machine.

    `submit` returns a handle that only this peer understands. `result` and `gather` wait for handles. `call` makes one
    call and waits for it, as the peer's users write that. `put` turns an argument into the peer's own form for large or
    repeated arguments. `close` returns once the pool's processes have been told to end. It may be called twice and
    after a failed `start`.
    """

    def start(self) -> None: ...
    def call(self, function: Callable[..., Any], *args: Any) -> Any: ...
    def submit(self, function: Callable[..., Any], *args: Any) -> Any: ...
    def result(self, handle: Any) -> Any: ...
    def gather(self, handles: Sequence[Any]) -> list[Any]: ...
    def map(self, function: Callable[[int], int], items: range, *, chunk: int | None) -> list[int]: ...
    def put(self, value: Any) -> Any: ...
    def spread(self, function: Callable[..., Any], value: Any, *args: Any) -> list[Any]: ...
    def close(self) -> None: ...


class _FuturesPeer:
    """Common part of every pool with `concurrent.futures` futures."""

    _executor: Any = None

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.result(self.submit(function, *args))

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._executor.submit(function, *args)

    def result(self, handle: Any) -> Any:
        return handle.result()

    def gather(self, handles: Sequence[Any]) -> list[Any]:
        return [handle.result() for handle in handles]

    def map(self, function: Callable[[int], int], items: range, *, chunk: int | None) -> list[int]:
        return list(self._executor.map(function, items, chunksize=chunk or 1))

    def put(self, value: Any) -> Any:
        return value

    def spread(self, function: Callable[..., Any], value: Any, *args: Any) -> list[Any]:
        return self.gather([self.submit(function, value, *args) for _ in range(self.shape.workers)])


class Skyward(_FuturesPeer):
    """`sky.Local()` with default settings: its map takes no chunk size."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        import skyward

        self._sky: Any = skyward
        self._decorated: dict[Callable[..., Any], Any] = {}

    def start(self) -> None:
        self._executor = self._sky.ComputePool(
            provider=self._sky.Local(),
            nodes=self.shape.nodes,
            concurrency=self.shape.workers_per_node,
            logs=False,
        )
        self._executor.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        compute = self._decorated.get(function)
        if compute is None:
            compute = self._decorated[function] = self._sky.compute(function)
        return self._executor.submit(compute(*args))

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call by the operator, as users write it. A future would take longer."""
        compute = self._decorated.get(function)
        if compute is None:
            compute = self._decorated[function] = self._sky.compute(function)
        return compute(*args) >> self._executor

    def map(self, function: Callable[[int], int], items: range, *, chunk: int | None) -> list[int]:
        return list(self._executor.map(function, items))

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()


class ProcessPool(_FuturesPeer):
    """`concurrent.futures.ProcessPoolExecutor` with the platform's default start method."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        from concurrent.futures import process

        self._process = process

    def start(self) -> None:
        self._executor = self._process.ProcessPoolExecutor(self.shape.workers)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)


class Loky(_FuturesPeer):
    """loky's reusable executor, as joblib uses it, without its idle timeout."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        import loky

        self._loky: Any = loky

    def start(self) -> None:
        self._executor = self._loky.get_reusable_executor(max_workers=self.shape.workers, timeout=None)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(kill_workers=True)


class MultiprocessingPool(_FuturesPeer):
    """`multiprocessing.Pool` with the platform's default start method."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        import multiprocessing.pool

        self._multiprocessing = multiprocessing

    def start(self) -> None:
        self._executor = self._multiprocessing.Pool(self.shape.workers)

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._executor.apply_async(function, args)

    def result(self, handle: Any) -> Any:
        return handle.get()

    def gather(self, handles: Sequence[Any]) -> list[Any]:
        return [handle.get() for handle in handles]

    def map(self, function: Callable[[int], int], items: range, *, chunk: int | None) -> list[int]:
        return list(self._executor.map(function, items, chunksize=chunk))

    def close(self) -> None:
        if self._executor is not None:
            self._executor.terminate()
            self._executor.join()


class Ray:
    """Ray on this machine: tasks, objects by `ray.put`. Small calls are grouped by hand: tasks have no chunks."""

    def __init__(self, shape: Shape) -> None:
        import ray

        self._ray: Any = ray
        self._remote: dict[Callable[..., Any], Any] = {}
        self.shape = shape
        self._folder: str | None = None

    def start(self) -> None:
        # The folder is in memory and has a short name, because it holds Ray's unix sockets and a socket's path has 107
        # bytes at most.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/dev/shm")
        self._ray.init(
            num_cpus=self.shape.workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=self.shape.object_store_bytes,
            _temp_dir=self._folder,
        )

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.result(self.submit(function, *args))

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        remote = self._remote.get(function)
        if remote is None:
            remote = self._remote[function] = self._ray.remote(function)
        return remote.remote(*args)

    def result(self, handle: Any) -> Any:
        return self._ray.get(handle)

    def gather(self, handles: Sequence[Any]) -> list[Any]:
        return list(self._ray.get(list(handles)))

    def map(self, function: Callable[[int], int], items: range, *, chunk: int | None) -> list[int]:
        from workloads import run_chunk

        parts = [self.submit(run_chunk, function, part) for part in chunks(items, chunk or 1)]
        return [value for part in self.gather(parts) for value in part]

    def put(self, value: Any) -> Any:
        return self._ray.put(value)

    def spread(self, function: Callable[..., Any], value: Any, *args: Any) -> list[Any]:
        reference = self.put(value)
        return self.gather([self.submit(function, reference, *args) for _ in range(self.shape.workers)])

    def close(self) -> None:
        self._ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class Dask:
    """dask.distributed's LocalCluster of processes; large arguments by `scatter`, small calls grouped by hand.

    `Client.map(batch_size=...)` groups the messages to the scheduler, not the tasks. The scheduler would still handle
    100,000 tasks one by one, which takes minutes, so the groups are made here.
    """

    def __init__(self, shape: Shape) -> None:
        import dask
        import distributed

        self._dask: Any = dask
        self._distributed: Any = distributed
        self.shape = shape
        self._cluster: Any = None
        self._client: Any = None
        self._folder: str | None = None

    def start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="dask-", dir="/dev/shm")
        # The client makes scratch files of its own, whatever `local_directory` the cluster has.
        self._dask.config.set(temporary_directory=self._folder)
        self._cluster = self._distributed.LocalCluster(
            processes=True,
            n_workers=self.shape.workers,
            threads_per_worker=1,
            dashboard_address=None,
            local_directory=self._folder,
            memory_limit=0,  # no spilling: this measures dispatch, not the disk
            silence_logs=50,
        )
        self._client = self._distributed.Client(self._cluster)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.result(self.submit(function, *args))

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._client.submit(function, *args, pure=False)

    def result(self, handle: Any) -> Any:
        return handle.result()

    def gather(self, handles: Sequence[Any]) -> list[Any]:
        return list(self._client.gather(list(handles)))

    def map(self, function: Callable[[int], int], items: range, *, chunk: int | None) -> list[int]:
        from workloads import run_sealed_chunk

        parts = chunks(items, chunk or 1)
        handles = self._client.map(run_sealed_chunk, [function] * len(parts), parts, pure=False)
        return [value for part in self.gather(handles) for value in part.values]

    def put(self, value: Any) -> Any:
        return self._client.scatter(value, hash=False)

    def spread(self, function: Callable[..., Any], value: Any, *args: Any) -> list[Any]:
        reference = self._client.scatter(value, hash=False, broadcast=True)
        workers = list(self._client.scheduler_info(n_workers=-1)["workers"])
        return self.gather(
            [self._client.submit(function, reference, *args, pure=False, workers=[worker]) for worker in workers]
        )

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._cluster is not None:
            self._cluster.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def chunks(items: range, size: int) -> list[range]:
    """Cut `items` into consecutive parts of `size`. The last part may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


@dataclass(frozen=True, kw_only=True)
class PeerKind:
    """Facts about a peer that the benchmark needs before it imports the peer."""

    title: str
    module: str
    distribution: str | None
    make: Callable[[Shape], Peer]
    tunes_chunks: bool = True


PEERS: dict[str, PeerKind] = {
    "skyward": PeerKind(
        title="skyward Local", module="skyward", distribution="skyward", make=Skyward, tunes_chunks=False
    ),
    "ppe": PeerKind(
        title="ProcessPoolExecutor", module="concurrent.futures.process", distribution=None, make=ProcessPool
    ),
    "loky": PeerKind(title="loky", module="loky", distribution="loky", make=Loky),
    "mp": PeerKind(
        title="multiprocessing.Pool", module="multiprocessing.pool", distribution=None, make=MultiprocessingPool
    ),
    "ray": PeerKind(title="Ray", module="ray", distribution="ray", make=Ray),
    "dask": PeerKind(title="Dask", module="distributed", distribution="distributed", make=Dask),
}
