"""Source of the uv that creates environments on a node: the client's binary, or its version for another platform."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gzip
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from ..core.ownership import make_private_folder
from ..errors import UsageError

OLDEST_UV = (0, 5)
"""Oldest usable version of a node's own uv. 0.5 has all the options of install.sh. Source: releases of uv."""
OLDEST_UV_FOR_LISTS = (0, 7)
"""Oldest version that installs a pylock.toml and ties packages to an index. Source: releases of uv, 0.6.15."""
_FETCH_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class ClientUv:
    path: str
    version: str


@functools.cache
def client_uv() -> ClientUv | None:
    """Return the uv of this environment (extra `ssh`), or else the one on PATH; None if there is none."""
    path = _find()
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    words = done.stdout.split()
    return ClientUv(path=path, version=words[1]) if done.returncode == 0 and len(words) > 1 else None


def client_uv_version() -> str:
    uv = client_uv()
    return uv.version if uv else "none"


def _find() -> str | None:
    with contextlib.suppress(ImportError, FileNotFoundError):  # uv is not a package of this Python
        from uv import find_uv_bin

        return str(find_uv_bin())
    return shutil.which("uv")


def packed_uv(uv: ClientUv, *, system: str, machine: str, libc: str) -> str | None:
    """Return the local path of a uv for that platform, compressed with gzip; None if none is available.

    The file is in the user's cache folder. If that is not writable, each process makes its own. Blocks for up to a
    second to compress, and longer to get the binary of another platform from an index.
    """
    kind = "gnu" if libc.startswith("glibc") else libc
    if system != "Linux" or kind not in ("gnu", "musl"):
        return None
    folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "skyward", "client")
    name = f"uv-{uv.version}-{machine}-{kind}.gz"
    cached = os.path.join(folder, name)
    if not _can_be_used(folder):
        folder = _of_this_process()
        cached = os.path.join(folder, name)
    if os.path.exists(cached):
        return cached
    with tempfile.TemporaryDirectory(dir=folder) as work:
        source = uv.path if _is_like_here(machine, kind) else _fetched(uv, f"{machine}-unknown-linux-{kind}", work)
        if source is None:
            return None
        packed = os.path.join(work, "uv.gz")
        # Level 1 takes 0.5 s for the binary's 40 MB. Better levels take 3 s for hardly smaller files.
        with open(source, "rb") as binary, gzip.open(packed, "wb", compresslevel=1) as out:
            shutil.copyfileobj(binary, out, 1 << 20)
        os.replace(packed, cached)
    return cached


def _can_be_used(folder: str) -> bool:
    try:
        make_private_folder(folder)
    except (OSError, UsageError):  # nodes run the binary, so it must never come from another user's folder
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@functools.cache
def _of_this_process() -> str:
    folder = tempfile.mkdtemp(prefix="skyward-uv-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _is_like_here(machine: str, kind: str) -> bool:
    here = "gnu" if platform.libc_ver()[0] == "glibc" else "musl"
    return sys.platform == "linux" and platform.machine() == machine and here == kind


def _fetched(uv: ClientUv, triple: str, work: str) -> str | None:
    target = os.path.join(work, "wheel")
    command = [uv.path, "pip", "install", "--quiet", "--no-deps", "--target", target, "--python", sys.executable]
    command += ["--python-platform", triple, "--only-binary", ":all:", f"uv=={uv.version}"]
    with contextlib.suppress(subprocess.TimeoutExpired):  # no index answers, so the node must have a uv
        done = subprocess.run(command, capture_output=True, timeout=_FETCH_LIMIT_S, check=False)
        binary = os.path.join(target, "bin", "uv")
        if done.returncode == 0 and os.path.exists(binary):
            return binary
    return None
