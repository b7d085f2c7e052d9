"""Wheels that skyward makes are valid: complete, reproducible, and of the running code."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import cloudpickle
import pytest

import skyward
from skyward.bootstrap.environments import Wheel, best_python, own_wheel, repacked, runs_on
from skyward.bootstrap.payload import LOADER
from skyward.bootstrap.uv import ClientUv, client_uv, packed_uv


def names_in(wheel: Wheel) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(wheel.content)).namelist()


def test_our_wheel_holds_every_file_that_the_package_needs() -> None:
    package = Path(skyward.__file__).parent
    names = set(names_in(own_wheel()))
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    missing = [path for path in files if f"skyward/{path.relative_to(package)}" not in names]
    assert not [path for path in missing if path.suffix != ".pyc"]


def test_our_wheel_is_the_same_in_every_process() -> None:
    code = "from skyward.bootstrap.environments import own_wheel; print(own_wheel().digest)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == own_wheel().digest


@pytest.mark.parametrize("project", ["", "cloudpickle", "xxhash"])
def test_every_hash_of_the_record_is_correct(project: str) -> None:
    wheel = repacked(project) if project else own_wheel()
    assert wheel is not None
    archive = zipfile.ZipFile(io.BytesIO(wheel.content))
    (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
    for line in archive.read(record).decode().splitlines():
        path, digest, size = line.rsplit(",", 2)
        if path != record:
            content = archive.read(path)
            encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={encoded}", len(content))


def test_wheels_made_here_can_be_installed_and_imported(tmp_path: Path) -> None:
    uv = client_uv()
    assert uv is not None
    for wheel in (own_wheel(), repacked("cloudpickle"), repacked("xxhash")):
        assert wheel is not None
        (tmp_path / wheel.filename).write_bytes(wheel.content)
    target = tmp_path / "site"
    command = [
        uv.path,
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--offline",
        "--python",
        sys.executable,
        "--target",
        str(target),
    ]
    subprocess.run([*command, *map(str, tmp_path.glob("*.whl"))], check=True)
    code = f"import sys; sys.path.insert(0, {str(target)!r})\n"
    code += "import cloudpickle, skyward, xxhash\nprint(skyward.__file__, cloudpickle.__version__)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert told.stdout.split() == [f"{target}/skyward/__init__.py", cloudpickle.__version__]


@pytest.mark.parametrize(
    ("tag", "machine", "libc", "runs"),
    [
        ("py3-none-any", "aarch64", "musl", True),
        ("cp311-cp311-manylinux_2_17_x86_64", "x86_64", "glibc2.36", True),
        ("cp311-cp311-manylinux_2_39_x86_64", "x86_64", "glibc2.36", False),
        ("cp311-cp311-manylinux_2_17_aarch64", "x86_64", "glibc2.36", False),
        ("cp311-cp311-manylinux_2_17_x86_64", "x86_64", "musl", False),
        ("cp311-cp311-musllinux_1_2_x86_64", "x86_64", "musl", True),
        ("cp311-cp311-musllinux_1_2_x86_64", "x86_64", "glibc2.36", False),
        ("cp311-cp311-linux_x86_64", "x86_64", "glibc2.36", False),  # built here: nobody knows against which libraries
        ("cp311-cp311-macosx_11_0_arm64", "aarch64", "glibc2.36", False),
    ],
)
def test_a_compiled_wheel_of_the_client_is_used_only_if_it_runs_there(
    tag: str, machine: str, libc: str, runs: bool
) -> None:
    assert runs_on(tag, machine, libc) is runs


def test_the_interpreter_has_the_minor_version_and_if_possible_the_patch_release() -> None:
    here = ".".join(map(str, sys.version_info[:3]))
    minor = here.rpartition(".")[0]
    found = [(f"{minor}.0", "/oldest"), (f"{minor}.99", "/newest"), ("3.99.1", "/other")]
    assert best_python([*found, (here, "/same")], minor) == "/same"
    assert best_python(found, minor) == "/newest"
    assert best_python(found, f"{minor}.0") == "/oldest"
    assert best_python(found, f"{minor}.5") == ""
    assert best_python(found, "3.98") == ""


def test_the_command_that_receives_files_is_one_line() -> None:
    assert "\n" not in LOADER  # csh has no strings of several lines


@pytest.mark.skipif(sys.platform != "linux", reason="the uv of another platform comes from an index")
def test_with_an_unwritable_cache_folder_each_process_has_its_own_uv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = tmp_path / "uv"
    binary.write_text("uv")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # neither by root
    uv = ClientUv(path=str(binary), version="0.0.0")
    libc = "glibc2.36" if platform.libc_ver()[0] == "glibc" else "musl"
    packed = packed_uv(uv, system="Linux", machine=platform.machine(), libc=libc)
    assert packed is not None
    assert gzip.decompress(Path(packed).read_bytes()) == b"uv"
    assert packed_uv(uv, system="Linux", machine=platform.machine(), libc=libc) == packed
