"""Opening of links to agents, one by one or in parallel, with a way to stop at once."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..core.interrupts import has_ended
from ..errors import InternalError, PoolClosed, Unreachable
from ..values.machine import Machine
from ..wire.channel import Channel, ChannelClosed, receive
from ..wire.ends import Ends
from ..wire.frames import PROTOCOL_VERSION, FrameKind, FrameParser, pack
from .link import NodeLink
from .threads import run_side_by_side

if TYPE_CHECKING:
    from .dialler import Connect, Dialler

_PAUSES_S = 0.2, 0.5
"""Pauses between attempts to open a link to a remote node."""


class Opener:
    """Opener of the client's links to the nodes of a pool. Thread-safe. After `close` it opens none.

    Args:
        pool: Name of the pool.
        timeout_s: Timeout for each link.
        are_known: Whether the agents existed before, so that the absence of one means its end.
    """

    def __init__(self, pool: str, *, timeout_s: float, are_known: bool = False) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._are_known = are_known
        self.way_to: Callable[[Machine], Connect | None] = _command
        """Function that returns how a machine's agent is reached; None: by its socket on this machine."""
        self.link_class = NodeLink
        """Class of the links to remote nodes."""
        self.hello: dict[str, Any] = {}
        """Further fields of the greeting to remote nodes."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._diallers: set[Dialler] = set()
        """Diallers of links that are being opened."""

    def open(self, machine: Machine, *, until: float = math.inf, is_known: bool = False) -> NodeLink:
        """Connect to a machine's agent and greet it.

        Args:
            machine: The machine.
            until: Time (monotonic) at which to give up, or a second later.
            is_known: Whether its agent existed before, so that the absence of one means its end.

        Raises:
            Unreachable: The agent does not answer in time.
            PoolClosed: `close` was called.
            Forgotten: A known agent is gone.
            InternalError: The agent speaks another version of the protocol.
        """
        way = self.way_to(machine)
        if way is None:
            sock, facts = _connect(machine.socket_path, self._pool, self._timeout_s)
            return NodeLink(machine.node, Channel(sock), facts)
        from .dialler import Dialler  # nodes on this machine do without

        dialler = Dialler(
            way,
            role="client",
            pool=self._pool,
            node=machine.node,
            is_known=is_known or self._are_known,
            **self.hello,
        )
        with self._lock:
            if self._is_closed:
                raise PoolClosed("pool: closed while it was starting; open a new one")
            self._diallers.add(dialler)
        try:
            ends, facts = self._dialled(dialler, min(time.monotonic() + self._timeout_s, until))
        finally:
            with self._lock:
                self._diallers.discard(dialler)
        dialler.channel.attach(ends, facts["received"])
        return self.link_class(machine.node, dialler.channel, facts, dialler=dialler)

    def _dialled(self, dialler: Dialler, deadline: float) -> tuple[Ends, dict[str, Any]]:
        """Dial, and try again a few times.

        The first connection may break by chance. More attempts would only delay the error of a command that always
        fails.
        """
        for pause_s in _PAUSES_S:
            try:
                return dialler.dial(max(1.0, deadline - time.monotonic()))
            except Unreachable:
                if time.monotonic() + pause_s > deadline:
                    raise
            time.sleep(pause_s)
        return dialler.dial(max(1.0, deadline - time.monotonic()))

    def open_all(self, machines: Sequence[Machine]) -> dict[int, NodeLink]:
        """Open all links, those of remote nodes in parallel, and return them by node.

        Raises the first error, and closes all links before.
        """
        opened: dict[int, NodeLink] = {}
        failed: list[BaseException] = []
        threads = [
            threading.Thread(target=self._open_one, args=(machine, opened, failed), daemon=True)
            for machine in machines
            if self.way_to(machine) is not None
        ]
        try:
            for thread in threads:
                thread.start()
            for machine in machines:
                if self.way_to(machine) is None:
                    self._open_one(machine, opened, failed)
            _join(threads, failed)
        except BaseException as error:  # Ctrl-C too: no link may be left open
            failed.append(error)
        if failed:
            self.close()
            _join(threads, [])  # takes little time, because `close` has killed what they wait for
            for link in opened.values():
                link.close()
            raise failed[0]
        return opened

    def _open_one(self, machine: Machine, opened: dict[int, NodeLink], failed: list[BaseException]) -> None:
        try:
            opened[machine.node] = self.open(machine)
        except BaseException as error:  # `open_all` raises it
            failed.append(error)

    def close(self) -> None:
        """Stop opening links, and kill the attempts under way. Idempotent."""
        with self._lock:
            self._is_closed = True
            for dialler in self._diallers:
                dialler.close()


def _command(machine: Machine) -> Connect | None:
    if not machine.channel:
        return None
    from .dialler import CommandEnds  # as above

    return functools.partial(CommandEnds, machine.channel)


def _join(threads: list[threading.Thread], failed: list[BaseException]) -> None:
    """Wait for the threads that were started, until one has failed."""
    for thread in threads:
        while thread.ident is not None and not failed and not has_ended(thread, 0.05):
            continue


def _connect(path: str, pool: str, timeout_s: float) -> tuple[socket.socket, dict[str, Any]]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
        hello = {"version": PROTOCOL_VERSION, "role": "client", "pool": pool, "pid": os.getpid()}
        sock.sendall(pack(FrameKind.HELLO, body=json.dumps(hello).encode()))
        parser = FrameParser()
        while True:
            for frame in receive(sock, parser):
                if frame.kind == FrameKind.WELCOME:
                    return sock, json.loads(frame.body)
                why = frame.body.decode(errors="replace")
                raise InternalError(f"agent at {path}: refused the link ({why}); open a new pool")
    except (OSError, ChannelClosed) as error:
        sock.close()
        raise Unreachable(
            f"agent at {path}: does not answer ({error}); see the log of the pool, and open a new one", node=None
        ) from error
    except InternalError:
        sock.close()
        raise


def ask_to_end(machines: Sequence[Machine], timeout_s: float) -> None:
    """Stop agents that have no link, in parallel. Agents that do not answer in time are ignored."""
    run_side_by_side(functools.partial(_ask_one, machine, timeout_s) for machine in machines)


def _ask_one(machine: Machine, timeout_s: float) -> None:
    from .dialler import Forgotten  # as above

    with contextlib.suppress(Unreachable, InternalError, Forgotten):  # its lease or its provider will end it
        link = Opener("", timeout_s=timeout_s, are_known=True).open(machine)
        link.send(FrameKind.SHUTDOWN)
        link.finish(time.monotonic() + timeout_s)
