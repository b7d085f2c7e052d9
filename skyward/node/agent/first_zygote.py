"""First zygote of a node whose slots run the agent's own interpreter: forked from the agent before it becomes one.

Starting an interpreter and importing the slots' modules takes longer than everything else at the start of a node. Here
both happen once, and agent, zygote and slots share the memory. The process must have been started as the slots expect
it, with their environment, folder, path and `site`. Later zygotes, and those of gangs, are executed afresh.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import traceback

from ...core.process import die_with_parent
from ...core.records import dataclass
from ...wire.tasks import NodeConfig
from ..slot.zygote import ZygoteConfig, serve_orders


@dataclass(frozen=True)
class FirstZygote:
    """The forked process. `sock` is the agent's end of its socket."""

    pid: int
    sock: socket.socket

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # already reaped
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        with contextlib.suppress(ChildProcessError):  # already reaped
            os.waitpid(self.pid, 0)


def fork_zygote(config: NodeConfig, listener: socket.socket) -> FirstZygote:
    """Fork the zygote of plain slots. Raises OSError. `listener` is the agent's, and is closed in the child."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid:
        theirs.close()
        return FirstZygote(pid, ours)
    code = 1
    try:
        listener.close()
        ours.close()
        _become_zygote(config, agent, theirs)
        code = 0
    except BaseException:  # nothing may return from the child into the agent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _become_zygote(config: NodeConfig, agent: int, sock: socket.socket) -> None:
    die_with_parent()
    if os.getppid() != agent:  # it died before die_with_parent, so no signal will come
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    gc.set_threshold(*_DEFAULT_THRESHOLDS)  # the agent has its own
    with sock, contextlib.suppress(ConnectionError):  # ConnectionError: the agent has ended, and so does this process
        serve_orders(sock, ZygoteConfig(path=config.path, preload=config.preload))


_DEFAULT_THRESHOLDS = gc.get_threshold()
"""Thresholds of the interpreter when this module is imported, which is before the agent sets its own."""
