"""Hands this process's standard input and output to an agent, as a new channel, and waits until it has done with them.

    python -I -S attach.py <the agent's socket>

It is what a client runs on a node, by ssh say. Once the agent has the descriptors no byte passes through here: the
process stays only because who started it closes the stream when it ends. So it must be small and start fast, and it
is run as a file: it imports nothing of ours. Exit codes: 0 when the agent has done, 69 when there is no agent.
"""

import sys

__all__ = ["command", "main"]

_ATTACH = 6  # Kind.ATTACH; a test compares
_HAS_FD = 0x80
_UNAVAILABLE = 69  # EX_UNAVAILABLE of sysexits.h


def main(path: str) -> int:
    import _socket

    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError as error:
        sys.stderr.write(f"skyward: no agent at {path}: {error.strerror}\n")
        return _UNAVAILABLE
    # Headers of frames: | length u32 | kind u8 | flags u8 | lane u16 | ident u64 |
    frames = b"".join(bytes(4) + bytes((_ATTACH, _HAS_FD)) + lane.to_bytes(2, "little") + bytes(8) for lane in (0, 1))
    descriptors = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1))
    sock.sendmsg([frames], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])
    while sock.recv(4096):
        pass
    return 0


def command(python: str, package_root: str, socket_path: str) -> tuple[str, ...]:
    """The argv that runs it on a node. `package_root`: the folder there that holds the skyward package."""
    return python, "-I", "-S", f"{package_root}/{'/'.join(__name__.split('.'))}.py", socket_path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
