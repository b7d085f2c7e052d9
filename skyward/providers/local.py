"""Local provider: each node is an agent process on this machine, with the same frames as a remote node."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pickle
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ..core.limits import default_blob_limit, memory_bytes
from ..core.ownership import runtime_folder
from ..core.process import PACKAGE_ROOT, is_readable, processes_below
from ..core.records import dataclass
from ..core.signatures import checked_options
from ..errors import NoCapacity, ProviderError, UsageError
from ..events import Emit
from ..node.agent.boot import BOOT
from ..node.slot.threads import limit_threads
from ..values.image import LOCAL_FIELDS, LONGEST_VARIABLE
from ..values.machine import Machine, Offer, PoolSpec
from ..values.topology import Peer
from ..wire.tasks import SOCKET_NAME, NodeConfig

if TYPE_CHECKING:
    from ..node.agent.devices import NodeDevices

_START_LIMIT_S = 30.0
_END_LIMIT_S = 5.0
_ADDRESS = "127.0.0.1"
_CONNECT_S = 10.0
_FOLDER = "skyward"
"""Parent of the nodes' folders, below the temporary folder."""
_BOOT_FILES = """
import sys
sys.path[:] = sys.argv[1:-1]
from skyward.node.agent.file_server import serve
sys.exit(serve())
"""
_ARCHITECTURES = {"aarch64": "arm64"}


@checked_options
@dataclass(frozen=True, kw_only=True)
class Local:
    """Nodes on this machine, each one a separate process.

    A task sees the working folder, the `sys.path` and the environment of this process, with `Image.env` applied on
    top. Its standard input is empty. Numeric libraries get `cores // slots` threads each, unless OMP_NUM_THREADS or a
    similar variable is set. Nodes divide the GPUs that this process sees (CUDA_VISIBLE_DEVICES); if there are fewer
    GPUs than nodes, they share them. Only the `env` and `includes` of an image apply, because tasks use the packages
    of this environment.

    Args:
        lease_s: seconds that a node has to end by itself once the client is gone; then it is killed; > 0.

    Raises:
        UsageError: `lease_s` is not a positive number.

    Example:
        >>> Local()
        Local(lease_s=5.0)
    """

    name: ClassVar[str] = "local"
    extra: ClassVar[str] = ""
    acts_on_image: ClassVar[frozenset[str]] = frozenset(LOCAL_FIELDS)
    shares_files: ClassVar[bool] = True
    is_rented: ClassVar[bool] = False

    lease_s: float = 5.0
    """Seconds that a node has to end by itself once the client is gone; then it is killed; > 0."""

    def __post_init__(self) -> None:
        if not self.lease_s > 0:
            raise UsageError(f"Local.lease_s={self.lease_s!r}: must be a number of seconds > 0; set lease_s=5.0")

    def offers(self, spec: PoolSpec) -> list[Offer]:
        """Return one offer, this machine. Raises NoCapacity if it does not fit the spec."""
        cores = os.cpu_count() or 1
        memory = memory_bytes() / 2**30
        if spec.vcpus is not None and spec.vcpus > cores:
            raise NoCapacity(
                f"local: vcpus={spec.vcpus} exceeds the {cores} cores of this machine; set vcpus={cores} or less",
                field="vcpus",
                value=spec.vcpus,
            )
        if spec.memory_gib is not None and spec.memory_gib > memory:
            raise NoCapacity(
                f"local: memory_gib={spec.memory_gib:g} exceeds the {memory:.1f} GiB of this machine; request less",
                field="memory_gib",
                value=spec.memory_gib,
            )
        machine = _ARCHITECTURES.get(platform.machine(), platform.machine())
        if spec.architecture not in (None, machine):
            raise NoCapacity(
                f"local: architecture={spec.architecture!r}, but this machine is {machine!r}; leave architecture out",
                field="architecture",
                value=spec.architecture,
            )
        self._check_accelerator(spec)
        return [Offer(provider="local", instance_type="this machine", vcpus=cores, memory_gib=memory)]

    def plan(self, spec: PoolSpec, offer: Offer, pool: str) -> list[NodeConfig]:
        """Return the configuration of each node, without starting any."""
        return [self._config(spec, pool, node) for node in range(spec.nodes)]

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        """Start the agents of these nodes; all of them, or none and raise ProviderError."""
        configs = [self._config(spec, pool, node) for node in nodes]
        started: list[tuple[NodeConfig, subprocess.Popen[bytes]]] = []
        try:
            for config in configs:
                started.append((config, _start(config)))  # start them all first, so that they boot in parallel
            spec.meanwhile()
            return [_ready(config, process, self.lease_s) for config, process in started]
        except BaseException:  # includes KeyboardInterrupt: a failed launch must leave no process behind
            for config, process in started:
                _kill(process)
                _remove_node(config.folder)
            raise

    def terminate(self, machines: list[Machine]) -> None:
        """Wait a moment for agents that were told to end, then kill them and remove their folders."""
        deadline = time.monotonic() + _END_LIMIT_S
        for machine in machines:
            process: subprocess.Popen[bytes] = machine.handle
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(process)
            _close_output(process)
            _remove_node(machine.folder)

    def _check_accelerator(self, spec: PoolSpec) -> None:
        """Raise NoCapacity if a node would lack the requested accelerators."""
        wanted = spec.accelerator
        if wanted is None:
            return
        from ..node.agent.devices import find_devices

        devices = find_devices({**os.environ, **spec.image.environment()})
        if wanted.is_met_by(devices.product, len(devices) // spec.most_nodes):
            return
        has = f"{len(devices)} {devices.product}" if devices else "no accelerator"
        nodes = f" for each of {spec.most_nodes} nodes" if spec.most_nodes > 1 else ""
        raise NoCapacity(
            f"local: accelerator={wanted}{nodes}, but tasks on this machine see {has}; leave accelerator out "
            "to use the devices of this machine",
            field="accelerator",
            value=spec.accelerator,
        )

    def _config(self, spec: PoolSpec, pool: str, node: int) -> NodeConfig:
        cores = os.cpu_count() or 1
        own = spec.image.environment()
        env = {**os.environ, **own}
        if spec.most_nodes > 1:
            env.update(_part_of_devices(env, own, node, spec.most_nodes))
        thread_variables = limit_threads(env, cores // (spec.most_nodes * spec.concurrency))
        cwd = _working_folder()
        includes = [os.path.abspath(os.path.expanduser(path)) for path in spec.image.includes]
        path = [os.path.abspath(p) for p in [*includes, *sys.path, PACKAGE_ROOT]]
        return NodeConfig(
            pool=pool,
            node=node,
            folder=os.path.join(runtime_folder(_FOLDER), f"{pool}-{node}-{os.urandom(3).hex()}"),
            slots=spec.concurrency,
            executor=spec.executor,
            python=sys.executable,
            path=tuple(dict.fromkeys(path)),
            cwd=cwd,
            env=tuple(env.items()),
            cores=max(1, cores // spec.most_nodes),
            memory_gib=memory_bytes() / 2**30 / spec.most_nodes,
            thread_variables=thread_variables,
            preload=spec.preload,
            forks_zygote=True,
            address=_ADDRESS,
            interface="lo",
            lease_s=self.lease_s,
            starter=os.getpid(),
            cancel_grace_s=spec.cancel_grace_s,
            volumes=tuple(spec.volumes.items()),
            blob_limit_bytes=default_blob_limit(spec.most_nodes),
        )


def _part_of_devices(env: dict[str, str], own: Mapping[str, str], node: int, nodes: int) -> dict[str, str]:
    """Return the variables by which a node sees its part of the devices, unless the image chooses devices itself."""
    from ..node.agent.devices import CHOOSING_VARIABLES

    if not CHOOSING_VARIABLES.isdisjoint(own):
        return {}
    return _devices_here(frozenset(env.items())).part(node, nodes, env)


@functools.lru_cache(maxsize=1)
def _devices_here(env: frozenset[tuple[str, str]]) -> NodeDevices:
    """Find the devices of this machine, once for all nodes of a launch: the driver's program takes its time."""
    from ..node.agent.devices import find_devices

    return find_devices(dict(env))


def _remove_node(folder: str) -> None:
    """Remove the folder of a node; see `watchdog`. Its own processes have done so, unless all of them were killed."""
    if os.path.lexists(folder):
        from ..node.agent.watchdog import remove_node  # only here, as no pool needs it before

        remove_node(folder)


def _longest_variable(config: NodeConfig) -> str:
    name, value = max(config.env, key=lambda pair: len(pair[1]))
    return f"{name}, with {len(value)} characters; Linux allows {LONGEST_VARIABLE}"


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "working folder: it was removed, but tasks run in it; change to an existing folder with os.chdir()"
        ) from None


def _start(config: NodeConfig) -> subprocess.Popen[bytes]:
    try:
        # Started as the slots expect it, because they are forked from it.
        process = subprocess.Popen(
            [config.python, "-c", BOOT, *config.path],
            cwd=config.cwd,
            env=dict(config.env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:  # out of processes, memory or file descriptors
        longest = f"; shorten the environment, whose longest variable is {_longest_variable(config)}"
        hint = longest if error.errno == errno.E2BIG else "; free memory, processes or descriptors"
        raise _failure(config, f"could not be started: {error.strerror}{hint}") from error
    assert process.stdin is not None
    _started.add(process)
    with contextlib.suppress(BrokenPipeError):  # the process died; `_ready` reports how
        process.stdin.write(pickle.dumps(config))
        process.stdin.close()
    return process


def _dial(port: int) -> socket.socket:
    connection = socket.create_connection((_ADDRESS, port), _CONNECT_S)
    connection.settimeout(None)
    return connection


def _python(config: NodeConfig) -> list[str]:
    return [config.python, "-S", "-E", "-s", "-c"]


def _ready(config: NodeConfig, process: subprocess.Popen[bytes], lease_s: float) -> Machine:
    assert process.stdout is not None
    readable = is_readable(process.stdout, _START_LIMIT_S)
    line = process.stdout.readline().decode().strip() if readable else ""
    if not line.startswith(os.sep):
        silent = f"printed nothing for {_START_LIMIT_S:.0f} s; check the load of this machine"
        raise _failure(config, (line or _end_of(process)) if readable else silent)
    return Machine(
        node=config.node,
        socket_path=config.socket_path,
        folder=config.folder,
        pid=process.pid,
        peer=Peer(node=config.node, private_ip=_ADDRESS),
        slots=config.slots,
        lease_s=lease_s,
        interface=config.interface,
        dial=_dial,
        files=(*_python(config), _BOOT_FILES, *config.path, config.cwd),
        handle=process,
    )


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """Describe the end of an agent that closed its output."""
    try:
        code = process.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:  # reported by the return value
        return "closed its output and did not start; read its output above"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name} while it started; check the memory of this machine"
    return f"exited with code {code} while it started; read its output above"


def _failure(config: NodeConfig, problem: str) -> ProviderError:
    # Retryable, because the cause may be temporary, such as a shortage of memory.
    return ProviderError(f"local: the agent of node {config.node} {problem}", retryable=True)  # words: ok, or its own


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a watchdog that does not exit, and all its descendants: after SIGKILL it cannot kill them itself."""
    below = processes_below(process.pid)
    process.kill()
    for pid in below:
        with contextlib.suppress(ProcessLookupError):  # already exited
            os.kill(pid, signal.SIGKILL)
    process.wait()
    _close_output(process)


def _close_output(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe that shows a node that this process lives; see `NodeConfig.starter`."""
    _started.discard(process)
    if process.stdout is not None:
        process.stdout.close()


_started: set[subprocess.Popen[bytes]] = set()
"""First processes of the nodes that this process has started and not ended."""


def _forget_in_child() -> None:
    """Let go of the pipes in a fork of this process, which may live on when this one becomes another program."""
    with contextlib.suppress(OSError, ValueError):  # no descriptor is left, or a pipe is closed at this moment
        nothing = os.open(os.devnull, os.O_RDONLY)
        for process in _started:
            if process.stdout is not None:  # another thread may have held the file's lock, so it is not closed here
                os.dup2(nothing, process.stdout.fileno(), inheritable=False)
        os.close(nothing)
    _started.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def collect_garbage(*, is_dry_run: bool = False) -> list[str]:
    """Remove the folders that dead pools of this user left on this machine.

    Live pools are not touched. Neither are starting ones: a young folder may not have its socket yet.

    Args:
        is_dry_run: list the folders without removing them.

    Returns:
        Paths of the folders that were removed, or would be.
    """
    garbage: list[str] = []
    folder = runtime_folder(_FOLDER)
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        # Asked in this order, because a starting node may make its socket in between.
        if not _is_starting(path) and not _answers(os.path.join(path, SOCKET_NAME)):
            if not is_dry_run:
                _remove_node(path)
            garbage.append(path)
    return garbage


def _is_starting(path: str) -> bool:
    try:
        age_s = time.time() - os.stat(path).st_mtime
    except FileNotFoundError:  # its own node has just removed it
        return True
    return age_s < _START_LIMIT_S and not os.path.exists(os.path.join(path, SOCKET_NAME))


def _answers(socket_path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect(socket_path)
        except (BlockingIOError, TimeoutError):  # its agent is busy, and others wait already
            return True
        except OSError:  # nobody listens
            return False
    return True
