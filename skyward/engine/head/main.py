"""Entry point of a head: reads its HeadConfig from standard input, listens on a socket in its folder, and reports it.

    python -I -c "...main()" < length and pickled HeadConfig

Standard output gets one line: the path of the socket, or the reason why there is none. The head ends when its client
or keeper asks for that, and when both have been away for longer than the lease. That of a detached pool renews its own
lease, and ends when no client came for `detached_for_s`. A head that its client has started on its own machine ends
with its standard input. Any other has a watchdog (`node.agent.watchdog`), which ends it with all processes below it.
That of a detached pool starts it again when it was killed or has failed, and it goes on from its journal. A head that
ends without its client lets a rented machine power itself off.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import sys
import threading
from typing import TYPE_CHECKING

from ...core.limits import raise_file_limit
from ...core.ownership import make_private_folder
from ...node.agent.watchdog import Lease, end_machine, guard
from .last_words import write_last_words
from .messages import HeadConfig
from .plain import dump_plain, load_plain

if TYPE_CHECKING:
    from .head import Head

BOOT = """
import sys
sys.path.insert(0, sys.argv[1])
from skyward.engine.head.main import main
sys.exit(main())
"""
SOCKET_NAME = "head.sock"
_LENGTH = struct.Struct("<I")
_LOOK_S = 0.5
_BACKLOG = 64


def order_of(config: HeadConfig) -> bytes:
    """Return the standard input of a head."""
    order = dump_plain(config)
    return _LENGTH.pack(len(order)) + order


def main() -> int:
    order = sys.stdin.buffer
    size = order.read(_LENGTH.size)
    if len(size) < _LENGTH.size:
        return 1  # the client died before it sent the order
    config: HeadConfig = load_plain(order.read(*_LENGTH.unpack(size)))
    try:
        raise_file_limit()
        make_private_folder(config.folder)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = os.path.join(config.folder, SOCKET_NAME)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(_BACKLOG)
    except OSError as error:
        shutil.rmtree(config.folder, ignore_errors=True)
        _say(f"cannot start: {config.folder} cannot be used: {error.strerror or error}; free disk space")
        return 1
    if not config.starter:
        lease = Lease(config.lease_s, config.lease_file)
        # Its watchdog holds the listener too, so that clients find the next process at the same socket.
        is_detached = bool(config.detached_for_s)
        return guard(lambda: _run(config, listener, path, lease), lease, config.folder, restarts=is_detached)
    try:
        return _run(config, listener, path)
    finally:
        shutil.rmtree(config.folder, ignore_errors=True)


def _run(config: HeadConfig, listener: socket.socket, path: str, lease: Lease | None = None) -> int:
    is_detached = bool(config.detached_for_s)
    if not is_detached:
        _say(path)  # a client that connects waits for a moment, while this process imports the rest
    # Only here: they are large, and neither the starter of a head nor its watchdogs need them.
    from .door import Door
    from .head import Head

    head = Head(config)
    turns = head.turns
    door = Door(listener, head.welcome, turns.renew, turns.orphan, head.look)
    head.engine.begin()
    if is_detached and not head.was_killed:
        _say(path)  # its journal could be made
    door.open()
    if head.was_killed:  # a client may already lend the channels for that
        head.go_on()
    if config.starter:
        threading.Thread(target=_wait_for_end, args=(turns.ended,), daemon=True).start()
    try:
        _go_on(head, lease)
    except Exception as error:
        if turns.is_detached:  # for the case that it is not started again
            from ..threads import in_words  # only here: a start need not wait for it

            write_last_words(config.folder, f"because its scheduler failed: {in_words(error)}")
        raise
    if turns.is_detached:
        write_last_words(config.folder, turns.last_words)
    door.close()
    head.close()
    if config.lease_file and not turns.was_closed:
        end_machine(config.lease_file)
    return 0


def _go_on(head: Head, lease: Lease | None) -> None:
    """Do what is done by the clock, until the end."""
    turns, renewed_at = head.turns, 0.0
    while not turns.ended.wait(_LOOK_S) and not turns.is_over:
        if lease is not None and (turns.contact_at > renewed_at or turns.is_detached):
            renewed_at = turns.contact_at
            lease.renew()
        head.tell_kept_output()
        head.settle()
        head.recall_permits()
        head.warn_of_end()


def _wait_for_end(ended: threading.Event) -> None:
    """Wait for the end of standard input. Not by its buffered reader, which the end of the process could not close."""
    try:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                continue
    finally:
        ended.set()


def _say(line: str) -> None:
    os.write(1, f"{line}\n".encode())
