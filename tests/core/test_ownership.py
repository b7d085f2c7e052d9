"""Another user of the machine cannot interfere: no folder, file, link or repository of theirs is used."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.bootstrap.ignore import rules_above
from skyward.bootstrap.uv import client_uv, packed_uv
from skyward.core import ownership
from skyward.core.ownership import check_file, check_path, make_private_folder, runtime_folder
from skyward.errors import RendezvousFailed, UsageError
from skyward.node.slot.ports import PortLocks
from skyward.pool.config import pool_names
from skyward.providers.local import collect_garbage
from skyward.ssh import SSHTarget
from skyward.ssh.folder import make_folder
from skyward.ssh.login import configuration
from skyward.ssh.openssh import openssh
from skyward.state.journal import journals
from skyward.state.live import live_pools

STRANGER = 65534


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a temporary folder that everybody may write to, like /tmp. Only root can enter `tmp_path` of root."""
    with tempfile.TemporaryDirectory(prefix="sky-", dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        monkeypatch.setattr("tempfile.tempdir", folder)
        monkeypatch.delenv("SUDO_UID", raising=False)
        yield Path(folder)


def of_a_stranger(path: Path, content: str | None = None) -> Path:
    """Make a folder, or a file with this content, that belongs to another user."""
    if content is None:
        path.mkdir(mode=0o777)
    else:
        path.write_text(content)
    os.chown(path, STRANGER, STRANGER)
    return path


def test_a_folder_is_private_whatever_the_umask(shared: Path) -> None:
    before = os.umask(0)
    try:
        path = make_private_folder(str(shared / "parent" / "ours"))
    finally:
        os.umask(before)
    for made in (path, os.path.dirname(path)):
        assert stat.S_IMODE(os.stat(made).st_mode) == 0o700
    os.chmod(path, 0o755)
    make_private_folder(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    os.chmod(path, 0o777)
    with pytest.raises(UsageError, match="everybody may write to it"):
        make_private_folder(path)


def test_a_file_or_a_link_is_refused_as_folder(shared: Path) -> None:
    (shared / "file").touch()
    (shared / "target").mkdir(mode=0o700)
    (shared / "link").symlink_to(shared / "target")
    (shared / "broken").symlink_to(shared / "nothing")
    for name in ("file", "link", "broken"):
        with pytest.raises(UsageError, match=f"{name}: is a"):
            make_private_folder(str(shared / name))
    assert not (shared / "nothing").exists()


def test_a_shared_folder_without_the_sticky_bit_is_refused(shared: Path) -> None:
    shared.chmod(0o777)
    with pytest.raises(UsageError, match=r"chmod \+t"):
        make_private_folder(str(shared / "ours"))


@pytest.mark.root
def test_an_entry_of_another_user_in_a_shared_folder_is_refused_with_its_contents(shared: Path) -> None:
    theirs = of_a_stranger(shared / "theirs")
    (theirs / "ours").mkdir(mode=0o700)
    for path in (theirs, theirs / "ours", theirs / "nothing", theirs / "ours" / "deeper"):
        with pytest.raises(UsageError, match=f"{theirs}: belongs to"):
            check_path(str(path))
    (shared / "ours").symlink_to(theirs / "ours")  # our link into their folder
    with pytest.raises(UsageError, match=f"{theirs}: belongs to"):
        check_path(str(shared / "ours"))
    (shared / "theirs2").symlink_to(shared.parent)  # their link to our folder
    os.lchown(shared / "theirs2", STRANGER, STRANGER)
    with pytest.raises(UsageError, match="theirs2: belongs to"):
        check_path(str(shared / "theirs2"))


@pytest.mark.root
def test_a_path_that_the_user_trusts_explicitly_is_trusted(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = of_a_stranger(shared / "theirs.toml", "")
    with pytest.raises(UsageError) as refused:
        check_file(str(theirs), "configuration")
    (line,) = [part for part in str(refused.value).split("`") if "SKYWARD_TRUST" in part]
    name, _, value = line.removeprefix("export ").partition("=")
    monkeypatch.setenv(name, f"/elsewhere:{value}")
    check_file(str(theirs), "configuration")
    monkeypatch.setenv(name, str(shared))
    check_file(str(theirs), "configuration")
    monkeypatch.setenv(name, f"{theirs}2")
    with pytest.raises(UsageError):
        check_file(str(theirs), "configuration")


@pytest.mark.root
def test_root_by_sudo_may_use_files_of_the_calling_user(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = of_a_stranger(shared / "theirs.toml", "")
    monkeypatch.setenv("SUDO_UID", str(STRANGER))
    check_file(str(theirs), "configuration")


def test_a_world_writable_file_or_a_pipe_is_ignored(shared: Path) -> None:
    file = shared / "skyward.toml"
    file.touch()
    check_file(str(file), "configuration")
    file.chmod(0o666)
    with pytest.raises(UsageError, match="chmod o-w"):
        check_file(str(file), "configuration")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UsageError, match="not a regular file"):
        check_file(str(file), "configuration")


@pytest.mark.root
def test_other_users_trust_only_themselves_and_root(shared: Path) -> None:
    (shared / "of-root").touch(0o600)
    os.chown(of_a_stranger(shared / "of-another", ""), STRANGER - 1, STRANGER)
    child = os.fork()
    if child == 0:  # which never becomes root again
        os.setresuid(STRANGER, STRANGER, STRANGER)
        code = 1
        with contextlib.suppress(BaseException):
            check_file(str(shared / "of-root"), "configuration")
            os.environ["SUDO_UID"] = str(STRANGER - 1)  # anybody can set it
            with pytest.raises(UsageError, match="belongs to"):
                check_path(str(shared / "of-another"))
            make_private_folder(str(shared / "ours"))
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Places that check ownership ----------------------------------------------------------------------------------------


def lock_a_port() -> None:
    try:
        PortLocks("127.0.0.1").reserve()
    except RendezvousFailed as error:
        raise UsageError(str(error)) from error


@pytest.mark.root
@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("skyward", lambda: sky.Local().plan(sky.ComputePool(sky.Local()).spec, None, "pool")),  # type: ignore[arg-type]
        ("skyward", collect_garbage),
        ("skyward-ssh", make_folder),
        ("skyward-ports", lock_a_port),
    ],
)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_runtime_folder_of_another_user_is_refused(
    shared: Path, name: str, use: Callable[[], object], is_link: bool
) -> None:
    """Try their folder, and their link to a folder of this user, which `skyward gc` would empty."""
    path = shared / f"{name}-{os.getuid()}"
    precious = shared / "precious"
    (precious / "thesis").mkdir(parents=True, mode=0o700)
    precious.chmod(0o700)
    os.utime(precious / "thesis", (0, 0))
    if is_link:
        path.symlink_to(precious)
        os.lchown(path, STRANGER, STRANGER)
    else:
        of_a_stranger(path)
    with pytest.raises(UsageError, match="belongs to"):
        use()
    assert os.listdir(precious) == ["thesis"]
    assert is_link or not os.listdir(path)


def test_garbage_collection_follows_no_link(shared: Path) -> None:
    (shared / "precious").mkdir(mode=0o700)
    (shared / "precious" / "thesis").mkdir()
    os.utime(shared / "precious" / "thesis", (0, 0))
    (shared / f"skyward-{os.getuid()}").symlink_to(shared / "precious")
    with pytest.raises(UsageError, match="is a"):
        collect_garbage()
    assert os.listdir(shared / "precious") == ["thesis"]


@pytest.mark.root
@pytest.mark.parametrize("use", [live_pools, journals])
def test_state_of_another_user_is_not_read(
    shared: Path, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a_stranger(shared / "state")
    monkeypatch.setenv("XDG_STATE_HOME", str(shared / "state"))
    with pytest.raises(UsageError, match="belongs to"):
        use()


@pytest.mark.root
def test_uv_of_another_user_is_not_sent_to_nodes(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = client_uv()
    if uv is None:
        pytest.skip("there is no uv here")
    planted = of_a_stranger(shared / "cache") / "skyward" / "client"
    planted.mkdir(parents=True)
    machine = os.uname().machine
    (planted / f"uv-{uv.version}-{machine}-gnu.gz").write_text("evil")
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
    packed = packed_uv(uv, system="Linux", machine=machine, libc="glibc2.36")
    assert packed is not None
    assert not packed.startswith(str(shared / "cache"))


@pytest.mark.root
def test_a_project_file_of_another_user_is_refused_with_the_line_that_trusts_it(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git's CVE-2022-24765: a repository above the working folder that belongs to somebody who may write there."""
    (shared / "work" / "deep").mkdir(parents=True)
    monkeypatch.chdir(shared / "work" / "deep")
    of_a_stranger(shared / ".git")
    theirs = of_a_stranger(shared / "skyward.toml", '[pools.theirs]\nprovider = "local"\n')
    with pytest.raises(UsageError, match=f"SKYWARD_TRUST={theirs}"):
        pool_names()
    monkeypatch.setenv("SKYWARD_TRUST", str(theirs))
    assert "theirs" in pool_names()


@pytest.mark.root
def test_root_in_a_project_of_another_user_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a folder of the host in a container: nobody except its owner may write there."""
    project = of_a_stranger(tmp_path / "project")
    project.chmod(0o755)
    of_a_stranger(project / ".git")
    theirs = of_a_stranger(project / "skyward.toml", '[pools.theirs]\nprovider = "local"\n')
    of_a_stranger(project / ".gitignore", "*.log\n")
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.chdir(project)
    with pytest.raises(UsageError, match=f"belongs to .*SKYWARD_TRUST={theirs}"):
        pool_names()
    monkeypatch.setenv("SUDO_UID", str(STRANGER))
    assert "theirs" in pool_names()
    monkeypatch.delenv("SUDO_UID")
    (project / "src").mkdir()
    assert [rules.folder for rules in rules_above(str(project / "src"))][-1:] == [str(project)]


@pytest.mark.root
def test_a_repository_of_another_user_above_a_folder_gives_it_no_rules(shared: Path) -> None:
    (shared / "work").mkdir()
    of_a_stranger(shared / ".git")
    of_a_stranger(shared / ".gitignore", "*.py\n")
    assert not rules_above(str(shared / "work"))


@pytest.mark.root
@pytest.mark.parametrize("connect", [configuration, lambda target: openssh(target).run("true", timeout_s=5)])
def test_an_ssh_configuration_of_another_user_is_not_read(shared: Path, connect: Callable[[SSHTarget], object]) -> None:
    theirs = of_a_stranger(shared / "config", f"Host *\n  ProxyCommand touch {shared}/run\n")
    with pytest.raises(UsageError, match=f"config_file={theirs}: belongs to|{theirs}: belongs to"):
        connect(SSHTarget(host="192.0.2.1", config_file=str(theirs)))
    assert not (shared / "run").exists()


def test_a_runtime_folder_is_short_whatever_tmpdir_is(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_LONGEST_BASE", 10)  # every folder of a test is too long in that case
    try:
        assert runtime_folder("skyward-test") == f"/tmp/skyward-test-{os.getuid()}"
    finally:
        os.rmdir(f"/tmp/skyward-test-{os.getuid()}")


@pytest.mark.parametrize("wanted", ["", "there", "missing", "/nonexistent"])
def test_the_temporary_folder_is_that_of_tempfile_without_its_import(shared: Path, wanted: str) -> None:
    (shared / "there").mkdir(mode=0o700)
    place = str(shared / wanted) if wanted.isalpha() else wanted
    code = """
import os
from skyward.core.ownership import runtime_folder
mine = runtime_folder("skyward-test-folder")
import tempfile
print(os.path.dirname(mine) == tempfile.gettempdir())
os.rmdir(mine)
"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env={**os.environ, "TMPDIR": place}, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
