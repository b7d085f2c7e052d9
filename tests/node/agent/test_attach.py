"""The stub that connects its standard input and output to an agent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import skyward
from skyward.node.agent import attach
from skyward.wire.channel import Channel
from skyward.wire.frames import HAS_FD, Frame, FrameKind

_ROOT = str(Path(skyward.__file__).parent.parent)


def test_it_speaks_the_protocol_without_importing_it() -> None:
    # Only the stub is sent to nodes, so it repeats both numbers. On one machine no behaviour would show a difference.
    assert attach._ATTACH == FrameKind.ATTACH
    assert attach._HAS_FD == HAS_FD  # see above


def test_the_agent_gets_the_descriptors_and_the_stub_waits(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        stub = subprocess.Popen(
            attach.command(sys.executable, _ROOT, path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        sock, _ = listener.accept()
    assert stub.stdin is not None
    assert stub.stdout is not None
    channel = Channel(sock)
    frames: list[Frame] = []
    sock.setblocking(True)
    while len(frames) < 2:
        frames += channel.receive()
    assert [(f.kind, f.lane) for f in frames] == [(FrameKind.ATTACH, 0), (FrameKind.ATTACH, 1)]
    stub.stdin.write(b"to the agent")
    stub.stdin.flush()
    assert os.read(frames[0].fd, 100) == b"to the agent"
    os.write(frames[1].fd, b"from the agent")
    assert os.read(stub.stdout.fileno(), 100) == b"from the agent"
    for frame in frames:
        os.close(frame.fd)
    assert stub.poll() is None
    channel.close()
    with stub:
        assert stub.wait(60) == 0


def test_without_an_agent_it_reports_that(tmp_path: Path) -> None:
    argv = attach.command(sys.executable, _ROOT, str(tmp_path / "none.sock"))
    ended = subprocess.run(argv, capture_output=True, timeout=60, stdin=subprocess.DEVNULL, check=False)
    assert ended.returncode == 69
    assert b"no agent at" in ended.stderr


def test_it_imports_no_module_of_skyward() -> None:
    source = Path(attach.__file__).read_text()
    assert "from ." not in source
    assert "import skyward" not in source
