"""The actor on a node of a Ray cluster: it runs commands there, as a login does, and passes their bytes to the driver.

Ray copies this class and those of `carried` to the node, because skyward is not installed there.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import ray

from ...wire.carried import CarriedStreams, Ended, Opened, StreamBatch

_ERRORS_BYTES = 64 * 1024
"""Bytes of standard error that are kept: the last ones."""
_HELD_S = 1.0
"""Seconds to wait for standard error to end after the command has."""
_NO_GPU = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "-1")


class ShellBridge:
    """Bridge to one node. Ray runs its methods, all in one event loop."""

    def __init__(self) -> None:
        self._streams = CarriedStreams(_run)

    async def exchange(self, number: int, body: bytes, wait_s: float) -> tuple[int, bytes]:
        """Pass a batch on to the commands, and return what they have written, after at most `wait_s` seconds."""
        await self._streams.take(StreamBatch(number, body))
        given = await self._streams.give(wait_s)
        return given.number, given.body

    async def describe(self) -> dict[str, str]:
        """Return facts about the node: Ray's identifier, its address and its interpreter."""
        return {
            "ray_node": ray.get_runtime_context().get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "python": sys.executable,
        }


async def _run(command: bytes) -> Opened:
    """Run a line of sh. Its standard input and output are the stream, which ends with its exit code and its errors."""
    ours, process = _start(command.decode())
    reader, writer = await asyncio.open_connection(sock=ours)
    errors = asyncio.ensure_future(_last_bytes(process))

    async def ended() -> Ended:
        code = await _exit_code(process)
        await asyncio.wait([errors], timeout=_HELD_S)
        said = errors.result() if errors.done() else b""
        errors.cancel()
        return Ended(code, said.decode(errors="replace"))

    return Opened(reader, writer, writer.close, ended)


def _start(command: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            ["sh", "-c", command],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.PIPE,
            env=_environment(),
            cwd=os.path.expanduser("~"),
            start_new_session=True,
        )
    return ours, process


def _environment() -> dict[str, str]:
    """Return the environment that the machine's raylet was started in, with the devices of this bundle.

    Ray's own variables would lead a program of the user's to this cluster. Ray also limits the threads of its workers.
    """
    with open(f"/proc/{os.getppid()}/environ", "rb") as file:
        pairs = [entry.partition("=") for entry in os.fsdecode(file.read()).split("\0") if "=" in entry]
    environment = {name: value for name, _, value in pairs} | _devices()
    path = environment.get("PATH", os.defpath)
    environment["PATH"] = f"{os.path.dirname(sys.executable)}:{path}"
    return {name: value for name, value in environment.items() if not name.startswith("RAY_")}


def _devices() -> dict[str, str]:
    """Return the variables by which a process sees the devices of this bundle, and no others.

    Ray sets those of the devices that it gave this process. Without any, newer versions leave all GPUs visible.
    """
    given = {name: value for name, value in os.environ.items() if "_VISIBLE_" in name or name.startswith("TPU_")}
    return given if ray.get_runtime_context().get_accelerator_ids().get("GPU") else given | _NO_GPU


async def _last_bytes(process: subprocess.Popen[bytes]) -> bytes:
    """Read what a process writes to its standard error, and return the end of it."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stderr)
    last = b""
    try:
        while piece := await reader.read(_ERRORS_BYTES):
            last = (last + piece)[-_ERRORS_BYTES:]
    finally:
        transport.close()
    return last


async def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process without a thread for each, and return its exit code as sh gives it."""
    has_ended = asyncio.Event()
    loop, pidfd = asyncio.get_running_loop(), os.pidfd_open(process.pid)
    loop.add_reader(pidfd, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    code = process.wait()
    return code if code >= 0 else 128 - code
