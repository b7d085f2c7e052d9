"""A package index on the bed's network: wheels for hosts that reach nothing else.

The wheels are downloaded once, with pip as it is configured here, in the installed versions. They stay in the cache
folder in another form: not compressed, with the compiled modules of this environment, and without the files that only
developers use. Otherwise each host decompresses and compiles them again: the tests of the main job took 168 s of
processor time instead of 133. Of the 22,000 files of torch's and its dependencies', 12,000 are headers and tests.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import socketserver
import subprocess
import sys
import sysconfig
import zipfile
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import quote, unquote

from tests.hosts.base import made_once
from tests.hosts.bed import ROOT, Bed

__all__ = ["PackageIndex", "ray_wheels", "s3_wheels", "torch_wheels", "wheels"]

# Packages that the examples import. skyward is not among them: the client takes its own build to the nodes.
PACKAGES = ("cloudpickle", "xxhash", "numpy", "joblib", "scikit-learn", "threadpoolctl", "setuptools", "pytest")
DEBIAN_PACKAGE = "skyward-tests-hello"
_OF_DEVELOPERS = re.compile(r"torch/(include/|test/|bin/(?!torch_shm_manager))|.*/tests/")


class PackageIndex:
    """Server of wheels, and of one Debian package, for the hosts. `close` ends it.

    `simple` is for `--index-url` (PEP 503, with the metadata beside the wheels), `find_links` for `--find-links`.
    """

    def __init__(self, bed: Bed, *, with_torch: bool = False, with_s3: bool = False, with_ray: bool = False) -> None:
        self.extra = bed.folder / "wheels"
        self.extra.mkdir(exist_ok=True)
        self.requests_file = bed.folder / "requests"
        more = ((with_torch, torch_wheels), (with_s3, s3_wheels), (with_ray, ray_wheels))
        folders = [self.extra, wheels(), *(folder() for is_wanted, folder in more if is_wanted)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.index", bed.address, self.requests_file, _debian(), *folders],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        bed.own(self._process)
        assert self._process.stdout is not None
        self.url = f"http://{bed.address}:{int(self._process.stdout.readline())}"
        self.simple = f"{self.url}/simple/"
        self.find_links = f"{self.url}/links/"
        self.apt_source = f"deb [trusted=yes] {self.url}/apt ./"
        """A line for a host's /etc/apt/sources.list: then apt-get update, and install of DEBIAN_PACKAGE, work there."""

    def add(self, wheel: Path) -> None:
        """Serve this wheel too, until the session ends."""
        shutil.copy(wheel, self.extra)

    def requests(self) -> list[str]:
        """Return the requested paths so far."""
        return self.requests_file.read_text().splitlines() if self.requests_file.exists() else []

    def close(self) -> None:
        """End it. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def wheels() -> Path:
    """Return the folder with the wheels of `PACKAGES` and their dependencies: about 70 MB, downloaded once."""
    return _downloaded("wheels", PACKAGES)


def torch_wheels() -> Path:
    """Return the folder with the wheels of torch as it is installed here, and its dependencies.

    The CPU's build has 250 MB.

    If torch came from an index that pip is not configured for, name it as for `make`: TORCH_PIP_ARGS.
    """
    return _downloaded("torch", ["torch"], shlex.split(os.environ.get("TORCH_PIP_ARGS", "")))


def s3_wheels() -> Path:
    """Return the folder with the wheels of s3fs and its dependencies."""
    return _downloaded("s3", ["s3fs"])


def ray_wheels() -> Path:
    """Return the folder with the wheels of Ray and its dependencies: 79 MB as downloaded."""
    return _downloaded("ray", ["ray"])


def _downloaded(name: str, packages: tuple[str, ...] | list[str], options: list[str] | None = None) -> Path:
    wanted = [f"{package}=={importlib.metadata.version(package)}" for package in packages]
    constraints = ROOT / "constraints.txt"
    parts = [
        *wanted,
        constraints.read_text(),
        platform.python_version(),
        platform.machine(),
        "compiled",
        _OF_DEVELOPERS.pattern,
    ]
    recipe = "\n".join(parts)

    def download(target: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "-q"]
        only = ["--only-binary", ":all:", "-c", str(constraints), "-d", str(target)]
        done = subprocess.run(
            [*pip, *only, *(options or []), *wanted], capture_output=True, text=True, check=False, timeout=1800
        )
        if done.returncode:
            raise RuntimeError(f"pip could not download {' '.join(wanted)}:\n{done.stderr[-4000:]}")
        for wheel in target.glob("*.whl"):
            _make_ready(wheel)

    return made_once(f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}", download)


def _make_ready(wheel: Path) -> None:
    """Store the files of a wheel without compression, with compiled modules, and without those of developers."""
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as packed, zipfile.ZipFile(new, "w", zipfile.ZIP_STORED) as stored:
        *files, record = sorted(packed.namelist(), key=lambda name: name.endswith(".dist-info/RECORD"))
        lines = [line for line in packed.read(record).decode().splitlines() if not _OF_DEVELOPERS.match(line)]
        for name in files:
            if _OF_DEVELOPERS.match(name):
                continue
            content = packed.read(name)
            stored.writestr(packed.getinfo(name), content, zipfile.ZIP_STORED)
            if compiled := _compiled(name, content):
                stored.writestr(*compiled)
                digest = base64.urlsafe_b64encode(hashlib.sha256(compiled[1]).digest()).rstrip(b"=").decode()
                lines.append(f"{compiled[0]},sha256={digest},{len(compiled[1])}")
        stored.writestr(packed.getinfo(record), "\n".join([*lines, ""]), zipfile.ZIP_STORED)
    new.replace(wheel)


def _compiled(name: str, source: bytes) -> tuple[str, bytes] | None:
    """Return path and content of a module's compiled file, if the same module is compiled here.

    It is valid for any time of its source (PEP 552, an unchecked hash), because an installer sets times as it likes.
    """
    here = Path(sysconfig.get_path("purelib"), name)
    file = Path(importlib.util.cache_from_source(str(here)))
    if here.suffix != ".py" or not file.is_file() or here.read_bytes() != source:
        return None
    header = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source)
    return str(file.relative_to(sysconfig.get_path("purelib"))), header + file.read_bytes()[16:]


def _debian() -> Path:
    """Return a folder that apt takes for a repository, with one small package."""
    control = (
        f"Package: {DEBIAN_PACKAGE}\nVersion: 1.0\nArchitecture: all\n"
        "Maintainer: tests <tests@example.invalid>\nDescription: says hello\n"
    )

    def make(target: Path) -> None:
        tree = target / "tree"
        (tree / "DEBIAN").mkdir(parents=True)
        (tree / "DEBIAN/control").write_text(control)
        program = tree / "usr/bin" / DEBIAN_PACKAGE
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\necho hello from a package\n")
        program.chmod(0o755)
        package = target / f"{DEBIAN_PACKAGE}.deb"
        build = ["dpkg-deb", "--root-owner-group", "--build", str(tree), str(package)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(tree)
        content = package.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        listed = f"{control}Filename: ./{package.name}\nSize: {len(content)}\nSHA256: {digest}\n"
        (target / "Packages").write_text(listed)
        (target / "Packages.gz").write_bytes(gzip.compress(listed.encode()))

    return made_once(f"apt-{hashlib.sha256(control.encode()).hexdigest()[:16]}", make)


# The server is a separate process, or it would block the tests while it sends.


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments: object, seen: Path, apt: Path, folders: list[Path]) -> None:
        self.seen, self.apt, self.folders = seen, apt, folders
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        with self.seen.open("a") as seen:
            seen.write(f"{self.path}\n")
        match self.path.strip("/").split("/"):
            case ["simple"]:
                self._page([(f"/simple/{name}/", name, "") for name in sorted(self._projects())])
            case ["simple", name] if name in self._projects():
                self._page([_link(wheel) for wheel in self._projects()[name]])
            case ["links"]:
                self._page([_link(wheel) for wheels in self._projects().values() for wheel in wheels])
            case ["wheels", name]:
                self._wheel(name)
            case ["apt", *path] if (self.apt / path[-1]).is_file():
                self._file(self.apt / path[-1])
            case _:
                self.send_error(HTTPStatus.NOT_FOUND)

    def _projects(self) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for wheel in sorted(path for folder in self.folders for path in folder.glob("*.whl")):
            found.setdefault(re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower(), []).append(wheel)
        return found

    def _wheel(self, name: str) -> None:
        wanted, is_metadata = unquote(name).removesuffix(".metadata"), name.endswith(".metadata")
        wheel = next((folder / wanted for folder in self.folders if (folder / wanted).is_file()), None)
        if wheel is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        elif is_metadata:
            with zipfile.ZipFile(wheel) as packed:
                inside = next(path for path in packed.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", path))
                self._send(packed.read(inside), "text/plain")
        else:
            self._file(wheel)

    def _page(self, links: list[tuple[str, str, str]]) -> None:
        lines = [f'<a href="{target}"{more}>{text}</a><br>' for target, text, more in links]
        self._send(f"<!DOCTYPE html><html><body>{''.join(lines)}</body></html>".encode(), "text/html")

    def _file(self, path: Path) -> None:
        with path.open("rb") as file:
            self._head(path.stat().st_size, "application/octet-stream")
            if self.command == "GET":
                self.wfile.flush()
                self.connection.sendfile(file)

    def _send(self, content: bytes, kind: str) -> None:
        self._head(len(content), kind)
        if self.command == "GET":
            self.wfile.write(content)

    def _head(self, size: int, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Log nothing: `requests` holds the requested paths."""


def _link(wheel: Path) -> tuple[str, str, str]:
    return f"/wheels/{quote(wheel.name)}", wheel.name, ' data-dist-info-metadata="true" data-core-metadata="true"'


class _Server(socketserver.ThreadingTCPServer):  # HTTPServer would look its own name up, where nothing answers
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128


def _serve(address: str, seen: str, apt: str, *folders: str) -> None:
    handler = partial(_Handler, seen=Path(seen), apt=Path(apt), folders=[Path(folder) for folder in folders])
    with _Server((address, 0), handler) as server:
        print(json.dumps(server.server_address[1]), flush=True)
        server.serve_forever()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
