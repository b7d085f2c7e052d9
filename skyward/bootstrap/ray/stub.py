"""Leads from a machine of a Ray cluster to the driver there, and through it to a command on a node.

    python -S -E -s stub.py SOCKET run NODE COMMAND     is that command: its input, output, errors and exit code
    python -S -E -s stub.py SOCKET ask JSON             prints the driver's answers, a line of JSON each
    python -S -E -s stub.py "" dial PORT                is a connection to a port of this machine's loopback

It starts for every channel to a node, so it is small and imports nothing of skyward. Exit code 255: there is no way.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

_NO_CONNECTION = 255
_CONNECT_S = 5.0
_END_S = 10.0
"""Longest wait for the driver to say how a command has ended."""
_LOOK_S = 0.02
_PIECE = 64 * 1024


def main(path: str, what: str, *words: str) -> int:
    try:
        if what == "ask":
            return _ask(path, json.loads(words[0]))
        if what == "dial":
            with socket.create_connection(("127.0.0.1", int(words[0])), _CONNECT_S) as sock:
                sock.settimeout(None)
                _pass_on(sock)
            return 0
        return _run(path, *words)
    except OSError as error:
        sys.stderr.write(f"skyward: Ray's driver at {path}: {error.strerror or error}\n")
        return _NO_CONNECTION


def _ask(path: str, order: dict[str, object]) -> int:
    try:
        with _asked(path, order) as sock:
            _copy(sock, 1)
    except ConnectionRefusedError:  # the driver was killed, so nobody else removes its folder, with this program
        if "release" in order:
            import shutil  # only here: it takes longer than all other modules

            shutil.rmtree(os.path.dirname(path), ignore_errors=True)
        raise
    return 0


def _run(path: str, node: str, command: str) -> int:
    ident = os.urandom(8).hex()
    with _asked(path, {"id": ident, "node": int(node), "command": command}) as sock:
        _pass_on(sock)
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        with _asked(path, {"ended": ident}) as sock:
            ended = json.loads(sock.makefile("rb").readline() or b"{}")
        if ended:
            sys.stderr.write(ended["said"])
            return _NO_CONNECTION if ended["code"] is None else int(ended["code"])
        time.sleep(_LOOK_S)
    return _NO_CONNECTION


def _asked(path: str, order: dict[str, object]) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(_CONNECT_S)
    sock.connect(path)
    sock.sendall(json.dumps(order).encode() + b"\n")
    sock.settimeout(None)
    return sock


def _pass_on(sock: socket.socket) -> None:
    """Pass standard input on to a socket, and what comes from there to standard output, until that ends."""
    threading.Thread(target=_send_input, args=(sock,), daemon=True).start()
    _copy(sock, 1)


def _send_input(sock: socket.socket) -> None:
    try:
        while piece := os.read(0, _PIECE):
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
    except OSError:  # the command has ended
        return


def _copy(sock: socket.socket, fd: int) -> None:
    while piece := sock.recv(_PIECE):
        while piece:
            piece = piece[os.write(fd, piece) :]


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a thread may still read the input
