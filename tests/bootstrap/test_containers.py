"""Container runtimes on a machine: what is found there, and what is said about what is not."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from skyward.bootstrap.containers import Container, find_container
from skyward.errors import ProviderError
from tests.bootstrap.scratch import ScratchNode

WORKS = """#!/bin/sh
case "$*" in
version) ;;
"image inspect"*) echo sha256:0123 ;;
*) exit 1 ;;
esac
"""


def machine(folder: Path, **scripts: str) -> ScratchNode:
    """Return a machine with the programs of this one and these scripts, but no other runtime."""
    node = ScratchNode(folder)
    for path in (*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()):
        link = node.bin / path.name
        if path.name not in ("podman", "docker", "apt-get", "sudo", *scripts) and not os.path.lexists(link):
            link.symlink_to(path)
    for name, text in scripts.items():  # never through a link: the program of this machine is behind it
        assert not (node.bin / name).is_symlink()
        (node.bin / name).write_text(text)
        (node.bin / name).chmod(0o755)
    node.variables["PATH"] = str(node.bin)
    return node


def find(
    node: ScratchNode,
    *,
    has_volumes: bool = False,
    is_detached: bool = False,
    lease_file: str = "",
    limit_s: float = 20,
) -> Container:
    return find_container(
        node,
        "debian:12",
        folder="pool-0-a",
        lease_file=lease_file,
        has_volumes=has_volumes,
        is_detached=is_detached,
        limit_s=limit_s,
    )


def test_a_machine_without_a_runtime_is_told_what_to_install(tmp_path: Path) -> None:
    refused = r"Image.container='debian:12': podman and docker are missing on this machine; install podman there"
    with pytest.raises(ProviderError, match=refused):
        find(machine(tmp_path))


def test_podman_is_installed_on_a_rented_machine_only(tmp_path: Path) -> None:
    sudo = '#!/bin/sh\nshift\nexec "$@"\n'
    apt_get = f"""#!/bin/sh
echo "$*" >>{tmp_path}/log
[ "$1" = update ] || printf '%s' '{WORKS.replace("'", '"')}' >{tmp_path}/bin/podman
chmod 755 {tmp_path}/bin/podman 2>/dev/null || :
"""
    node = machine(tmp_path, **{"apt-get": apt_get, "sudo": sudo})
    with pytest.raises(ProviderError, match="missing on this machine"):
        find(node)
    assert not (tmp_path / "log").exists()
    assert find(node, lease_file=str(tmp_path / "lease")).runtime == "podman"
    assert (tmp_path / "log").read_text().split("\n")[0] == "update"


def test_a_runtime_that_refuses_this_user_is_quoted(tmp_path: Path) -> None:
    docker = "#!/bin/sh\necho 'permission denied: /var/run/docker.sock' >&2\nexit 1\n"
    with pytest.raises(ProviderError, match=r"not usable by \w+ \(permission denied: /var/run/docker.sock\)"):
        find(machine(tmp_path, docker=docker))


def test_docker_is_taken_where_podman_does_not_work(tmp_path: Path) -> None:
    found = find(machine(tmp_path, podman="#!/bin/sh\nexit 1\n", docker=WORKS))
    assert (found.runtime, found.image_id) == ("docker", "0123")
    assert f"--user={os.getuid()}:{os.getgid()}" in found.options


def test_the_folder_of_volumes_is_mounted_if_there_are_any(tmp_path: Path) -> None:
    node = machine(tmp_path, podman=WORKS)
    data = node.home / ".local" / "share" / "skyward"
    mount = f"--volume={data}:{data}"
    assert mount not in find(node).options
    assert mount in find(node, has_volumes=True).options
    assert data.is_dir()


def test_containers_that_end_with_the_login_are_refused_for_a_detached_pool(tmp_path: Path) -> None:
    lingers = tmp_path / "lingers"
    who = '#!/bin/sh\n[ "$1" = -un ] && echo me || echo 1000\n'
    loginctl = f"""#!/bin/sh
[ "$1" = show-user ] && if [ -e {lingers} ]; then echo yes; else echo no; fi
[ "$1" != enable-linger ] || echo "$2" >{lingers}
"""
    node = machine(tmp_path, podman=WORKS, id=who, loginctl=loginctl, sudo='#!/bin/sh\nshift\nexec "$@"\n')
    assert find(node).runtime == "podman"
    with pytest.raises(
        ProviderError, match=r"of me end with the last login.*; run `sudo loginctl enable-linger me` there"
    ):
        find(node, is_detached=True)
    assert not lingers.exists(), "a user's own host is left as it is"
    assert find(node, is_detached=True, lease_file=str(tmp_path / "lease")).runtime == "podman"
    assert lingers.read_text() == "me\n"
    docker = machine(tmp_path / "docker", docker=WORKS, id=who, loginctl="#!/bin/sh\necho no\n")
    assert find(docker, is_detached=True).runtime == "docker"


@pytest.mark.parametrize(
    ("ends", "lists", "code", "way"),
    [(0, "exit 1", 0, "exec"), (3, "exit 1", 3, "exec"), (3, "echo 0123", 3, "exec"), (3, "exit 0", 69, "run")],
    ids=["well", "silent", "there", "gone"],
)
def test_only_a_container_that_the_runtime_does_not_list_is_gone(
    tmp_path: Path, ends: int, lists: str, code: int, way: str
) -> None:
    podman = f"""#!/bin/sh
case "$1" in
ps) cat; {lists} ;;
*) echo "$1"; cat; exit {ends} ;;
esac
"""
    node = machine(tmp_path, podman=podman)
    container = Container(runtime="podman", image_id="0123", options=(), folder="pool-0-a")

    def run(line: str) -> tuple[int, str]:
        done = subprocess.run(
            ["sh", "-c", line], input="in", env=node.variables, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    assert run(container.channel("true")) == (code, "exec\nin")
    assert run(container.inside_or_once("true")) == (ends, f"{way}\nin"), "what is read is not taken from the command"


def test_a_pull_that_takes_too_long_is_named_and_not_taken_for_a_machine_that_hangs(tmp_path: Path) -> None:
    podman = '#!/bin/sh\ncase "$*" in\nversion) ;;\npull*) echo Trying; exec sleep 60 ;;\n*) exit 1 ;;\nesac\n'
    with pytest.raises(ProviderError, match=r"podman cannot pull it: no end within 1 s \(Trying \); log in there"):
        find(machine(tmp_path, podman=podman), limit_s=1)


def test_time_spent_on_waiting_for_another_pull_counts(tmp_path: Path) -> None:
    node = machine(tmp_path, podman='#!/bin/sh\n[ "$1" = version ]\n')
    node.cache.mkdir(parents=True)
    with open(node.cache / "lock-container", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ProviderError, match=r"another node of this host has pulled it for 1 s; see what holds .*"):
            find(node, limit_s=1)
