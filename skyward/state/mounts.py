"""Mounts of volumes: the program that mounts each kind, and the end of a mount whose program is dead.

A program puts itself into the background below the node's watchdog, and dies with the node. The kernel keeps a dead
mount in its table, so `unmount` follows. The command lines are those of the programs' own documentation:

    s3fs       https://github.com/s3fs-fuse/s3fs-fuse/blob/master/doc/man/s3fs.1.in
    mount-s3   https://github.com/awslabs/mountpoint-s3/blob/main/doc/CONFIGURATION.md
    gcsfuse    https://cloud.google.com/storage/docs/cloud-storage-fuse/cli-options
    blobfuse2  https://github.com/Azure/azure-storage-fuse#cli-parameters
    mount      nfs(5)
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..core.records import dataclass
from ..errors import VolumeFailed

if TYPE_CHECKING:  # every watchdog of a node with volumes imports this module
    from ..values.volume import Volume

_DEVICE = "/dev/fuse"
_LIMIT_S = 60.0
"""Longest time that a program may take to mount, in seconds."""
_CACHE_S = 60
"""Seconds for which s3fs may believe what it has seen of a file; its own default is 900."""
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8
"""Source: linux/fs.h and mount(2)."""


@dataclass(frozen=True)
class _Origin:
    """Place of a volume's files. `path` has no slash at either end."""

    host: str
    path: str
    is_writable: bool


@dataclass(frozen=True)
class _Mounter:
    """Program that mounts volumes. `command` returns its arguments for an origin and a folder."""

    program: str
    command: Callable[[_Origin, str], list[str]]


def _s3_endpoint() -> str:
    """Return the address of a store that is not Amazon's, from the variables that its own clients read."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _mount_s3(origin: _Origin, folder: str) -> list[str]:
    prefix = ["--prefix", f"{origin.path}/"] if origin.path else []
    other = ["--endpoint-url", _s3_endpoint(), "--force-path-style"] if _s3_endpoint() else []
    return [origin.host, folder, "--read-only", *prefix, *other]


def _s3fs(origin: _Origin, folder: str) -> list[str]:
    options = ["ro", "umask=0077", f"stat_cache_expire={_CACHE_S}"]
    if _s3_endpoint():
        options += [f"url={_s3_endpoint()}", "use_path_request_style"]
    return [f"{origin.host}:/{origin.path}" if origin.path else origin.host, folder, "-o", ",".join(options)]


def _gcsfuse(origin: _Origin, folder: str) -> list[str]:
    return ["--implicit-dirs", "-o", "ro", *(["--only-dir", origin.path] if origin.path else []), origin.host, folder]


def _blobfuse2(origin: _Origin, folder: str) -> list[str]:
    part = [f"--subdirectory={origin.path}"] if origin.path else []
    # Blocks are cached in memory. Whole files would fill the disk of the node.
    fixed = ["--read-only", "--block-cache", "--virtual-directory=true"]
    return ["mount", folder, f"--container-name={origin.host}", *part, *fixed]


def _nfs(origin: _Origin, folder: str) -> list[str]:
    # A soft mount gives up when the server is away. Only a hard one, the default, is safe for what tasks write.
    options = "rw,nosuid,nodev,retry=0" if origin.is_writable else "ro,nosuid,nodev,retry=0,soft"
    return ["-t", "nfs", "-o", options, f"{origin.host}:/{origin.path}", folder]


_S3 = (_Mounter("mount-s3", _mount_s3), _Mounter("s3fs", _s3fs))
_GCS = (_Mounter("gcsfuse", _gcsfuse),)
_AZURE = (_Mounter("blobfuse2", _blobfuse2),)
_MOUNTERS = {
    "s3": _S3,
    "s3a": _S3,
    "gs": _GCS,
    "gcs": _GCS,
    "az": _AZURE,
    "abfs": _AZURE,
    "nfs": (_Mounter("mount", _nfs),),
}
_NAMES_OF_AZURE = {
    "AZURE_STORAGE_ACCOUNT": "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCESS_KEY": "AZURE_STORAGE_ACCOUNT_KEY",
}
"""Variables of blobfuse2, and those from which fsspec's client reads the same."""


def can_mount(volume: Volume) -> bool:
    """Return whether this machine has FUSE and a program that mounts this object store."""
    is_allowed = os.geteuid() == 0 or _fusermount() is not None
    return os.access(_DEVICE, os.R_OK | os.W_OK) and is_allowed and _mounter_of(volume) is not None


def mount(volume: Volume, folder: str) -> None:
    """Mount a volume on an empty folder. The mount of a dead program there is unmounted first.

    The program reads the credentials from this process's variables.

    Raises:
        VolumeFailed: There is no program for this store, or it failed. The message has its own words.
    """
    mounter = _mounter_of(volume)
    if mounter is None:
        programs = " or ".join(mounter.program for mounter in _MOUNTERS.get(_scheme(volume), ()))
        advice = f"install {programs} on the node, or leave mount=True out" if programs else "leave mount=True out"
        raise VolumeFailed(f"{volume.source}: no program on the node can mount it; {advice}", retryable=False)
    unmount(folder)
    host, _, path = volume.source.partition("://")[2].partition("/")
    origin = _Origin(host, path.strip("/"), volume.read_only is False)
    words = _words_of([mounter.program, *mounter.command(origin, folder)])
    try:
        os.stat(folder)  # FUSE programs go to the background first, and look for the bucket then
    except OSError as error:
        words = words or f"it exited at once ({error.strerror})"
    if words is None and not is_mounted(folder):
        words = "it exited at once; the bucket or the credentials may be wrong"
    if words is not None:
        unmount(folder)
        advice = "run as root there, with nfs-common" if volume.is_nfs else "check /dev/fuse and the credentials"
        raise VolumeFailed(
            f"{volume.source}: {mounter.program} cannot mount it on the node: {words}; {advice}", retryable=False
        )


def is_mounted(folder: str) -> bool:
    """Return whether something is mounted on a folder, dead or alive."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            # Format: id parent major:minor root FOLDER options ... Blanks in it are written as \040.
            return any(_unescaped(line.split(" ", 5)[4]) == folder for line in file)
    except OSError:  # not Linux
        return os.path.ismount(folder)


def is_dead(folder: str) -> bool:
    """Return whether the program behind the mount on a folder has died."""
    try:
        os.statvfs(folder)  # the kernel remembers for a second what `stat` returned
    except OSError as error:
        return error.errno == errno.ENOTCONN
    return False


def unmount(folder: str) -> None:
    """Unmount all that is mounted on a folder, also where files are in use or a program is dead. Idempotent.

    Raises:
        OSError: The system refuses it. Nothing below the folder may be deleted then.
    """
    while is_mounted(folder):
        if os.geteuid() == 0:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.umount2(os.fsencode(folder), _MNT_DETACH | _UMOUNT_NOFOLLOW) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), folder)
        else:
            program = _fusermount() or "fusermount3"
            subprocess.run([program, "-u", "-z", folder], capture_output=True, timeout=_LIMIT_S, check=True)


def _words_of(command: list[str]) -> str | None:
    """Run a program until it is in the background. Return None, or why it failed."""
    variables = {new: os.environ[old] for new, old in _NAMES_OF_AZURE.items() if old in os.environ}
    # A file, because the background process would keep a pipe open. A session of its own, as it outlives this slot.
    with tempfile.TemporaryFile() as output:
        try:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**variables, **os.environ},
                start_new_session=True,
                timeout=_LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"it took longer than {_LIMIT_S:.0f} s"
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        if code == 0:
            return None
        output.seek(0)
        lines = output.read().decode(errors="replace").split("\n")
        return " ".join([line.strip() for line in lines if line.strip()][-3:]) or f"it exited with code {code}"


def _scheme(volume: Volume) -> str:
    return volume.source.partition("://")[0]


def _mounter_of(volume: Volume) -> _Mounter | None:
    mounters = _MOUNTERS.get(_scheme(volume), ())
    return next((mounter for mounter in mounters if shutil.which(mounter.program)), None)


def _fusermount() -> str | None:
    return shutil.which("fusermount3") or shutil.which("fusermount")


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
