"""A link of the tests: runs a command behind a pair of pipes and passes on what goes in and out.

    python relay.py <folder> <delay in seconds> <command> ...

Its process id is the name of a file in the folder while it runs. A test cuts the link by killing it, and stalls it by
stopping it. While there is a file "cut" in the folder it does not start, and while there is a file "hang" it does
nothing. It holds back each byte by the delay, in both directions.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time

_LIMIT = 4 << 20


def main(folder: str, delay: str, *command: str) -> int:
    path = os.path.join(folder, str(os.getpid()))
    with open(path, "w"):
        pass
    if os.path.exists(os.path.join(folder, "cut")):  # behind the name: whoever cuts sees one or the other
        return 1
    while os.path.exists(os.path.join(folder, "hang")):
        time.sleep(0.05)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None
    assert process.stdout is not None
    delay_s = float(delay)
    up = threading.Thread(target=_pass_on, args=(0, process.stdin.fileno(), delay_s), daemon=True)
    up.start()
    _pass_on(process.stdout.fileno(), 1, delay_s)
    os.unlink(path)
    try:
        return process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return 1


def _pass_on(source: int, target: int, delay_s: float) -> None:
    if delay_s:
        _pass_on_late(source, target, delay_s)
    else:
        while piece := _read(source):
            _write(target, piece)
    os.close(target)


def _pass_on_late(source: int, target: int, delay_s: float) -> None:
    waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(_LIMIT // 1024)
    writer = threading.Thread(target=_write_late, args=(target, waiting), daemon=True)
    writer.start()
    while piece := _read(source):
        waiting.put((time.monotonic() + delay_s, piece))
    waiting.put((time.monotonic() + delay_s, b""))
    writer.join()


def _write_late(target: int, waiting: queue.Queue[tuple[float, bytes]]) -> None:
    while True:
        due, piece = waiting.get()
        if (wait_s := due - time.monotonic()) > 0:
            time.sleep(wait_s)
        if not piece:
            return
        _write(target, piece)


def _read(source: int) -> bytes:
    try:
        return os.read(source, 65536)
    except OSError:
        return b""


def _write(target: int, piece: bytes) -> None:
    try:
        while piece:
            piece = piece[os.write(target, piece) :]
    except OSError:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
