"""Starter: a process that has imported the runner's modules, and forks a runner for each attempt.

An interpreter and these imports take 0.4 s of processor time, which would come before the first line of each job. The
starter ends with its launcher, because the kernel closes the launcher's end of the socket. Runners go on: each of them
has a session of its own.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...core.process import is_readable
from .launch_file import PID

ANSWER_S = 10.0
"""Seconds after which a starter that does not answer is killed."""
OPTION = "--starter="
_LOADED_LATER = (
    *("calls.graphs", "console.console", "engine.direct", "engine.builder", "hub.client.pools", "node.agent.main"),
    *("pool.actors", "pool.dispatch", "pool.packer", "pool.streams", "providers.local"),
)
"""Modules that a pool imports when it opens."""
_READY = b"ready"
_MOST = 1 << 20
_log = logging.getLogger(__name__)


class RunnerStarter:
    """Starter of a launcher. Use it from one thread.

    Args:
        log: File for what it and its runners write before they have a log of their own.
        environment: Its environment. The system shows it as that of each runner too.
        umask: Its mask for files, and that of its runners. -1: that of this process.
    """

    def __init__(self, log: Path, environment: Mapping[str, str], umask: int = -1) -> None:
        self._environment = environment
        self._has_told = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        try:
            with theirs, log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "skyward.hub.runner", f"{OPTION}{theirs.fileno()}"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    cwd=log.parent,
                    env=self._environment,
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                    umask=umask,
                )
        except BaseException:
            self._socket.close()
            raise

    def start(self, folder: Path, environment: Mapping[str, str], lock: int, log: int) -> bool:
        """Fork a runner for a folder.

        Args:
            folder: The runner's folder.
            environment: Its whole environment.
            lock: Descriptor that it holds for as long as it lives.
            log: Descriptor of the file for its standard output and error.

        Returns:
            False if the starter has not finished its imports, or nobody knows whether there is a runner. The starter
            is dead then, and a runner that there is has the lock.
        """
        if not self.is_ready:
            return False
        changed = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        removed = [name for name in self._environment if name not in environment]
        message = json.dumps({"folder": str(folder), "set": changed, "unset": removed}).encode()
        try:
            socket.send_fds(self._socket, [message], [lock, log])
            if self._socket.recv(_MOST):
                return True
        except OSError as error:
            _log.warning("the starter of runners failed: %s", error)
        self._process.kill()
        with suppress(OSError):  # until nobody has the other end: a runner lets it go once it is one
            while self._socket.recv(_MOST):
                pass
        return False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """True once it has imported everything."""
        if not self._has_told and is_readable(self._socket, 0.0):
            with suppress(OSError):
                self._has_told = self._socket.recv(_MOST) == _READY
        return self._has_told

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it. Runners go on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def fork_runners(descriptor: int) -> Path | None:
    """Serve a launcher by its socket. Return in each forked runner, with its folder, and in the starter at the end."""
    for name in _LOADED_LATER:
        importlib.import_module(f"skyward.{name}")
    gc.freeze()  # runners share this memory until they write to it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    # A launcher that ends before it has read the last answer resets the connection.
    with socket.socket(fileno=descriptor) as sock, suppress(ConnectionError):
        sock.send(_READY)
        while True:
            message, descriptors, _, _ = socket.recv_fds(sock, _MOST, 2)
            if not message:
                break
            pid = os.fork()
            if pid == 0:
                return _become_runner(json.loads(message), *descriptors)
            for held in descriptors:
                os.close(held)
            sock.send(b"%d" % pid)
    return None


def _become_runner(order: Mapping[str, Any], lock: int, log: int) -> Path:
    """Make this process what an interpreter would be that a launcher starts."""
    folder = Path(order["folder"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    os.set_inheritable(lock, False)  # it stays open here, and in no process that is executed
    (folder / PID).write_text(f"{os.getpid()}\n")  # the launcher may have died meanwhile
    for name in order["unset"]:
        os.environ.pop(name, None)
    os.environ.update(order["set"])
    before = os.getcwd()
    sys.path[:] = [str(folder) if entry == before else entry for entry in sys.path]
    os.chdir(folder)
    sys.argv[1:] = [str(folder)]
    return folder
