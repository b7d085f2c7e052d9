"""Links that are opened: one by one or side by side, and ended at once where nobody wants them any more."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..errors import InternalError, PoolClosed, Unreachable
from ..values.machine import Machine
from ..wire.channel import Channel, ChannelClosed, receive
from ..wire.ends import Ends
from ..wire.frames import PROTOCOL_VERSION, FrameKind, FrameParser, pack
from .dialler import Dialler
from .link import NodeLink
from .threads import run_side_by_side

__all__ = ["Opener", "ask_to_end"]

_PAUSES_S = 0.2, 0.5
"""Between tries to open a link to a remote node."""


class Opener:
    """Opens the client's links to the nodes of a pool. Thread-safe; after `close` it opens none."""

    def __init__(self, pool: str, *, timeout_s: float) -> None:
        """`timeout_s`: for each link."""
        self._pool = pool
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._diallers: set[Dialler] = set()
        """Of links that are being opened."""

    def open(self, machine: Machine) -> NodeLink:
        """Connect to a machine's agent and greet it.

        Raises Unreachable when it does not answer in time, PoolClosed after `close`, InternalError when it speaks
        another version.
        """
        if not machine.channel:
            sock, facts = _connect(machine.socket_path, self._pool, self._timeout_s)
            return NodeLink(machine.node, Channel(sock), facts)
        dialler = Dialler(machine.channel, role="client", pool=self._pool, node=machine.node)
        with self._lock:
            if self._is_closed:
                raise PoolClosed("the pool was closed")
            self._diallers.add(dialler)
        try:
            ends, facts = self._dialled(dialler)
        finally:
            with self._lock:
                self._diallers.discard(dialler)
        dialler.channel.attach(ends, facts["received"])
        return NodeLink(machine.node, dialler.channel, facts, dialler=dialler)

    def _dialled(self, dialler: Dialler) -> tuple[Ends, dict[str, Any]]:
        """A connection may break at this very moment; a command that always fails is not worth waiting for."""
        deadline = time.monotonic() + self._timeout_s
        for pause_s in _PAUSES_S:
            try:
                return dialler.dial(max(1.0, deadline - time.monotonic()))
            except Unreachable:
                if time.monotonic() + pause_s > deadline:
                    raise
            time.sleep(pause_s)
        return dialler.dial(max(1.0, deadline - time.monotonic()))

    def open_all(self, machines: Sequence[Machine]) -> dict[int, NodeLink]:
        """`open` of each, by node; remote ones side by side. Raises the first error, and then none stays open."""
        opened: dict[int, NodeLink] = {}
        failed: list[BaseException] = []
        threads = [
            threading.Thread(target=self._open_one, args=(machine, opened, failed), daemon=True)
            for machine in machines
            if machine.channel
        ]
        try:
            for thread in threads:
                thread.start()
            for machine in machines:
                if not machine.channel:
                    self._open_one(machine, opened, failed)
            _join(threads, failed)
        except BaseException as error:  # Ctrl-C too
            failed.append(error)
        if failed:
            self.close()
            _join(threads, [])  # soon: what they waited for has ended
            for link in opened.values():
                link.close()
            raise failed[0]
        return opened

    def _open_one(self, machine: Machine, opened: dict[int, NodeLink], failed: list[BaseException]) -> None:
        try:
            opened[machine.node] = self.open(machine)
        except BaseException as error:  # it is raised by the thread that waits
            failed.append(error)

    def close(self) -> None:
        """End what is being opened. Idempotent."""
        with self._lock:
            self._is_closed = True
            for dialler in self._diallers:
                dialler.close()


def _join(threads: list[threading.Thread], failed: list[BaseException]) -> None:
    """Wait for those that were started, until one has failed."""
    for thread in threads:
        while thread.ident is not None and thread.is_alive() and not failed:
            thread.join(0.05)


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
                raise InternalError(f"the agent refused: {frame.body.decode(errors='replace')}")
    except (OSError, ChannelClosed) as error:
        sock.close()
        raise Unreachable(f"the agent at {path} does not answer: {error}", node=None) from error
    except InternalError:
        sock.close()
        raise


def ask_to_end(machines: Sequence[Machine], timeout_s: float) -> None:
    """Tell agents that no link leads to to end, side by side; those that do not answer in time are left."""
    run_side_by_side(functools.partial(_ask_one, machine, timeout_s) for machine in machines)


def _ask_one(machine: Machine, timeout_s: float) -> None:
    with contextlib.suppress(Unreachable, InternalError):  # its lease, or its provider, ends what does not listen
        link = Opener("", timeout_s=timeout_s).open(machine)
        link.send(FrameKind.SHUTDOWN)
        link.finish(time.monotonic() + timeout_s)
