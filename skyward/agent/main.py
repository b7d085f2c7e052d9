"""Entry of an agent: it reads its NodeConfig from standard input, listens on a socket in its folder, says so.

    python -c "...main()" < pickled NodeConfig

The socket is in a folder that only this user can enter. Standard output gets one line, the path of the socket, once
it can be connected to.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import shutil
import socket
import sys

from ..ownership import make_private_folder
from ..wire.tasks import NodeConfig
from .agent import Agent
from .watchdog import Lease, guard

__all__ = ["SOCKET_NAME", "main"]

SOCKET_NAME = "agent.sock"


def main() -> int:
    order = sys.stdin.buffer.read()
    if not order:
        return 1  # who started us died, or was interrupted, before it said what for
    _raise_file_limit()
    config: NodeConfig = pickle.loads(order)
    try:
        make_private_folder(config.folder)
        listener = _listen(os.path.join(config.folder, SOCKET_NAME))
    except BaseException as error:  # there is no watchdog yet that would tidy up
        shutil.rmtree(config.folder, ignore_errors=True)
        if isinstance(error, BrokenPipeError):
            return 1  # nobody is left to hear that we are ready
        if isinstance(error, OSError):
            why = error.strerror or error  # "AF_UNIX path too long" has no number
            sys.stderr.write(
                f"skyward: node {config.node}: its folder {config.folder} cannot be made or written: {why}; "
                "make room, or a folder there that this user may write\n"
            )
            return 1
        raise
    # An agent makes hardly any cycles, and a collection would come in the middle of somebody's call.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    lease = Lease(config.lease_s, config.lease_file)
    return guard(lambda: Agent(config, lease, listener).run(), lease, config.folder)


def _raise_file_limit() -> None:
    """Each blob is a descriptor, here and in the slots, which inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS names a limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(path: str) -> socket.socket:
    """Listen, and say so."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    listener.bind(path)
    os.umask(old_mask)
    listener.listen(8)
    listener.setblocking(False)
    os.write(1, f"{path}\n".encode())
    return listener
