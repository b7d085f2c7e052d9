"""Turns one machine into a node: connects, prepares it, starts an agent, and undoes all of it on failure.

A lost connection does not say what happened on the machine. So the setup undoes the old attempt over a new connection,
and starts again under another name: the folder's name tells one attempt from every other process on the machine.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import pickle
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import Any, BinaryIO

from ..bootstrap.code import Code
from ..bootstrap.containers import Container, find_container, remove_command
from ..bootstrap.prepare import Ready, in_python, prepare
from ..bootstrap.scripts import Runner, marked, undo
from ..core.records import dataclass
from ..errors import NoCapacity, NodeError, ProviderError, SkywardError, Unreachable
from ..events import Emit, PhaseEnded, PhaseFailed, PhaseOutput, PhaseStarted, ignore
from ..node.agent import attach
from ..node.agent.outside import reply_of
from ..node.slot.threads import limit_threads
from ..ssh import Connection, SSHResult, SSHTarget, connect, wait_until_ready
from ..ssh.connect import Transport
from ..values.image import Image
from ..values.machine import Machine, PoolSpec
from ..values.topology import Peer
from ..wire.tasks import NodeConfig

_log = logging.getLogger(__name__)

_AGENT_LIMIT_S = 60.0
_END_LIMIT_S = 20.0
_WATCHDOG_LIMIT_S = 180.0
"""Time for user data to run: cloud-init runs it last, a minute or two after sshd answers."""
_LOSSES = 5
"""Number of lost connections after which the node is given up."""
_FIRST_PAUSE_S = 0.2
_RUNTIME_FAILED = (125, 126, 127)
"""Exit codes of podman and docker when they cannot run a command. Source: podman-run(1), Exit Status."""
_NO_CONNECTION = 255
_OUTSIDE = "node.agent.outside"
_ARCHITECTURES = {"aarch64": "arm64"}
_BOOT = "import sys; sys.path[:] = sys.argv[1:{count}]; from skyward.{module} import {name}; sys.exit({name}())"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Place of a node: how to reach the machine from here, and its address among the nodes.

    Args:
        target: how the client logs in.
        private_address: address for the other nodes; empty for the one at which the SSH connection arrives.
        public_address: address to show to people; empty if unknown.
        auth_grace_s: seconds during which a freshly booted machine may refuse our key.
        connect: how the client gets there, if not by SSH. Then `target` is a name only.
        python: interpreter of the machine that slots use with all its packages; empty to make them an environment.
    """

    target: SSHTarget
    private_address: str = ""
    public_address: str = ""
    auth_grace_s: float = 0.0
    connect: Callable[[], Connection] | None = None
    python: str = ""


@dataclass(frozen=True, kw_only=True)
class RemoteNodeHandle:
    """Handle of a remote Machine: everything that its shutdown needs. It is the machine's `login` too."""

    connection: Connection = field(repr=False)
    node: int
    watchdog: int
    started: str
    """Start time of the watchdog. With its pid it names the process for good; see `skyward.node.agent.outside`."""
    folder: str
    python: tuple[str, ...]
    """Command of the agent's interpreter."""
    path: tuple[str, ...]
    root: str
    """Folder of our package on the machine."""
    place: Place
    container: Container | None = None
    cwd: str = ""
    """Working folder of the calls."""

    def run(
        self,
        module: str,
        name: str,
        arguments: Sequence[str] = (),
        *,
        input: bytes | None = None,  # noqa: A002  # as in subprocess.run
        timeout_s: float,
        mark: str = "",
        stop: threading.Event | None = None,
    ) -> SSHResult:
        """Run a function of skyward; see `NodeLogin`."""
        line = python_line(self.python, self.path, name, arguments, module=module)
        line = marked(line, mark) if mark else line
        if self.container is not None:  # what is marked goes on in there; the rest reads, or removes what is left
            line = self.container.inside(line) if mark else self.container.inside_or_once(line)
        return self.connection.run(line, input=input, timeout_s=timeout_s, stop=stop)

    def prepare(self, image: Image, folder: str, *, stop: threading.Event) -> tuple[str, str]:
        """Make another environment; see `NodeLogin`."""

        def run(
            command: str,
            *,
            input: bytes | BinaryIO | None = None,  # noqa: A002  # as in subprocess.run
            timeout_s: float,
            on_line: Callable[[str], None] | None = None,
        ) -> SSHResult:
            line = marked(command, folder)
            line = self.container.inside(line) if self.container else line
            return self.connection.run(line, input=input, timeout_s=timeout_s, on_line=on_line, stop=stop)

        base = self.container.image_id if self.container else ""
        ready = prepare(
            run,
            image,
            emit=ignore,
            node=self.node,
            host=str(self.place.target),
            folder=folder,
            beside=os.path.basename(self.folder),
            base=base,
        )
        return ready.python, ready.folder

    def channel_to(self, socket_path: str) -> tuple[str, ...]:
        """Return a command to a socket; see `NodeLogin`."""
        *before, python = self.python
        line = "exec " + shlex.join([*before, *attach.command(python, self.root, socket_path)])
        return tuple(self.connection.argv(self.container.channel(line) if self.container else line))

    def undo(self, mark: str) -> None:
        """Kill what was begun with a mark; see `NodeLogin`."""
        undo(self.connection.run, [mark])


def end_agent(node: RemoteNodeHandle, by_itself_s: float) -> None:
    """Let a node that was told to end exit by itself for some seconds, then kill it. Raises what `run` raises."""
    arguments = (str(node.watchdog), node.started, node.folder, str(by_itself_s))
    node.run(_OUTSIDE, "end", arguments, timeout_s=_END_LIMIT_S)
    if node.container is not None:
        remove = remove_command(node.container.runtime, [node.container.folder])
        node.connection.run(remove, timeout_s=_END_LIMIT_S)


def python_line(
    python: Sequence[str], path: Sequence[str], name: str, arguments: Sequence[str] = (), *, module: str = _OUTSIDE
) -> str:
    """Build a line of sh that runs a function of a module of skyward on the machine."""
    boot = _BOOT.format(count=len(path) + 1, module=module, name=name)
    return "exec " + shlex.join([*python, "-S", "-E", "-s", "-c", boot, *path, *arguments])


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Options shared by all nodes of one `bring_up`."""

    spec: PoolSpec
    pool: str
    emit: Emit
    lease_s: float
    lease_file: str
    notice_file: str
    transport: Transport | None
    connect_s: float
    stop: threading.Event
    code: Code
    are_prepared: threading.Barrier


class NodeSetup:
    """One machine's way to being a node, in a thread of its own."""

    def __init__(self, place: Place, node: int, orders: Orders) -> None:
        self.node = node
        self.machine: Machine | None = None
        self.error: BaseException | None = None
        self.failed_at = 0.0
        self._place = place
        self._orders = orders
        self._connection: Connection | None = None
        self._begun: list[str] = []
        """Names of the folders on the machine; the last one belongs to the current attempt."""
        self._runtime = ""
        """Container runtime of the machine, once a container may run there."""
        self._has_waited = False
        self._step = ""
        """Phase that goes on, to be named if the machine hangs; empty between phases."""

    def go(self) -> None:
        try:
            self.machine = self._climb()
        except BaseException as error:
            error.node = self.node  # type: ignore[attr-defined]  # a caller may try another machine for this node
            self.error, self.failed_at = error, time.monotonic()
            self._orders.stop.set()
            self._orders.are_prepared.abort()

    def abandon(self) -> None:
        """Undo everything on the machine. Call it after `go`, whatever the outcome."""
        try:
            if self._begun:
                self._undo_patiently(time.monotonic() + _END_LIMIT_S)
        except (SkywardError, OSError) as error:
            if self.error is not None:
                self.error.add_note(f"node {self.node} may still run until its lease expires: {error}")
        finally:
            self._disconnect()

    def _undo_patiently(self, deadline: float) -> None:
        """Undo all attempts until the deadline, over a new connection if the old one is lost."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                connection = self._connection or self._connect_again()
                self._connection = connection
                self._undo(connection.run)
                return
            except Unreachable as error:
                if error.is_final or time.monotonic() + pause_s > deadline:
                    raise
                self._disconnect()
            time.sleep(pause_s)
            pause_s *= 2

    def _connect_again(self) -> Connection:
        if self._place.connect is not None:
            return self._place.connect()
        return connect(self._place.target, transport=self._orders.transport)

    def _undo(self, run: Runner) -> None:
        if self._runtime:
            run(remove_command(self._runtime, self._begun), timeout_s=_END_LIMIT_S)
        undo(run, self._begun)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _climb(self) -> Machine:
        pause_s = _FIRST_PAUSE_S
        for losses_left in range(_LOSSES, -1, -1):
            try:
                return self._attempt()
            except Unreachable as error:
                is_loss = self._connection is not None and not error.is_final and not error.was_stopped
                if not is_loss or not losses_left or self._orders.stop.wait(pause_s):
                    raise
                self._disconnect()
            except TimeoutError as error:  # what answers may hang, and then another machine or a later try may help
                step = self._step or "setup"
                message = f"{self._place.target}: node {self.node}: its {step} hangs: {error}"
                raise Unreachable(message, host=str(self._place.target)) from error  # words: ok, `run` says what to do
            pause_s *= 2
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self) -> Machine:
        with self._phase("connect", str(self._place.target)):
            connection = self._connection = self._connect()
        with self._holding_lease(connection):
            if self._begun:  # an earlier attempt lost its connection, and may still be running there
                self._undo(functools.partial(connection.run, stop=self._orders.stop))
            folder = f"{self._orders.pool}-{self.node}-{os.urandom(3).hex()}"
            self._begun.append(folder)
            container = self._find_container(connection, folder)
            run = functools.partial(self._run, connection, folder, container.once if container else None)
            ready = prepare(
                run,
                self._orders.spec.image,
                emit=self._orders.emit,
                node=self.node,
                host=str(self._place.target),
                code=self._orders.code,
                folder=folder,
                base=container.image_id if container else "",
            )
            if self._place.python:
                ready = in_python(run, ready, self._place.python)
            self._check_watchdog(functools.partial(self._run, connection, folder, None))
            self._wait_for_the_others()
        with self._phase("agent"):
            if container:
                container.start(functools.partial(connection.run, stop=self._orders.stop), ready.folder)
                run = functools.partial(self._run, connection, folder, container.inside)
            leased_at = time.monotonic()
            reply = self._start_agent(run, ready)
            self._check(ready, reply)
            self._warn_of_links(reply.get("unlinked", {}))
        return self._made(connection, ready, reply, container, leased_at)

    def _connect(self) -> Connection:
        if self._place.connect is not None:
            return self._place.connect()
        return wait_until_ready(
            self._place.target,
            timeout_s=self._orders.connect_s,
            auth_grace_s=self._place.auth_grace_s,
            transport=self._orders.transport,
            stop=self._orders.stop,
            on_retry=self._say_retry,
        )

    def _find_container(self, connection: Connection, folder: str) -> Container | None:
        """Return the container of the image, if it has one. It is pulled within the time limit of the bootstrap."""
        image = self._orders.spec.image
        if not image.container:
            return None
        with self._phase("container", image.container):
            container = find_container(
                functools.partial(connection.run, stop=self._orders.stop),
                image.container,
                folder=folder,
                lease_file=self._orders.lease_file,
                has_volumes=bool(self._orders.spec.volumes),
                is_detached=self._orders.spec.is_detached,
                limit_s=image.bootstrap_timeout_s,
            )
        self._runtime = container.runtime
        return container

    def _say_retry(self, error: SkywardError) -> None:
        self._orders.emit(PhaseOutput(node=self.node, phase="connect", text=f"{error}; retrying"))

    def _run(
        self,
        connection: Connection,
        folder: str,
        within: Callable[[str], str] | None,
        command: str,
        *,
        input: bytes | BinaryIO | None = None,  # noqa: A002  # as in subprocess.run
        timeout_s: float,
        on_line: Callable[[str], None] | None = None,
    ) -> SSHResult:
        """Run a command for the node, marked so that `undo` finds its processes. `stop` ends it.

        `within` puts it into a container. The runtime's own processes are unmarked, because they must clean up.
        """
        stop = self._orders.stop
        line = marked(command, folder)
        line = within(line) if within else line
        done = connection.run(line, input=input, timeout_s=timeout_s, on_line=on_line, stop=stop)
        # None of our commands exits with 255, so it is ssh's own. `Connection.run` cannot decide that, because its
        # holder process may not have noticed the loss yet.
        if done.code == _NO_CONNECTION:
            message = f"ssh {self._place.target}: the connection was lost ({done.error_text}); check the network"
            raise Unreachable(message, host=str(self._place.target), is_final=False)
        if within and done.code in _RUNTIME_FAILED and not done.text:
            raise ProviderError(
                f"Image.container={self._orders.spec.image.container!r}: its sh cannot be run ({done.error_text}); use "
                "an image with sh, tar, gzip and timeout"
            )
        return done

    def _check_watchdog(self, run: Callable[..., SSHResult]) -> None:
        """Refuse a machine that would not shut itself down. sshd may answer before its user data has run."""
        if not self._orders.lease_file:
            return
        there = f"[ -e {shlex.quote(self._orders.lease_file)} ]"
        limit_s = math.ceil(min(self._orders.connect_s, _WATCHDOG_LIMIT_S))
        if run(there, timeout_s=_END_LIMIT_S).code == 0:
            return
        with self._phase("user data", "its lease's watchdog"):
            line = f"i=0; until {there}; do i=$((i + 1)); [ $i -gt {limit_s} ] && exit 1; sleep 1; done"
            if run(line, timeout_s=limit_s + _END_LIMIT_S).code:
                raise ProviderError(
                    f"{self._place.target}: node {self.node}: the lease watchdog, which shuts the machine down without "
                    f"contact, did not start: {self._orders.lease_file} is missing after {limit_s} s, so its user data "
                    "has not run; use an image with a working cloud-init"
                )

    def _wait_for_the_others(self) -> None:
        """Wait until all nodes are prepared: nobody renews the lease of an agent before all agents run."""
        if self._has_waited:
            return
        try:
            self._orders.are_prepared.wait()
        except threading.BrokenBarrierError:
            text = (
                f"{self._place.target}: node {self.node} was stopped because another node did not come up; see the "
                "error of that node"
            )
            raise Unreachable(text, host=str(self._place.target), was_stopped=True) from None
        self._has_waited = True

    @contextlib.contextmanager
    def _holding_lease(self, connection: Connection) -> Iterator[None]:
        """Renew the machine's lease until the agent runs: installing packages may outlast it."""
        lease_file, done = self._orders.lease_file, threading.Event()

        def renew() -> None:
            while not done.wait(self._orders.lease_s / 4):
                with contextlib.suppress(NodeError, ProviderError, OSError):  # the preparing thread meets the error too
                    connection.run(f"touch {shlex.quote(lease_file)}", timeout_s=_END_LIMIT_S)

        thread = threading.Thread(target=renew, name=f"skyward-lease-{self.node}", daemon=True)
        if lease_file:
            thread.start()
        try:
            yield
        finally:
            done.set()

    @contextlib.contextmanager
    def _phase(self, name: str, detail: str = "") -> Iterator[None]:
        self._step, began = name, time.monotonic()
        self._orders.emit(PhaseStarted(node=self.node, phase=name, detail=detail))
        try:
            yield
        except BaseException as error:
            seconds = time.monotonic() - began
            self._orders.emit(PhaseFailed(node=self.node, phase=name, seconds=seconds, reason=str(error)))
            raise
        self._step = ""
        self._orders.emit(PhaseEnded(node=self.node, phase=name, seconds=time.monotonic() - began))

    def _start_agent(self, run: Callable[..., SSHResult], ready: Ready) -> dict[str, Any]:
        done = run(
            python_line((ready.agent_python,), ready.agent_path, "start"),
            input=pickle.dumps(self._config(ready)),
            timeout_s=_AGENT_LIMIT_S,
        )
        if done.code:
            # Retryable, because the cause may be temporary, such as a shortage of memory.
            raise ProviderError(
                f"{self._place.target}: node {self.node}: its agent did not start: {done.error_text}; mend that, and "
                "open the pool again",
                retryable=True,
            )
        return reply_of(done.text)

    def _config(self, ready: Ready) -> NodeConfig:
        spec = self._orders.spec
        env = dict(ready.env)
        thread_variables = limit_threads(env, ready.cores // spec.concurrency)
        return NodeConfig(
            pool=self._orders.pool,
            node=self.node,
            folder=ready.folder,
            slots=spec.concurrency,
            executor=spec.executor,
            python=ready.python,
            path=ready.path,
            cwd=ready.cwd,
            env=tuple(env.items()),
            cores=ready.cores,
            thread_variables=thread_variables,
            preload=spec.preload,
            address=self._place.private_address,
            lease_s=self._orders.lease_s,
            lease_file=self._orders.lease_file,
            # The machine of the first node ends with the head, which may have outcomes that nobody has read.
            ends_machine=spec.is_detached and bool(self._orders.lease_file) and self.node != 0,
            notice_file=self._orders.notice_file,
            cancel_grace_s=spec.cancel_grace_s,
            volumes=tuple(spec.volumes.items()),
            links_volumes=True,
        )

    def _warn_of_links(self, unlinked: dict[str, str]) -> None:
        for path, why in unlinked.items():
            _log.warning(
                "%s: node %d: volumes[%r] has no link at that path: %s; in tasks, use sky.volume(%r)",
                self._place.target,
                self.node,
                path,
                why,
                path,
            )

    def _check(self, ready: Ready, reply: dict[str, Any]) -> None:
        """Check the hardware against the spec, now that it is known. Raises NoCapacity."""
        spec = self._orders.spec
        lacks = []
        if spec.vcpus is not None and ready.cores < spec.vcpus:
            lacks.append(f"vcpus={spec.vcpus}, but the machine has {ready.cores} cores")
        if spec.memory_gib is not None and ready.memory_gib < spec.memory_gib:
            lacks.append(f"memory_gib={spec.memory_gib:g}, but the machine has {ready.memory_gib:.1f}")
        if spec.architecture is not None and spec.architecture != _ARCHITECTURES.get(
            reply["machine"], reply["machine"]
        ):
            lacks.append(f"architecture={spec.architecture}, but the machine is {reply['machine']}")
        if spec.accelerator is not None and not spec.accelerator.is_met_by(reply["accelerator"], reply["accelerators"]):
            has = f"{reply['accelerators']} {reply['accelerator']}" if reply["accelerators"] else "none"
            lacks.append(f"accelerator={spec.accelerator}, but the machine has {has}")
        if lacks:
            raise NoCapacity(
                f"{self._place.target}: node {self.node}: requested {'; '.join(lacks)}; lower the request, or use "
                "another machine"
            )

    def _made(
        self,
        connection: Connection,
        ready: Ready,
        reply: dict[str, Any],
        container: Container | None,
        leased_at: float,
    ) -> Machine:
        handle = RemoteNodeHandle(
            connection=connection,
            node=self.node,
            watchdog=reply["pid"],
            started=reply["started"],
            folder=ready.folder,
            python=(ready.agent_python,),
            path=ready.agent_path,
            root=reply["root"],
            place=self._place,
            container=container,
            cwd=ready.cwd,
        )
        return machine_at(
            handle,
            node=self.node,
            socket_path=reply["socket"],
            address=reply["address"],
            slots=self._orders.spec.concurrency,
            lease_s=self._orders.lease_s,
            leased_at=leased_at,
            interface=reply["interface"],
        )


def machine_at(
    handle: RemoteNodeHandle,
    *,
    node: int,
    socket_path: str,
    address: str,
    slots: int,
    lease_s: float,
    interface: str,
    leased_at: float = 0.0,
) -> Machine:
    """Return the machine of an agent that runs, as this process reaches it."""
    connection, container = handle.connection, handle.container
    files = python_line(handle.python, handle.path, "serve", (handle.cwd,), module="node.agent.file_server")
    files = marked(files, os.path.basename(handle.folder))
    return Machine(
        node=node,
        socket_path=socket_path,
        folder=handle.folder,
        pid=0,
        peer=Peer(node=node, private_ip=address, public_ip=handle.place.public_address or None),
        slots=slots,
        lease_s=lease_s,
        leased_at=leased_at,
        interface=interface,
        channel=handle.channel_to(socket_path),
        terminal=tuple(connection.terminal()),
        dial=connection.dial,
        files=tuple(connection.argv(container.inside(files) if container else files)),
        login=handle,
        handle=handle,
    )
