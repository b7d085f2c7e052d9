"""The zygote: a single-threaded process that imports what slots need once, and forks them.

It runs no user code and touches no device, so a fork of it is as good as a fresh interpreter and a hundred times
faster. If what it imported started a thread, forking would be unsafe (a lock held by that thread stays locked for
ever in the child), and CUDA does not work in a fork of a process that has initialised it; then each process is
executed afresh instead.

Spoken with the agent over a socket of packets: pickled `ForkOrder` with its descriptors in (a large one lies in one
more); `("forked", number, pid)`, `("exited", pid, status)` and `("failed", number, text)` out.
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
import subprocess
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from ...core.process import adopt_orphans, die_with_parent
from ...values.launch import ProcessLaunch
from .execute import explain_load_error
from .slot import SlotConfig
from .threads import apply_thread_counts
from .worker import serve

__all__ = ["ForkOrder", "ZygoteConfig", "main", "receive_order", "send_order"]

_PACKET = 1 << 20
_ORDER_PACKET = 64 * 1024
"""Bytes. A socket takes no packet beyond its buffer; a larger order (the options of an integration) is in a memfd."""
_IN_FILE = b"\0"
_STAYS_FORKABLE = {
    # torch.cuda.is_available(), which modules ask while they are imported, would initialise CUDA in this process.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # of Arrow's allocator; pandas and datasets import Arrow
}
_CUDA_DEVICE = "/dev/nvidia-uvm"
"""What CUDA opens when it is initialised, and NVML (nvidia-smi's library) does not."""


@dataclass(frozen=True, kw_only=True)
class ZygoteConfig:
    path: tuple[str, ...]
    preload: tuple[str, ...] = ()
    is_for_ranks: bool = False
    """What a rank has started ends with the rank."""


@dataclass(frozen=True, kw_only=True)
class ForkOrder:
    """One process to make. Its descriptors: socket, output pipe, error pipe, shared page; of a process slot also that
    of its shelf, and perhaps a direct line.
    """

    number: int
    config: SlotConfig
    launch: bytes = b""
    """Pickled Launch of a gang; empty for a plain slot."""


def send_order(sock: socket.socket, order: bytes, fds: list[int]) -> None:
    """One pickled ForkOrder, whole or not at all. Raises OSError, BlockingIOError where the socket does not block."""
    if len(order) <= _ORDER_PACKET:
        socket.send_fds(sock, [order], fds)
        return
    with open(os.memfd_create("skyward-order", os.MFD_CLOEXEC), "w+b") as file:
        file.write(order)
        file.flush()
        socket.send_fds(sock, [_IN_FILE], [*fds, file.fileno()])


def receive_order(sock: socket.socket) -> tuple[ForkOrder | None, list[int]]:
    """None: the other side is gone."""
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
    """Entry of the process: read the configuration, import, then fork on demand until the agent goes away."""
    die_with_parent()
    # The agent may have ended, and we end with it.
    with socket.socket(fileno=fd) as sock, contextlib.suppress(ConnectionError):
        order = sock.recv(_PACKET)
        if order:
            _serve(sock, pickle.loads(order))


def _serve(sock: socket.socket, config: ZygoteConfig) -> None:
    sys.path[:] = config.path
    sys.argv[:] = [""]  # as in an interactive session: ours would mislead a library that parses it
    gc.disable()  # an import makes objects that stay: looking through them again and again is a fifth of torch's
    with _staying_forkable():
        for module in config.preload:
            if "=" in module:
                _set(module)
                continue
            # A module that fails to import fails again, in words, in the rank that needs it.
            with contextlib.suppress(Exception):
                importlib.import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()
    if config.is_for_ranks:
        # So does a rank: while it lives, all that it started is below it. When it is dead, what is left of that are
        # children of this process, which knows them for orphans: it did not make them.
        adopt_orphans()
    _loop(sock, config)


def _set(setting: str) -> None:
    """A variable, from "NAME=value", or from "NAME?=value" where there is none yet, as in make."""
    name, _, value = setting.partition("=")
    if name.endswith("?"):
        os.environ.setdefault(name[:-1], value)
    else:
        os.environ[name] = value


@contextlib.contextmanager
def _staying_forkable() -> Any:
    """Libraries that start threads while they are imported start none, and no device is initialised."""
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
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the client's to handle
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    made: set[int] = set()
    while True:
        for fd, _ in poll.poll():
            if fd == wake_read:
                with contextlib.suppress(BlockingIOError):  # emptied already
                    os.read(wake_read, 4096)
                continue
            order, fds = receive_order(sock)
            if order is None:
                return
            made.add(_fork(sock, order, fds, config))
        if _report_exits(sock, made) and config.is_for_ranks:
            _kill_orphans(made)


def _report_exits(sock: socket.socket, made: set[int]) -> bool:
    """Whether there were any."""
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
    """Each that dies leaves its children to us, and is an exit that brings us here again."""
    for pid in _children() - made:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or has changed its user
            os.kill(pid, signal.SIGKILL)


def _children() -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):  # no /proc: only the rank's session is killed
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                found.update(map(int, file.read().split()))
    return found


def _fork(sock: socket.socket, order: ForkOrder, fds: list[int], config: ZygoteConfig) -> int:
    """The process that was made; 0: it could not be."""
    pid = 0
    try:
        can_fork = _thread_count() == 1 and not _has_cuda()
        pid = _fork_here(sock, order, fds, config) if can_fork else _execute_afresh(order, fds, config)
    except OSError as error:  # no memory, too many processes
        sock.send(pickle.dumps(("failed", order.number, f"{type(error).__name__}: {error}")))
    else:
        sock.send(pickle.dumps(("forked", order.number, pid)))
    finally:
        for fd in fds:
            os.close(fd)
    return pid


def _thread_count() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # no /proc: Python's own threads are all that can be counted
        import threading

        return threading.active_count()


def _has_cuda() -> bool:
    """Whether something that this process imported has initialised CUDA."""
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # that of the listing itself is closed
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
        # SIGINT stays ignored until the worker handles it: a cancel that comes now is seen when the task begins.
        _draw_own_numbers()
        if config.preload and not order.launch:  # a rank does it when its variables stand
            apply_thread_counts()
        become_slot(order, fds)
        code = 0
    except BaseException:  # nothing may return into the zygote's loop from the child
        traceback.print_exc()
    finally:
        _exit(code)


def _exit(code: int) -> NoReturn:
    """End now, whatever threads the user's code has left behind."""
    with contextlib.suppress(Exception):  # a stream of the user's may raise anything, and the process ends in any case
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _draw_own_numbers() -> None:
    """Python's generator is seeded anew after a fork; numpy's is not, so all forks would draw the same numbers."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def become_slot(order: ForkOrder, fds: list[int]) -> None:
    """In the new process: its own session and streams, then its work."""
    die_with_parent()
    with contextlib.suppress(PermissionError):  # executed afresh, it leads a session already
        os.setsid()
    if order.config.rank is not None:
        adopt_orphans()
    # The watchdog above ignores it, and what is ignored is inherited: a task could not terminate its own subprocess.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sock_fd, out, err, page, *more = fds
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(null)
    for fd in (out, err):
        os.close(fd)
    prepare = partial(_apply_launch, order) if order.launch else None
    shelf_fd = more[0] if more else -1
    line = socket.socket(fileno=more[1]) if len(more) > 1 else None
    with socket.socket(fileno=sock_fd) as sock:
        serve(sock, page, order.config, prepare, shelf_fd, line)


def _apply_launch(order: ForkOrder) -> None:
    """The environment of each integration stands before anything of the user's is loaded. Called as part of the rank's
    task: what it raises is the failure of that.
    """
    os.environ.update(order.config.env)
    try:
        launch: ProcessLaunch = pickle.loads(order.launch)
    except Exception as error:  # the module of an integration of the user's may do anything
        raise explain_load_error(error, "an integration") from error
    rank = order.config.rank
    assert rank is not None
    for integration in launch.integrations:
        os.environ.update(integration.environment(rank))
    apply_thread_counts()
    for integration in launch.integrations:
        integration.prepare(rank)


def _execute_afresh(order: ForkOrder, fds: list[int], config: ZygoteConfig) -> int:
    """A new interpreter instead of a fork; it pays for its imports itself."""
    parent, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with parent, child:
        process = subprocess.Popen(
            [sys.executable, "-c", _FRESH, str(child.fileno()), *config.path],
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        send_order(parent, pickle.dumps(order), fds)
    process.returncode = 0  # `_report_exits` reaps it; Popen must not
    return process.pid


_FRESH = """
import sys
sys.path[:] = sys.argv[2:]
from skyward.node.slot.zygote import fresh
fresh(int(sys.argv[1]))
"""


def fresh(fd: int) -> None:
    """Entry of a process that was executed afresh."""
    code = 1
    try:
        with socket.socket(fileno=fd) as sock:
            order, fds = receive_order(sock)
        if order is not None:
            become_slot(order, fds)
            code = 0
    except BaseException:  # as in a process that was forked
        traceback.print_exc()
    finally:
        _exit(code)
