"""The Debian that every host boots: made once with mmdebstrap, kept in the cache folder, never written to."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from skyward.engine.ray.settings import RAY_VERSION

__all__ = [
    "CACHE",
    "USERS",
    "USERS_RAY",
    "USERS_RAYS",
    "base",
    "clock_library",
    "layer_of_uv",
    "layers_of_ray",
    "made_once",
    "missing",
    "users_python",
]

_VARIABLE = "SKYWARD_TESTS_BASE"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyward-tests"

USERS_RAY = "2.50.1"
"""Version of the Ray that users have: the oldest that skyward supports."""
USERS_RAYS = (USERS_RAY, RAY_VERSION)
"""All such versions on hosts: the newest is that of skyward's own."""
_EXTRAS = "data,default,train,tune"

# The packages of a user's machine, and no more: no pip, no venv, no compiler.
PACKAGES = (
    "ca-certificates",
    "curl",
    "dbus",
    "iproute2",
    "openssh-server",
    "procps",
    "python3",
    "sudo",
    "systemd",
    "systemd-sysv",
)
USERS = ("dev", "ubuntu", "admin", "ec2-user")
"""Ordinary users with sudo and no password; the last three as on the images of EC2."""

_PREPARE = f"""set -e
rm -f /etc/hostname /etc/ssh/ssh_host_* /etc/machine-id
: > /etc/machine-id
for user in {" ".join(USERS)}; do
    useradd --create-home --shell /bin/bash "$user"
    echo "$user ALL=(ALL) NOPASSWD:ALL" > "/etc/sudoers.d/$user"
    chmod 0440 "/etc/sudoers.d/$user"
done
printf 'UseDNS no\\nMaxStartups 100\\n' > /etc/ssh/sshd_config.d/tests.conf
rm -f /etc/resolv.conf /etc/apt/sources.list
: > /etc/resolv.conf
systemctl mask -q systemd-networkd.service systemd-resolved.service apt-daily.timer apt-daily-upgrade.timer \\
    console-getty.service e2scrub_all.timer fstrim.timer dpkg-db-backup.timer systemd-timesyncd.service \\
    systemd-tmpfiles-clean.timer
"""

# (command, Debian package) that the test bed needs on this machine.
_NEEDED = (
    ("mmdebstrap", "mmdebstrap"),
    ("systemd-nspawn", "systemd-container"),
    ("cc", "gcc"),
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("ssh", "openssh-client"),
    ("ssh-keygen", "openssh-client"),
    ("sshd", "openssh-server"),
    ("nsenter", "util-linux"),
)


def missing() -> list[str]:
    """Return the Debian packages that are required to make hosts and are not installed here."""
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin"
    return sorted({package for command, package in _NEEDED if not shutil.which(command, path=path)})


def base() -> Path:
    """Return the folder of the base, made if need be. That takes half a minute if its packages can be downloaded.

    Several processes may call it: one makes the base, the others wait. The children of a process that has called it do
    not ask apt again, which takes half a second. Raises RuntimeError with the output of mmdebstrap.
    """
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = str(_base())
    return Path(os.environ[_VARIABLE])


def _base() -> Path:
    recipe = "\n".join([platform.machine(), *_mirrors(), *PACKAGES, _PREPARE])
    return made_once(f"base-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}", _make)


def clock_library() -> Path:
    """Return the library that makes a host's clock wrong, compiled if need be."""
    source = Path(__file__).parent / "clock.c"
    digest = hashlib.sha256(source.read_bytes() + platform.machine().encode()).hexdigest()[:16]

    def make(target: Path) -> None:
        # Its symbols of the C library are resolved when it is loaded, so neither headers nor libraries are needed here.
        options = ["-O2", "-Wall", "-Werror", "-ffreestanding", "-fPIC", "-shared", "-nostdlib"]
        subprocess.run(["cc", *options, "-o", target / "clock.so", source], check=True)

    return made_once(f"clock-{digest}", make) / "clock.so"


def layer_of_uv() -> Path:
    """Return a folder with uv where an administrator installs it, to lie over the base."""
    uv = Path(sys.executable).parent / "uv"
    stamp = uv.stat()

    def make(target: Path) -> None:
        folder = target / "usr/local/bin"
        folder.mkdir(parents=True)
        shutil.copy(uv, folder)
        for path in (target, *folder.relative_to(target).parents):
            (target / path).chmod(0o755)

    return made_once(f"uv-{stamp.st_size}-{int(stamp.st_mtime)}", make)


def users_python(version: str) -> str:
    """Return the interpreter on hosts that has this version of Ray."""
    return f"/opt/ray-{version}/bin/python"


def layers_of_ray() -> list[Path]:
    """Return folders, each with an environment that has one of `USERS_RAYS`, to lie over the base: 500 MB each."""
    return [_layer_of_ray(version) for version in USERS_RAYS]


def _layer_of_ray(version: str) -> Path:
    constraints = Path(__file__).parent.parent.parent / "constraints.txt"
    others = re.sub(r"(?m)^ray==.*$", "", constraints.read_text())
    python = users_python(version)
    recipe = "\n".join([platform.python_version(), platform.machine(), python, _EXTRAS, others])

    def make(target: Path) -> None:
        environment = target / python.removeprefix("/").removesuffix("/bin/python")
        packages = environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (environment / "bin").mkdir(parents=True)
        (environment / "bin/python").symlink_to("/usr/bin/python3")
        (environment / "pyvenv.cfg").write_text("home = /usr/bin\n")
        (target / "constraints.txt").write_text(others)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
        only = ["--only-binary", ":all:", "-c", str(target / "constraints.txt"), "--target", str(packages)]
        wanted = [f"ray[{_EXTRAS}]=={version}"]
        done = subprocess.run([*pip, *only, *wanted], capture_output=True, text=True, check=False, timeout=1800)
        if done.returncode:
            raise RuntimeError(f"pip could not install {' '.join(wanted)}:\n{done.stderr[-4000:]}")
        (target / "constraints.txt").unlink()
        for path in (target, target / "opt"):
            path.chmod(0o755)

    return made_once(f"users-ray-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}", make)


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `name` of the cache. If it is missing, one process fills it by `make` and others wait."""
    target = CACHE / name
    if target.exists():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked(CACHE / f"{name}.lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=CACHE, prefix=f"{name}.") as staging:
                made = Path(staging) / "made"
                made.mkdir()
                make(made)
                made.rename(target)
    return target


def _make(target: Path) -> None:
    # It is unpacked in memory (25 s; on a disk, with its syncs, six times that) and then copied to the cache.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="skyward-tests-") as memory:
        root = Path(memory) / "root"
        command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
        done = subprocess.run(
            [*command, _suite(), str(root), *_mirrors()],
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
            env={**os.environ, "TMPDIR": memory},
        )
        if done.returncode == 0:
            done = subprocess.run(["chroot", root, "sh", "-c", _PREPARE], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the hosts' base was not made: {' '.join(command)}\n{done.stderr[-4000:]}")
        subprocess.run(["cp", "-a", f"{root}/.", target], check=True)


@functools.cache
def _mirrors() -> list[str]:
    """Return the lines of a sources.list, from this machine's own apt configuration."""
    found = _listed()
    if not found:  # a fresh machine may have no package lists yet
        CACHE.mkdir(parents=True, exist_ok=True)
        with _locked(CACHE / "apt.lock"):  # apt fails where another process has begun
            found = _listed()
            if not found:
                subprocess.run(["apt-get", "update", "-qq"], check=True, timeout=300)
                found = _listed()
    if not found:
        raise RuntimeError("apt has no Debian repository here, which the hosts' base is made from")
    return sorted(found)


def _listed() -> set[str]:
    shape = "$(CREATED_BY)|$(ORIGIN)|$(REPO_URI)|$(CODENAME)|$(COMPONENT)"
    listed = subprocess.run(["apt-get", "indextargets", "--format", shape], capture_output=True, text=True, check=True)
    rows = (line.split("|") for line in listed.stdout.splitlines())
    return {
        f"deb {uri} {codename} main"
        for created_by, origin, uri, codename, component in rows
        if created_by == "Packages" and origin == "Debian" and component == "main"
    }


def _suite() -> str:
    names = [line.split()[2] for line in _mirrors()]
    return min(names, key=len)  # bookworm, rather than bookworm-updates


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
