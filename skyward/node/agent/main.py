"""Entry point of an agent: reads its NodeConfig from standard input, listens on a socket in its folder, reports it.

    python -c "...main()" < pickled NodeConfig

The socket is in a folder that only this user can enter. Standard output gets one line: the path of the socket once it
accepts connections, or else the reason why there is none.

The modules of the agent itself are imported last, below the watchdog: its parents do not need them, and where the agent
forks its first zygote, that one starts slots in the meantime.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import pickle
import resource
import socket
import sys
from dataclasses import replace
from typing import NoReturn

from ...core.limits import raise_file_limit
from ...core.ownership import make_private_folder
from ...core.process import collect_rarely
from ...errors import ProviderError, SkywardError
from ...state.volumes import attach
from ...wire.tasks import NodeConfig
from .boot import BOOT
from .watchdog import Lease, Starter, end_machine, guard, remove_node

_FILES, _FILES_OF_SLOT = 32, 8
"""Descriptors that an idle agent has open: its own, and those per slot."""


def main() -> int:
    order = sys.stdin.buffer.read()
    if not order:
        return 1  # the parent died, or was interrupted, before it sent the order
    config: NodeConfig = pickle.loads(order)
    if config.forks_zygote:
        from ..slot.zygote import can_fork  # imports the slots' modules, before the processes that share them exist

        if not can_fork():
            _start_apart(config)
    try:
        _raise_file_limit(config.slots)
        make_private_folder(config.folder)
        listener = listen_at(config.socket_path)
        gc.freeze()
        collect_rarely()  # a collection would delay somebody's call
        lease = Lease(config.lease_s, config.lease_file, starter=Starter(config.starter) if config.starter else None)
        code = guard(lambda: _run(config, lease, listener), lease, config.folder)
        if config.ends_machine and not lease.had_no_contact:  # else its setup, which has failed, is tried again
            end_machine(config.lease_file)
        return code
    except BaseException as error:  # no watchdog runs yet that would clean up
        remove_node(config.folder)
        if not isinstance(error, OSError | SkywardError):
            raise
        with contextlib.suppress(BrokenPipeError):  # nobody reads the reason any longer
            _say(f"cannot start: {_reason(config, error)}")
        return 1


def _run(config: NodeConfig, lease: Lease, listener: socket.socket) -> int:
    """Run the agent, in its own process below the watchdog."""
    try:
        first = None
        if config.forks_zygote:
            from .first_zygote import fork_zygote

            first = fork_zygote(config, listener)
        from .agent import Agent

        attached = attach(dict(config.volumes), config.folder, config.cwd if config.links_volumes else None)
        agent = Agent(replace(config, placed_volumes=tuple(attached.places)), lease, listener, first)
        _say(f"{config.socket_path}\n{json.dumps(agent.accelerators)}")
    except BrokenPipeError:  # the parent is gone, so nobody waits for this agent
        return 1
    except (OSError, SkywardError) as error:
        _say(f"cannot start: {_reason(config, error)}")
        return 1
    agent.run()
    return 0


def _start_apart(config: NodeConfig) -> NoReturn:
    """Start again in an interpreter of its own, because something in the slots' one has started threads or CUDA.

    A `sitecustomize` or a .pth file may do that.
    """
    with open(os.memfd_create("skyward-config", os.MFD_CLOEXEC), "w+b") as file:
        file.write(pickle.dumps(replace(config, forks_zygote=False)))
        file.flush()
        file.seek(0)
        os.dup2(file.fileno(), 0)
        os.execv(sys.executable, [sys.executable, "-S", "-E", "-s", "-c", BOOT, *config.path])


def _say(line: str) -> None:
    """Report the path of the socket and, as JSON, the accelerators; or a reason, whose first character is no slash."""
    os.write(1, f"{line}\n".encode())


def _reason(config: NodeConfig, error: OSError | SkywardError) -> str:
    if isinstance(error, SkywardError):
        return str(error)
    why = error.strerror or error  # "AF_UNIX path too long" has no errno
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
        return f"{why}; free some processes, open files or memory"
    return f"{config.folder} cannot be created or written: {why}; free disk space, or make its parent writable"


def _raise_file_limit(slots: int) -> None:
    """Raise the limit of open files. Each blob is one, here and in the slots, which inherit the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = _FILES + _FILES_OF_SLOT * slots
    if hard != resource.RLIM_INFINITY and hard < least:
        raise ProviderError(
            f"RLIMIT_NOFILE={hard}: too low, because a node of {slots} slots needs at least {least} open files; raise "
            "the hard limit (`ulimit -Hn`)"
        )
    raise_file_limit()


def listen_at(path: str) -> socket.socket:
    """Listen on a socket that has its name only when somebody listens: others remove one where nobody does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made = os.path.join(os.path.dirname(path), "new")  # no longer than its name: paths of sockets are short
    old_mask = os.umask(0o177)
    try:
        listener.bind(made)
    finally:
        os.umask(old_mask)
    listener.listen(8)
    listener.setblocking(False)
    os.rename(made, path)
    return listener
