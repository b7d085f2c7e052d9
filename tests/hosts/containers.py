"""Container runtime for tests: podman with storage of its own, and an image of the hosts' Debian."""

from __future__ import annotations

import io
import os
import resource
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.hosts.base import base
from tests.hosts.fixtures import REQUIRE, require_hosts

__all__ = ["IMAGE", "Podman", "software_of_podman"]

IMAGE = "localhost/skyward-test:1"
_PARTS = (
    "bin",
    "lib",
    "lib64",
    "etc/passwd",
    "etc/group",
    "etc/alternatives",
    "tmp",
    "usr/bin",
    "usr/lib",
    "usr/lib64",
    "usr/sbin",
    "sbin",
)


class Podman:
    """podman whose images and containers are in a folder of the test. `options` belong into sshd's configuration."""

    def __init__(self, folder: Path) -> None:
        require_hosts()
        if shutil.which("podman") is None:
            if os.environ.get(REQUIRE):
                pytest.fail(f"podman is not installed, and {REQUIRE} is set", pytrace=False)
            pytest.skip("no podman here: install podman and runc")
        self.storage = folder / "storage.conf"
        self.storage.write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/images"\nrunroot = "{folder}/run"\n'
        )
        # podman raises limits by default, which even root may not do everywhere.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = [f"nofile={soft}:{hard}", "nproc=4096:4096"]
        self.settings = folder / "containers.conf"
        self.settings.write_text(
            f'[containers]\ndefault_ulimits = {limits!r}\n[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n'
            'events_logger = "none"\n'
        )
        self.environment = {
            "CONTAINERS_STORAGE_CONF": str(self.storage),
            "CONTAINERS_CONF": str(self.settings),
        }

    @property
    def options(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.environment.items())

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            ["podman", *words], env={**os.environ, **self.environment}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def make_image(self, name: str = IMAGE, *, parts: tuple[str, ...] = _PARTS, without: str = "") -> None:
        """Import the parts of the hosts' Debian that a node needs, `without` one program."""
        root = base()
        there = [part for part in parts if os.path.lexists(root / part)]
        leave_out = [f"--exclude=usr/bin/{without}"] if without else []
        archive = subprocess.Popen(["tar", "-C", str(root), *leave_out, "-c", *there], stdout=subprocess.PIPE)
        with archive:
            done = subprocess.run(
                ["podman", "import", "-q", "-", name],
                stdin=archive.stdout,
                env={**os.environ, **self.environment},
                capture_output=True,
                text=True,
                check=False,
            )
        assert done.returncode == 0, done.stderr
        assert archive.returncode == 0

    def containers(self) -> list[str]:
        return self("ps", "-aq").split()

    def save(self, folder: Path, name: str = IMAGE) -> None:
        """Save an image as files: its manifest, and what that names by digest."""
        self("save", "--format=docker-dir", "-q", "-o", str(folder), name)


_PROGRAMS = ("podman", "conmon", "crun", "newuidmap", "newgidmap")
_SETTINGS = {
    # systemd-nspawn's hosts have no keyrings, and let root alone raise limits.
    "etc/containers/containers.conf": (
        '[containers]\nkeyring = false\ndefault_ulimits = ["nofile=1024:4096", "nproc=4096:4096"]\n'
        '[engine]\nruntime = "crun"\ncgroup_manager = "cgroupfs"\nevents_logger = "none"\n'
    ),
    "etc/containers/storage.conf": '[storage]\ndriver = "vfs"\n',
    "etc/containers/policy.json": '{"default": [{"type": "insecureAcceptAnything"}]}\n',
}


def software_of_podman(archive: Path, *, registry: str) -> None:
    """Write an archive with this machine's podman for a bare Debian, set to trust a registry without TLS."""
    lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
    if lacking:
        if os.environ.get(REQUIRE):
            pytest.fail(f"{', '.join(lacking)}: not installed, and {REQUIRE} is set", pytrace=False)
        pytest.skip(f"{', '.join(lacking)}: not installed; install podman, crun and uidmap")
    programs = [str(shutil.which(program)) for program in _PROGRAMS]
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    libraries = {word for line in listed.splitlines() for word in line.split() if word.startswith("/lib/")}
    missing = sorted(path for path in libraries if not os.path.exists(base() / path[1:]))
    trusted = f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n'
    with tarfile.open(archive, "w") as tar:
        for path in programs:
            tar.add(path, path[1:])
        for path in missing:
            tar.add(os.path.realpath(path), f"usr{path}")  # /lib is a link there
        for name, text in {**_SETTINGS, "etc/containers/registries.conf": trusted}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
