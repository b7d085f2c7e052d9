"""A process whose system refuses to exchange two names, as NFS does."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

__all__ = ["refuse_exchange"]

_NUMBERS = {"x86_64": (0xC000003E, 316), "aarch64": (0xC00000B7, 276)}
"""Of each machine: its audit number, and that of renameat2. Source: linux/audit.h, asm/unistd.h."""
_LOAD, _IS, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EINVAL


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse_exchange() -> None:
    """Let renameat2(..., RENAME_EXCHANGE) fail with EINVAL in this process and its children. It cannot be undone."""
    machine, renameat2 = _NUMBERS[platform.machine()]
    lines = [
        (_LOAD, 0, 0, 4),  # the machine
        (_IS, 0, 5, machine),
        (_LOAD, 0, 0, 0),  # the call
        (_IS, 0, 3, renameat2),
        (_LOAD, 0, 0, 16 + 4 * 8),  # its fifth argument
        (_IS, 0, 1, 2),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = _Program(len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filtering = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filtering, ctypes.byref(program)) == 0, ctypes.get_errno()
