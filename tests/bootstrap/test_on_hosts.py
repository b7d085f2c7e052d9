"""Bare hosts are prepared over real SSH: how fast, as which user, and after failures in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import skyward as sky
from skyward.bootstrap.code import gather
from skyward.bootstrap.prepare import Ready, prepare
from skyward.bootstrap.scripts import clear_cache
from skyward.errors import BootstrapFailed, NodeError, SkywardError
from skyward.events import Event, PhaseEnded, PhaseOutput, PhaseStarted
from skyward.ssh import Connection, SSHTarget, connect
from skyward.values.image import Image
from tests.hosts.fixtures import NewHost
from tests.hosts.host import Host
from tests.hosts.index import DEBIAN_PACKAGE, PackageIndex
from tests.waiting import until

pytestmark = pytest.mark.hosts

FIRST_RESULT_S = 180.0  # 15 without other load: see benchmarks/hosts.py
READY_S = 60.0  # 2 without other load, and with much of it an environment takes minutes


@contextmanager
def connected(host: Host, user: str = "root") -> Iterator[Connection]:
    target = SSHTarget(host=host.name, user=user, config_file=str(host.bed.ssh_config))
    with closing(connect(target)) as connection:
        yield connection


def make_ready(connection: Connection, image: Image, events: list[Event], folder: str = "test-0") -> Ready:
    return prepare(connection.run, image, emit=events.append, node=0, folder=folder)


def seconds_of(events: list[Event]) -> dict[str, float]:
    return {event.phase: round(event.seconds, 2) for event in events if isinstance(event, PhaseEnded)}


def test_the_first_result_of_a_bare_host_comes_in_seconds_and_the_next_pool_s_at_once(
    new_host: NewHost, package_index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = new_host(has_uv=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local_module.py").write_text("def shape(x):\n    return x.shape\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    image = Image(pip=["numpy", "scikit-learn"], pip_index_url=package_index.simple)
    events: list[Event] = []

    def first() -> tuple[int, ...]:
        import local_module  # type: ignore[import-not-found]
        import numpy as np

        shape: tuple[int, ...] = local_module.shape(np.zeros((2, 3)))
        return shape

    def open_pool() -> sky.ComputePool:
        provider = sky.SSH(hosts=[host.name], config_file=str(host.bed.ssh_config))
        return sky.ComputePool(provider=provider, image=image, on_event=events.append, console=False)

    began = time.monotonic()
    with open_pool() as pool:
        assert sky.compute(first)() >> pool == (2, 3)
        taken_s = time.monotonic() - began
        assert taken_s < FIRST_RESULT_S, (taken_s, seconds_of(events))
    print(f"first result on a bare host after {taken_s:.1f} s: {seconds_of(events)}")
    events.clear()
    began = time.monotonic()
    with open_pool() as pool:
        assert sky.compute(first)() >> pool == (2, 3)
        taken_s = time.monotonic() - began
    print(f"first result on a host that is ready after {taken_s:.1f} s: {seconds_of(events)}")
    ready = [event.phase for event in events if isinstance(event, PhaseEnded) and event.was_ready]
    assert ready == ["python", "skyward", "packages", "code"]
    until(lambda: not host.started_processes())


def test_an_existing_environment_is_ready_in_one_round_trip(
    new_host: NewHost, package_index: PackageIndex, tmp_path: Path
) -> None:
    host = new_host(has_uv=True)
    image = Image(pip=["numpy"], pip_index_url=package_index.simple)
    (tmp_path / "m.py").write_text("")
    code = gather(image, path=[str(tmp_path)], cwd=str(tmp_path), modules={})
    events: list[Event] = []
    commands: list[str] = []
    with connected(host) as connection:

        def run(command: str, **options: object) -> object:
            commands.append(command)
            return connection.run(command, **options)  # type: ignore[arg-type]

        prepare(run, image, emit=events.append, node=0, folder="a", code=code)  # type: ignore[arg-type]
        print(f"made ready: {seconds_of(events)}")
        events.clear()
        commands.clear()
        began = time.monotonic()
        prepare(run, image, emit=events.append, node=0, folder="b", code=code)  # type: ignore[arg-type]
        taken_s = time.monotonic() - began
        print(f"found ready after {taken_s:.2f} s: {seconds_of(events)}")
        assert len(commands) == 1
        assert taken_s < READY_S

        (tmp_path / "m.py").write_text("edited = True")
        code = gather(image, path=[str(tmp_path)], cwd=str(tmp_path), modules={})
        began = time.monotonic()
        prepare(connection.run, image, emit=events.append, node=0, folder="c", code=code)
        print(f"ready after an edit after {time.monotonic() - began:.2f} s")
        assert time.monotonic() - began < READY_S


@pytest.mark.parametrize("user", ["root", "dev"])
def test_debian_packages_are_installed_as_root_or_by_sudo(
    new_host: NewHost, package_index: PackageIndex, user: str
) -> None:
    host = new_host(has_uv=True)
    host.write("/etc/apt/sources.list", f"{package_index.apt_source}\n")
    events: list[Event] = []
    image = Image(apt=[DEBIAN_PACKAGE], pip_index_url=package_index.simple)
    with connected(host, user) as connection:
        make_ready(connection, image, events)
        assert host.run("dpkg", "-s", DEBIAN_PACKAGE).returncode == 0
        assert "apt" in seconds_of(events)
        events.clear()
        make_ready(connection, image, events)
        assert next(event.phase for event in events if isinstance(event, PhaseEnded) and event.was_ready) == "apt"
        if user != "root":
            owners = host.run("find", "/", "-xdev", "-path", "*/.cache/skyward/*", "-user", "root").stdout
            assert owners == ""


def test_a_user_who_may_not_install_packages_gets_advice(new_host: NewHost, package_index: PackageIndex) -> None:
    host = new_host(has_uv=True)
    host.run("rm", "/etc/sudoers.d/dev")
    message = rf"apt failed.*dev is not root and cannot use sudo.*apt-get install {DEBIAN_PACKAGE}"
    with connected(host, "dev") as connection, pytest.raises(BootstrapFailed, match=message):
        make_ready(connection, Image(apt=[DEBIAN_PACKAGE], pip_index_url=package_index.simple), [])


def test_a_package_that_debian_does_not_have_is_named(new_host: NewHost, package_index: PackageIndex) -> None:
    host = new_host(has_uv=True)
    host.write("/etc/apt/sources.list", f"{package_index.apt_source}\n")
    with (
        connected(host) as connection,
        pytest.raises(BootstrapFailed, match="apt-get cannot install no-such-package") as caught,
    ):
        make_ready(connection, Image(apt=["no-such-package"], pip_index_url=package_index.simple), [])
    assert "Unable to locate package no-such-package" in str(caught.value)


def begun(events: list[Event], phase: str) -> bool:
    return any(isinstance(event, PhaseStarted) and event.phase == phase for event in events)


def test_a_host_that_loses_power_during_preparation_continues_afterwards(
    new_host: NewHost, package_index: PackageIndex
) -> None:
    host = new_host(has_uv=True)
    image = Image(pip=["scikit-learn"], pip_index_url=package_index.simple)
    events: list[Event] = []
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            with connected(host) as connection:
                make_ready(connection, image, events)
        except SkywardError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    until(lambda: begun(events, "packages"))
    host.power_loss(is_silent=False)
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(caught[0], NodeError)

    host.start().wait_ssh()
    events.clear()
    with connected(host) as connection:
        make_ready(connection, image, events)
    assert "skyward" in [event.phase for event in events if isinstance(event, PhaseEnded) and event.was_ready]


def test_a_short_cut_of_a_link_is_survived_and_a_long_one_leaves_nothing_behind(
    new_host: NewHost, package_index: PackageIndex
) -> None:
    host = new_host(has_uv=True)
    events: list[Event] = []
    caught: list[BaseException] = []

    def attempt() -> None:
        image = Image(pip=["scikit-learn"], pip_index_url=package_index.simple, bootstrap_timeout_s=20)
        try:
            with connected(host) as connection:
                make_ready(connection, image, events)
        except SkywardError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    until(lambda: begun(events, "packages"))
    with host.link_cut():
        thread.join(60)
        assert not thread.is_alive()
        assert isinstance(caught[0], NodeError)
        until(lambda: not host.started_processes())
        assert host.run("ls", "/root/.cache/skyward/tmp").stdout == ""


def test_a_full_disk_is_named_and_preparation_continues_once_there_is_room(
    new_host: NewHost, package_index: PackageIndex
) -> None:
    host = new_host(disk_mib=512)
    image = Image(pip=["scikit-learn"], pip_index_url=package_index.simple)
    with connected(host) as connection:
        make_ready(connection, Image(pip_index_url=package_index.simple), [])
        with host.disk_full(left_kib=20_000), pytest.raises(BootstrapFailed) as caught:
            make_ready(connection, image, [])
        assert "free disk space there" in caught.value.advice, caught.value
        make_ready(connection, image, [])


def test_a_clock_that_is_years_off_does_no_harm(new_host: NewHost, package_index: PackageIndex) -> None:
    host = new_host(has_uv=True)
    host.set_clock(-3 * 365 * 86400.0)
    with connected(host) as connection:
        make_ready(connection, Image(pip=["numpy"], pip_index_url=package_index.simple), [])


def test_a_secret_is_in_no_file_and_no_argument_there(new_host: NewHost, package_index: PackageIndex) -> None:
    host = new_host(has_uv=True)
    value = uuid.uuid4().hex  # not in this file, which travels too
    image = Image(pip_index_url=package_index.simple, env={"TOKEN": sky.Secret("TOKEN", value=value)})

    def look() -> str:
        import os
        import subprocess

        told = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True)
        return told.stdout + str(len(os.environ["TOKEN"]))

    provider = sky.SSH(hosts=[host.name], config_file=str(host.bed.ssh_config))
    with sky.ComputePool(provider=provider, image=image, console=False) as pool:
        seen = sky.compute(look)() >> pool
        assert seen.endswith(str(len(value)))
        assert value not in seen
        found = host.run("grep", "-rlF", value, "/root", "/home", "/tmp", "/run", "/var", "/etc", check=False)
        assert found.stdout == ""


def test_after_clearing_the_cache_nothing_is_left(new_host: NewHost, package_index: PackageIndex) -> None:
    host = new_host(has_uv=True)
    provider = sky.SSH(hosts=[host.name], config_file=str(host.bed.ssh_config))
    image = Image(pip=["numpy"], pip_index_url=package_index.simple)
    with sky.ComputePool(provider=provider, image=image, console=False) as pool:
        assert sky.compute(lambda: 1)() >> pool == 1
    until(lambda: not host.started_processes())
    host.run("find", "/root/.cache/skyward", "-name", "used", "-exec", "touch", "-d", "1 hour ago", "{}", "+")
    with connected(host) as connection:
        cleared = clear_cache(connection.run)
    assert cleared.kept == ()
    assert cleared.freed_gib > 0.05
    assert not [path for path in host.changed_files() if "skyward" in path and not path.endswith("/skyward-0")]


PROGRAM = """
import sys
import skyward as sky
from steps import table
from steps.train import fit

@sky.compute
def here(n):
    return n * table.FACTOR

if __name__ == "__main__":
    provider = sky.SSH(hosts=[sys.argv[1]], config_file=sys.argv[2])
    image = sky.Image(pip_index_url=sys.argv[3], pip=sys.argv[4:], includes=["data"])
    with sky.ComputePool(provider=provider, image=image, console=False) as pool:
        print(here(2) >> pool, fit() >> pool)
"""
TRAIN = """
import numpy
import skyward as sky
from . import table

@sky.compute
def fit():
    return open("data/x.txt").read() + str(numpy.full(1, table.FACTOR)[0])
"""


def test_a_program_with_its_own_modules_and_data_runs_there_unchanged(
    new_host: NewHost, package_index: PackageIndex, tmp_path: Path
) -> None:
    host = new_host(has_uv=True)
    for path, text in {
        "main.py": PROGRAM,
        "steps/__init__.py": "",
        "steps/table.py": "FACTOR = 10\n",
        "steps/train.py": TRAIN,
        "data/x.txt": "x",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)

    def run(*pip: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "main.py", host.name, str(host.bed.ssh_config), package_index.simple, *pip]
        env = {**os.environ, "PYTHONPATH": str(Path(sky.__file__).parents[1])}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90, check=False)

    without = run()
    assert "steps/train.py imports numpy, which no requirement installs" in without.stderr
    assert "No module named 'numpy'" in without.stderr
    done = run("numpy")
    assert done.stdout == "20 x10\n", done.stderr
    assert "UserWarning" not in done.stderr
    (tmp_path / "steps/table.py").write_text("FACTOR = 11\n")
    assert run("numpy").stdout == "22 x11\n"


def test_output_is_shown_while_a_call_runs(new_host: NewHost, package_index: PackageIndex) -> None:
    host = new_host(has_uv=True)
    events: list[Event] = []
    with connected(host) as connection:
        make_ready(connection, Image(pip=["numpy"], pip_index_url=package_index.simple), events)
    shown = [event.text for event in events if isinstance(event, PhaseOutput) and event.phase == "packages"]
    assert any(text.startswith("+ numpy==") or "numpy==" in text for text in shown)
