"""Locks and indexes of packages on a node: exact versions by hash, and each package from its own index."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

import skyward as sky
from skyward.bootstrap.preflight import preflight
from skyward.bootstrap.prepare import prepare
from skyward.bootstrap.uv import client_uv
from skyward.errors import BootstrapFailed
from skyward.events import Event, ignore
from tests.bootstrap.packages import Index, make_wheel, serve
from tests.bootstrap.scratch import ScratchNode

VERSIONS = "import importlib.metadata as m; print(*sorted(f'{d.name}=={d.version}' for d in m.distributions()))"


def installed(node: ScratchNode, image: sky.Image, events: list[Event] | None = None) -> list[str]:
    """Prepare the node, and return the packages of the user's environment there."""
    ready = prepare(node, image, emit=ignore if events is None else events.append, node=0, folder="test-0")
    return subprocess.run([ready.python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def project(tmp_path: Path, index: Index) -> Path:
    """Return the folder of a locked project: beta (which needs alpha<2), skyward, and a member of its workspace."""
    folder = tmp_path / "project"
    (folder / "tools").mkdir(parents=True)
    head = '[project]\nversion = "0"\nrequires-python = ">=3.11"\n'
    (folder / "pyproject.toml").write_text(
        f"{head}name = 'app'\ndependencies = ['beta', 'skyward', 'tools', 'alpha; sys_platform == \"win32\"']\n"
        "[project.optional-dependencies]\nmore = ['wants_ours']\n[dependency-groups]\ndev = ['wants_ours']\n"
        "[tool.uv.workspace]\nmembers = ['tools']\n[tool.uv.sources]\ntools = { workspace = true }\n"
    )
    (folder / "tools" / "pyproject.toml").write_text(f"{head}name = 'tools'\n")
    lock(folder, index)
    return folder


def lock(folder: Path, index: Index) -> None:
    uv = client_uv()
    assert uv is not None
    env = {**os.environ, "UV_DEFAULT_INDEX": index.url}
    subprocess.run([uv.path, "lock", "-q", "--no-cache"], cwd=folder, env=env, check=True)


def test_a_uv_lock_is_installed_exactly_without_the_project_and_skyward(
    scratch: ScratchNode, project: Path, index: Index
) -> None:
    make_wheel(index.folder, "alpha", "1.5", "VALUE = 1.5")  # newer than the lock, and beta would take it
    try:
        image = sky.Image(lock=project / "uv.lock")
        assert preflight(image, None) == []
        assert installed(scratch, image) == ["alpha==1.0", "beta==1.0"]
        scratch.commands.clear()
        assert installed(scratch, image) == ["alpha==1.0", "beta==1.0"]
        assert len(scratch.commands) == 1, "the same lock is the same environment"
        subprocess.run(["rm", project / "uv.lock"], check=True)
        lock(project, index)
        assert installed(scratch, sky.Image(lock=project / "uv.lock")) == ["alpha==1.5", "beta==1.0"]
    finally:
        (index.folder / "alpha-1.5-py3-none-any.whl").unlink()


def test_a_file_that_differs_from_the_lock_s_hash_is_refused(
    scratch: ScratchNode, index: Index, tmp_path: Path
) -> None:
    digest = hashlib.sha256((index.folder / "alpha-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    file = tmp_path / "requirements.txt"
    file.write_text(f"alpha==1.0 \\\n    --hash=sha256:{digest}\nskyward==9.0 --hash=sha256:{digest}\n")
    assert installed(scratch, sky.Image(lock=file, pip_index_url=index.url)) == ["alpha==1.0"]
    url = index.url.removesuffix("/simple")
    wheel = f'url = "{url}/files/alpha-1.0-py3-none-any.whl", hashes = {{ sha256 = "{digest[::-1]}" }}'
    head = 'lock-version = "1.0"\ncreated-by = "test"\n[[packages]]\nname = "alpha"\nversion = "1.0"\n'
    for name, text in {
        "requirements.txt": f"alpha==1.0 --hash=sha256:{digest[::-1]}\n",
        "pylock.toml": f"{head}wheels = [{{ {wheel} }}]\n",
    }.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(BootstrapFailed, match=r"(?i)hash"):
            installed(scratch, sky.Image(lock=tmp_path / name, pip_index_url=index.url))


def test_named_packages_come_from_their_index_only_and_others_never(
    scratch: ScratchNode, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    make_wheel(folder, "alpha", "0.5", "")  # older than the public ones
    make_wheel(folder, "beta", "7.0", "")  # newer than the public one
    monkeypatch.setenv("PIP_TOKEN", "correct-horse")
    with serve(folder, login="me:correct-horse") as private:
        own = sky.PipIndex(private.url, packages=["alpha"], username="me", password=sky.Secret("PIP_TOKEN"))
        image = sky.Image(pip=["beta", "alpha>=0.1"], pip_index_url=index.url, pip_indexes=[own])
        assert preflight(image, None) == []
        events: list[Event] = []
        assert installed(scratch, image, events) == ["alpha==0.5", "beta==1.0"]
        assert not any("/beta/" in request for request in private.requests)
        in_url = sky.PipIndex(private.url.replace("//", "//me:wrong-password@"), packages=["Alpha"])
        scratch.folder = tmp_path / "other"
        scratch.__post_init__()
        with pytest.raises(BootstrapFailed) as refused:
            installed(scratch, sky.Image(pip=["beta"], pip_index_url=index.url, pip_indexes=[in_url]), events)
        absent = sky.PipIndex(private.url, packages=["wants-ours"], username="me", password=sky.Secret("PIP_TOKEN"))
        with pytest.raises(BootstrapFailed, match="wants-ours"):  # the default index has it
            installed(scratch, sky.Image(pip_index_url=index.url, pip_indexes=[absent]), events)
    for secret in ("correct-horse", "wrong-password"):
        assert secret not in f"{refused.value}{vars(refused.value)}{events}{scratch.commands}"
        left = subprocess.run(["grep", "-rl", secret, tmp_path], capture_output=True, text=True, check=False)
        assert left.stdout == ""
