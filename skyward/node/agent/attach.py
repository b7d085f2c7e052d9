"""Passes its standard input and output to an agent as a new channel, and waits until the agent is done with them.

    python -I -S attach.py <the agent's socket>

A client runs this on a node, over ssh for example. Once the agent has the descriptors, no byte passes through this
process. It stays only because its parent, such as sshd, closes the stream when it exits. So it must be small and start
fast, and it runs as a file that imports nothing of skyward. Exit codes: 0 when the agent is done, 69 without an agent.
"""

import sys

_ATTACH = 6  # Kind.ATTACH; a test compares
_HAS_FD = 0x80
_UNAVAILABLE = 69  # EX_UNAVAILABLE of sysexits.h


def main(path: str) -> int:
    try:
        sock = pass_on(path, 0, 1)
    except OSError as error:
        sys.stderr.write(f"skyward: no agent at {path}: {error.strerror}\n")
        return _UNAVAILABLE
    while sock.recv(4096):
        pass
    return 0


def pass_on(path: str, read_fd: int, write_fd: int):  # type: ignore[no-untyped-def]  # its type would be an import
    """Pass two descriptors to an agent as a new channel. Return the connection, which ends when the agent is done."""
    import _socket

    sock = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    sock.connect(path)
    # Headers of frames: | length u32 | kind u8 | flags u8 | lane u16 | ident u64 |
    frames = b"".join(bytes(4) + bytes((_ATTACH, _HAS_FD)) + lane.to_bytes(2, "little") + bytes(8) for lane in (0, 1))
    descriptors = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (read_fd, write_fd))
    sock.sendmsg([frames], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])
    return sock


def command(python: str, package_root: str, socket_path: str) -> tuple[str, ...]:
    """Build the command line that runs this on a node. `package_root`: the skyward package's parent folder there."""
    return python, "-I", "-S", f"{package_root}/{'/'.join(__name__.split('.'))}.py", socket_path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
