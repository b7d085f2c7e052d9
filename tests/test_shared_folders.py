"""No process of skyward opens a path below a shared folder that was not checked first.

Everything that a pool, the command line and SSH keep on disk is put below a folder that everybody may write to. An
audit hook in each of their processes notes the opened paths, and the ones that `skyward.core.ownership` has checked.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky


@sky.compute
def pid() -> int:
    print("here")
    return os.getpid()


@sky.compute
def large(data: bytes) -> int:
    return len(data)


ROOT = Path(__file__).parent.parent
HOOK = """
import os as _os, sys as _sys
def _install(log, shared):
    fd = _os.open(log, _os.O_WRONLY | _os.O_APPEND | _os.O_CREAT, 0o600)
    first, second, both = slice(0, 1), slice(1, 2), slice(0, 2)
    places = dict.fromkeys(
        "open os.mkdir os.rmdir os.remove os.chmod os.chown os.utime os.truncate os.listdir os.scandir "
        "shutil.rmtree tempfile.mkstemp tempfile.mkdtemp skyward.check_path".split(), first
    )
    places |= {"os.rename": both, "os.link": both}
    places |= {"os.symlink": second, "socket.bind": second, "socket.connect": second}
    def hook(event, args):
        for path in args[places.get(event, slice(0))]:
            path = _os.fsdecode(path) if isinstance(path, (str, bytes, _os.PathLike)) else ""
            if path.startswith(shared + "/"):
                is_new = event == "open" and len(args) > 2 and isinstance(args[2], int) and args[2] & _os.O_EXCL
                _os.write(fd, f"{event}{' new' if is_new else ''}\\t{path}\\n".encode())
    _sys.addaudithook(hook)
"""
PYTHON = """#!/bin/sh
# Python with the hook ahead of the code that it is given by -c.
last=
for word; do
    shift
    [ "$last" = -c ] && [ -z "$done" ] && word="exec(open({hook}).read())
$word" && done=1
    set -- "$@" "$word"
    last=$word
done
exec {python} "$@"
"""
CLIENT = """
import contextlib, os, subprocess, sys, time
sys.executable = {python!r}
sys.path.remove("")  # where Python itself would look for modules
import skyward as sky
from skyward.cli import main
from skyward.bootstrap.ignore import rules_above
from skyward.bootstrap.uv import client_uv, packed_uv
from skyward.errors import SkywardError
from skyward.providers.aws.cached import cached
from skyward.ssh import SSHTarget, connect
from skyward.training.control.endpoint import sweep
from tests.hosts.meeting import Meeting
from tests.test_shared_folders import pid, large

shared = {shared!r}
os.chdir(shared + "/project/src")
with sky.ComputePool.named("mine", logs=sky.LogFiles(shared + "/logs")) as pool:
    assert len(pid() @ pool) == 2
    assert (large(b"x" * 2_000_000) >> pool) == 2_000_000
    assert sky.compute(sky.integrations.base.integrate(os.getpid, Meeting()))() >> pool
    main(["ls"])
os.makedirs(shared + f"/skyward-{{os.getuid()}}/pool-dead/deep")
os.utime(shared + f"/skyward-{{os.getuid()}}/pool-dead", (0, 0))
for command in (["gc", "--local"], ["gc"], ["ls"], ["doctor"], ["logs"]):
    with contextlib.suppress(SystemExit):
        main(command)
assert not os.path.exists(shared + f"/skyward-{{os.getuid()}}/pool-dead")
assert rules_above(shared + "/project/src")
cached("key", 10.0, lambda: 1)
sweep()
if client_uv():
    packed_uv(client_uv(), system="Linux", machine=os.uname().machine, libc="glibc2.36")
for transport in ("openssh", "paramiko"):
    files = {{f"{{name}}_file": f"{{shared}}/home/.ssh/{{name}}" for name in ("key", "config")}}
    target = SSHTarget(host="127.0.0.1", port=1, **files)
    with contextlib.suppress(SkywardError), contextlib.closing(connect(target, transport=transport)) as connection:
        connection.run("true", timeout_s=5)
print("done")
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """Make a folder below /tmp, because a socket's path must be short, with all of a user's files."""
    with tempfile.TemporaryDirectory(prefix="sky-", dir="/tmp") as folder:
        place = Path(folder, "t")
        place.mkdir()
        place.chmod(0o1777)
        for name in ("home/.ssh", "project/src", "project/.git"):
            (place / name).mkdir(parents=True)
        (place / "home/.ssh/config").write_text("Host *\n  ConnectTimeout 2\n")
        (place / "home/.ssh/key").touch(0o600)
        (place / "project/.gitignore").write_text("*.log\n")
        (place / "project/skyward.toml").write_text('[pools.mine]\nprovider = "local"\nnodes = 2\n')
        yield place


def test_every_path_opened_below_a_shared_folder_was_checked_before(shared: Path) -> None:
    place = shared.parent
    log, hook, python = place / "log", place / "hook.py", place / "python"
    hook.write_text(f"{HOOK}\n_install({str(log)!r}, {str(shared)!r})\n")
    python.write_text(PYTHON.format(hook=repr(str(hook)), python=shlex.quote(sys.executable)))
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "AWS_"))}
    environment |= {"TMPDIR": str(shared), "HOME": str(shared / "home"), "PYTHONPATH": str(ROOT), "SSH_AUTH_SOCK": ""}
    done = subprocess.run(
        [python, "-c", CLIENT.format(python=str(python), shared=str(shared))],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.stdout.endswith("done\n"), done.stderr
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    checked: set[str] = set()
    unchecked: list[str] = []
    for event, path in lines:
        if event in ("skyward.check_path", "open new", "tempfile.mkstemp", "tempfile.mkdtemp"):
            checked.add(path)  # a new file of a name that nobody can know is as good as a checked one
        elif not any(path == ok or path.startswith(f"{ok}/") or ok.startswith(f"{path}/") for ok in checked):
            unchecked.append(f"{event} {path}")
    assert not unchecked, "\n".join(dict.fromkeys(unchecked))
    opened = {path.removeprefix(f"{shared}/") for event, path in lines if event != "skyward.check_path"}
    uid = os.getuid()
    runtime = tuple(f"{name}-{uid}/" for name in ("skyward", "skyward-ssh", "skyward-ports"))
    state = ("home/.local/state/skyward/", "home/.cache/skyward/", "home/.ssh/config", "project/skyward.toml", "logs/")
    for part in runtime + state:
        assert any(path.startswith(part) for path in opened), f"{part} was not opened, or not seen: {sorted(opened)}"
