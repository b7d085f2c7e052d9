"""Places where the process of a head can run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from typing import IO, Protocol

from ...core.ownership import runtime_folder
from ...core.process import PACKAGE_ROOT, is_readable
from ...core.records import dataclass
from ...errors import ProviderError, SkywardError, Unreachable
from ...node.agent import attach
from ...node.agent.outside import reply_of
from ...values.machine import Machine
from ..keeper import Keeper
from .main import BOOT, order_of
from .messages import HeadConfig

_FOLDER = "skyward"
_ANSWER_S = 60.0
"""Longest wait in seconds for the process to say where it listens."""
_END_S = 5.0
_LEASE_S = 30.0
"""Seconds that a head on this machine goes on without its client."""


class HeadPlace(Protocol):
    """Starter of one head. It knows no call."""

    def start(self, config: HeadConfig) -> tuple[str, ...]:
        """Start the process, and return the local command whose standard input and output are a channel to it.

        Raises:
            ProviderError: It cannot be started.
        """
        ...

    def channel_by(self, machine: Machine) -> tuple[str, ...]:
        """Return such a command by the login of a machine that took the place of its node's; empty if there is none."""
        ...

    def stop(self, *, at_once: bool = False) -> None:
        """End the process, if it has not ended. Idempotent. `at_once`: it was not told to end by itself.

        A start that failed may have begun one all the same.
        """
        ...

    def forget_in_child(self) -> None:
        """Let go of the process in a fork of this one."""
        ...


def folder_for(pool: str, machine: Machine) -> str:
    """Return a folder for a head beside a node, on its machine or this one. It does not exist yet."""
    base = os.path.dirname(machine.folder) if machine.login is not None else runtime_folder(_FOLDER)
    return _folder_in(base, pool)


def _folder_in(base: str, pool: str) -> str:
    return os.path.join(base, f"{pool}-head-{os.urandom(3).hex()}")


def head_on(machine: Machine, config: HeadConfig) -> tuple[HeadConfig, HeadPlace]:
    """Return configuration and place of a head beside a node; on this machine, if the node has no login."""
    if machine.login is None:
        return head_here(config)
    folder = folder_for(config.pool, machine)
    config = replace(config, folder=folder, lease_s=machine.lease_s, starter=0, node_folder=machine.folder)
    return config, NodeHead(machine)


def head_here(config: HeadConfig) -> tuple[HeadConfig, HeadPlace]:
    """Return configuration and place of a head on this machine, beside no node."""
    folder = _folder_in(runtime_folder(_FOLDER), config.pool)
    return replace(config, folder=folder, lease_s=_LEASE_S, starter=os.getpid(), node_folder=""), LocalHead()


def _answer(output: IO[bytes]) -> str:
    """Return the line that a head prints when it has started, or why there is none."""
    if not is_readable(output, _ANSWER_S):
        return f"did not start in {_ANSWER_S:g} s"
    return output.readline().decode(errors="replace").strip() or "died while it started"


class LocalHead:
    """Head on this machine, which ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, config: HeadConfig) -> tuple[str, ...]:
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", BOOT, PACKAGE_ROOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise ProviderError(f"head: cannot be started ({error.strerror}); free memory or processes") from error
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died; the missing answer says so
            process.stdin.write(order_of(config))
            process.stdin.flush()
        line = _answer(process.stdout)
        if not line.startswith(os.sep):
            self.stop()
            raise ProviderError(f"head: {line}; see its standard error")
        return attach.command(sys.executable, PACKAGE_ROOT, line)

    def channel_by(self, machine: Machine) -> tuple[str, ...]:
        return ()

    def stop(self, *, at_once: bool = False) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:  # the end of its input tells it to end
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def forget_in_child(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError, ValueError):  # no descriptor is left, or a pipe is closed at this moment
            nothing = os.open(os.devnull, os.O_RDWR)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:  # another thread may have held the file's lock, so it is not closed here
                    os.dup2(nothing, pipe.fileno(), inheritable=False)
            os.close(nothing)
        process.returncode = 0  # not a child of the fork


class NodeHead:
    """Head beside a node's agent on another machine. It ends with its lease, which this process and its keeper renew.

    Args:
        machine: The node's machine, which has a login.
    """

    def __init__(self, machine: Machine) -> None:
        assert machine.login is not None
        self._node = machine.node
        self._address = machine.peer.private_ip
        self._login = machine.login
        self._leased: _Leased | None = None
        self._begun = ""
        """Mark of a head that was begun, as long as it has not answered."""

    def start(self, config: HeadConfig) -> tuple[str, ...]:
        mark = self._begun = os.path.basename(config.folder)
        try:
            done = self._login.run(
                "engine.head.outside", "start", (config.folder,), input=order_of(config), timeout_s=_ANSWER_S, mark=mark
            )
        except TimeoutError as error:
            raise Unreachable(
                f"head: did not start on the machine of node {self._node} within {_ANSWER_S:g} s; see what its disks "
                "and processes wait for, and open the pool again",
                node=self._node,
                is_final=False,
            ) from error
        if done.code:
            raise ProviderError(
                f"head: did not start on the machine of node {self._node}: {done.error_text}; mend that, and open the "
                "pool again",
                retryable=True,
            )
        reply = reply_of(done.text)
        path = reply["socket"]
        leased = self._leased = _Leased(
            socket_path=path,
            channel=self._login.channel_to(path),
            lease_s=config.lease_s,
            process=(str(reply["pid"]), reply["started"], config.folder),
        )
        Keeper.of_this_process().watch(leased, is_fresh=True)
        self._begun = ""
        return leased.channel

    def channel_by(self, machine: Machine) -> tuple[str, ...]:
        login, leased = machine.login, self._leased
        if login is None or leased is None or machine.peer.private_ip != self._address:
            return ()
        return login.channel_to(leased.socket_path)

    @property
    def process(self) -> tuple[str, str, str]:
        """Outermost process of the head: its number, its start and its folder."""
        assert self._leased is not None
        return self._leased.process

    @property
    def socket_path(self) -> str:
        """Socket of the head on the machine."""
        assert self._leased is not None
        return self._leased.socket_path

    def outlive_client(self) -> None:
        """Let the head go on when this process dies. It renews its own lease then."""
        assert self._leased is not None
        Keeper.of_this_process().forget(self._leased)

    def stop(self, *, at_once: bool = False) -> None:
        begun, self._begun = self._begun, ""
        leased, self._leased = self._leased, None
        with contextlib.suppress(SkywardError, TimeoutError, OSError):  # its lease ends it
            if leased is not None:
                Keeper.of_this_process().forget(leased)
                words = *leased.process, "0" if at_once else f"{_END_S:g}"
                self._login.run("node.agent.outside", "end", words, timeout_s=2 * _END_S)
            elif begun:
                self._login.undo(begun)

    def forget_in_child(self) -> None:
        self._begun, self._leased = "", None


class KnownHead(NodeHead):
    """Head of a detached pool that another process has started.

    Args:
        machine: Machine of its node.
        socket_path: Its socket there.
        process: Its outermost process; see `NodeHead.process`.
    """

    def __init__(self, machine: Machine, *, socket_path: str, process: tuple[str, str, str]) -> None:
        super().__init__(machine)
        self._leased = _Leased(
            socket_path=socket_path,
            channel=self._login.channel_to(socket_path),
            lease_s=machine.lease_s,
            process=process,
        )

    def start(self, config: HeadConfig) -> tuple[str, ...]:
        assert self._leased is not None
        return self._leased.channel


@dataclass(frozen=True, kw_only=True)
class _Leased:
    """Head as its keeper sees it."""

    socket_path: str
    channel: tuple[str, ...]
    lease_s: float
    process: tuple[str, str, str]
    """Its outermost process, the start of that, and its folder."""
