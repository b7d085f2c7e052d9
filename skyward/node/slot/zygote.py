"""Zygote: a single-threaded process that imports the slots' modules once and forks slots.

It runs no user code and touches no device. So its forks are as good as fresh interpreters, and start a hundred times
faster. Two things forbid a fork. If an import started a thread, a lock held by that thread would stay locked forever in
the child. If an import initialised CUDA, CUDA would not work in the child. In both cases each slot is executed afresh.

It talks to the agent over a packet socket. In: a pickled `ForkOrder` with its descriptors; a large order travels in one
more descriptor. Out: `("forked", number, pid)`, `("exited", pid, status)` and `("failed", number, text)`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from functools import partial
from typing import Any, NoReturn

from ...core.by_value import stand_in_for_script
from ...core.process import adopt_orphans, die_with_parent
from ...core.records import dataclass, make_constructors
from ...values.launch import ProcessLaunch
from ...values.topology import InstanceInfo, NetworkInfo
from .execute import TaskRun, explain_load_error
from .exit_handlers import forget_inherited, run_late_exit_handlers
from .slot import SlotConfig
from .threads import apply_thread_counts
from .worker import serve

_PACKET = 1 << 20
_ORDER_PACKET = 64 * 1024
"""Largest order in a packet, in bytes: packets cannot exceed the socket's buffer. Larger ones travel in a memfd."""
_IN_FILE = b"\0"
_STAYS_FORKABLE = {
    # Modules call torch.cuda.is_available() while they are imported, which would initialise CUDA in this process.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # Arrow's allocator; pandas and datasets import Arrow
}
_CUDA_DEVICE = "/dev/nvidia-uvm"
"""Device that initialising CUDA opens, and NVML (nvidia-smi's library) does not."""


@dataclass(frozen=True, kw_only=True)
class ZygoteConfig:
    path: tuple[str, ...]
    preload: tuple[str, ...] = ()
    is_for_ranks: bool = False
    """Whether processes that a rank has started end with the rank."""


@dataclass(frozen=True, kw_only=True)
class ForkOrder:
    """Order for one process.

    Its descriptors: socket, output pipe, error pipe, shared page. A process slot also gets the pipe of its shelf, and
    may get a direct line.
    """

    number: int
    config: SlotConfig
    launch: bytes = b""
    """Pickled Launch of a gang; empty for a plain slot."""


make_constructors(InstanceInfo, NetworkInfo, ProcessLaunch, TaskRun, ZygoteConfig)  # each slot would make its own


def send_order(sock: socket.socket, order: bytes, fds: list[int]) -> None:
    """Send one pickled ForkOrder, whole or not at all. Raises OSError; BlockingIOError on a non-blocking socket."""
    if len(order) <= _ORDER_PACKET:
        socket.send_fds(sock, [order], fds)
        return
    with open(os.memfd_create("skyward-order", os.MFD_CLOEXEC), "w+b") as file:
        file.write(order)
        file.flush()
        socket.send_fds(sock, [_IN_FILE], [*fds, file.fileno()])


def receive_order(sock: socket.socket) -> tuple[ForkOrder | None, list[int]]:
    """Receive an order and its descriptors; the order is None when the agent is gone."""
    data, fds, _, _ = socket.recv_fds(sock, _PACKET, 8, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    if not data:
        return None, fds
    if data == _IN_FILE:
        with open(fds.pop(), "rb") as file:
            file.seek(0)
            data = file.read()
    order: ForkOrder = pickle.loads(data)
    return order, fds


def main(fd: int) -> None:
    """Run the process: read the configuration, import, then fork on demand until the agent goes away."""
    die_with_parent()
    # A ConnectionError means that the agent has ended, and so does this process.
    with socket.socket(fileno=fd) as sock, contextlib.suppress(ConnectionError):
        order = sock.recv(_PACKET)
        if order:
            serve_orders(sock, pickle.loads(order))


def serve_orders(sock: socket.socket, config: ZygoteConfig) -> None:
    """Import the preloaded modules, then fork on demand until the agent goes away. Raises ConnectionError then."""
    sys.path[:] = config.path
    sys.argv[:] = [""]  # as in an interactive session: our own would mislead a library that parses it
    gc.disable()  # imported objects stay, and scanning them over and over is a fifth of torch's import time
    with _staying_forkable():
        for module in config.preload:
            if "=" in module:
                _set(module)
                continue
            # Ignored: the import fails again, with its message, in the rank that needs it.
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    gc.enable()
    gc.freeze()  # with the garbage: it is little, and looking for it takes 0.3 s after torch
    if config.is_for_ranks:
        # A rank adopts orphans too, so while it lives, its descendants stay below it. When it dies, the rest become
        # children of this process, which can tell that they are orphans because it did not fork them.
        adopt_orphans()
    _loop(sock, config)


def _set(setting: str) -> None:
    """Set a variable from "NAME=value", or from "NAME?=value" unless it is already set, as in make."""
    name, _, value = setting.partition("=")
    if name.endswith("?"):
        os.environ.setdefault(name[:-1], value)
    else:
        os.environ[name] = value


@contextlib.contextmanager
def _staying_forkable() -> Any:
    """Keep libraries from starting threads, and from initialising devices, while they are imported."""
    before = {name: os.environ.get(name) for name in _STAYS_FORKABLE}
    os.environ.update(_STAYS_FORKABLE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _loop(sock: socket.socket, config: ZygoteConfig) -> None:
    # Signals write to this pipe, and the loop polls it. Otherwise a child that dies between `waitpid` and `poll` would
    # be noticed only with the next order. Python writes there only for signals that have a handler, so SIGCHLD has one.
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a terminal is for the client to handle
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    made: set[int] = set()
    while True:
        for fd, _ in poll.poll():
            if fd == wake_read:
                with contextlib.suppress(BlockingIOError):  # already drained
                    os.read(wake_read, 4096)
                continue
            order, fds = receive_order(sock)
            if order is None:
                return
            made.add(_fork(sock, order, fds, config))
        # New processes are in `made` by now, so none of them is taken for an orphan.
        if _report_exits(sock, made) and config.is_for_ranks:
            _kill_orphans(made)


def _report_exits(sock: socket.socket, made: set[int]) -> bool:
    """Reap ended children and report those of orders; return whether there were any."""
    found = False
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found = True
        if pid in made:
            made.discard(pid)
            sock.send(pickle.dumps(("exited", pid, status)))


def _kill_orphans(made: set[int]) -> None:
    """Kill orphans. Each one leaves its own children to us, whose exits lead here again until none is left."""
    for pid in _children() - made:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has exited, or runs as another user
            os.kill(pid, signal.SIGKILL)


def _children() -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):  # without /proc only the rank's session is killed
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    return found


def _fork(sock: socket.socket, order: ForkOrder, fds: list[int], config: ZygoteConfig) -> int:
    """Make the ordered process and return its pid; 0 if that failed."""
    pid = 0
    try:
        pid = _fork_here(sock, order, fds, config) if can_fork() else _execute_afresh(order, fds, config)
    except OSError as error:  # out of memory or processes
        sock.send(pickle.dumps(("failed", order.number, f"{type(error).__name__}: {error}")))
    else:
        sock.send(pickle.dumps(("forked", order.number, pid)))
    finally:
        for fd in fds:
            os.close(fd)
    return pid


def can_fork() -> bool:
    """Return whether a fork of this process works: it has one thread, and no CUDA."""
    return _thread_count() == 1 and not _has_cuda()


def _thread_count() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # without /proc only Python's own threads can be counted
        import threading

        return threading.active_count()


def _has_cuda() -> bool:
    """Return whether an import has initialised CUDA in this process."""
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            if os.readlink(f"/proc/self/fd/{name}").startswith(_CUDA_DEVICE):
                return True
    return False


def _fork_here(sock: socket.socket, order: ForkOrder, fds: list[int], config: ZygoteConfig) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        sock.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # SIGINT stays ignored until the worker handles it. A cancel in between is not lost: it is on the shared page,
        # and the task checks that when it begins.
        _draw_own_numbers()
        if order.config.rank is not None:
            forget_inherited()
        if config.preload and not order.launch:  # a rank does this later, once its variables are set
            os.environ.update(order.config.env)
            apply_thread_counts()
        become_slot(order, fds)
        code = 0
    except BaseException:  # nothing may return from the child into the zygote's loop
        traceback.print_exc()
    finally:
        _exit(code)


def _exit(code: int) -> NoReturn:
    """Exit now, whatever threads user code has left running."""
    with contextlib.suppress(Exception):  # a stream that the user replaced may raise anything
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _draw_own_numbers() -> None:
    """Reseed the generators of numpy and torch, which would draw the same numbers in all forks. Python reseeds its own.

    No fork has a generator of an accelerator yet.
    """
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        numpy_random.seed()
    if torch is not None:
        torch.default_generator.seed()


def become_slot(order: ForkOrder, fds: list[int]) -> None:
    """Turn the new process into a slot: its own session and streams, then its work."""
    die_with_parent()
    with contextlib.suppress(PermissionError):  # a process executed afresh already leads a session
        os.setsid()
    if order.config.rank is not None:
        adopt_orphans()
    # The watchdog ignores SIGTERM, and children inherit that. A task could then not terminate its own subprocesses.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stand_in_for_script()
    sock_fd, out, err, page, *more = fds
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(null)
    for fd in (out, err):
        os.close(fd)
    for path in order.config.groups:  # before anything of the user's: memory is charged where it was first used
        with open(path, "w") as file:
            file.write("0")
    prepare = partial(_apply_launch, order) if order.launch else None
    shelf_fd = more[0] if more else -1
    line = socket.socket(fileno=more[1]) if len(more) > 1 else None
    with socket.socket(fileno=sock_fd) as sock:
        serve(sock, page, order.config, prepare, shelf_fd, line)
    if order.config.rank is not None:
        run_late_exit_handlers()


def _apply_launch(order: ForkOrder) -> None:
    """Apply the integrations' environment before any user code is loaded.

    Runs as part of the rank's task, so an error here fails that task.
    """
    os.environ.update(order.config.env)
    try:
        launch: ProcessLaunch = pickle.loads(order.launch)
    except Exception as error:  # the module of a user's own integration may raise anything
        raise explain_load_error(error, "an integration") from error
    rank = order.config.rank
    assert rank is not None
    if launch.nodes_per_group is not None:
        from .groups import enter_group, rank_in_group  # few calls are split

        rank = rank_in_group(rank, launch.nodes_per_group)
        enter_group(rank)
    for integration in launch.integrations:
        os.environ.update(integration.environment(rank))
    apply_thread_counts()
    for integration in launch.integrations:
        integration.prepare(rank)


def _execute_afresh(order: ForkOrder, fds: list[int], config: ZygoteConfig) -> int:
    """Start a new interpreter instead of a fork; it repeats the imports itself."""
    import subprocess

    parent, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with parent, child:
        process = subprocess.Popen(
            [sys.executable, "-c", _FRESH, str(child.fileno()), *config.path],
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        send_order(parent, pickle.dumps(order), fds)
    process.returncode = 0  # keeps Popen from reaping it: `_report_exits` does
    return process.pid


_FRESH = """
import sys
sys.path[:] = sys.argv[2:]
from skyward.node.slot.zygote import fresh
fresh(int(sys.argv[1]))
"""


def fresh(fd: int) -> None:
    """Run a process that was executed afresh."""
    code = 1
    try:
        with socket.socket(fileno=fd) as sock:
            order, fds = receive_order(sock)
        if order is not None:
            become_slot(order, fds)
            code = 0
    except BaseException:  # as in a forked process
        traceback.print_exc()
    finally:
        _exit(code)
