"""SSH to bare hosts: cut links, hosts behind others, log-ins whose end would end the agent, spare hosts."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import skyward as sky
from skyward.ssh import Connection, SSHTarget, connect
from skyward.ssh.connect import Transport
from tests.hosts.bed import Bed
from tests.hosts.fixtures import NewHost
from tests.hosts.host import Host
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

NOTICED_S = 40.0


@pytest.fixture(params=["openssh", "paramiko"])
def transport(request: pytest.FixtureRequest) -> Transport:
    found: Transport = request.param
    return found


@contextmanager
def connected(host: Host, transport: Transport) -> Iterator[Connection]:
    target = SSHTarget(host=host.name, config_file=str(host.bed.ssh_config), connect_timeout_s=5)
    with closing(connect(target, transport=transport)) as connection:
        yield connection


@contextmanager
def echo(connection: Connection) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(connection.argv("cat"), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            say(process, b"first\n")
            yield process
        finally:
            process.kill()


def say(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Send a line and wait until it comes back."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    assert process.stdout.readline() == line


def test_a_link_that_stays_cut_is_noticed_in_seconds_and_reopened(new_host: NewHost, transport: Transport) -> None:
    host = new_host(has_uv=True)
    with connected(host, transport) as connection, echo(connection) as process:
        with host.link_cut():
            began = time.monotonic()
            process.wait(90)
            assert time.monotonic() - began < NOTICED_S
            assert process.returncode == 255
        # For a moment the kernel may still report that there is no route.
        until(lambda: subprocess.run(connection.argv("true"), timeout=60, check=False).returncode == 0)
        with echo(connection) as again:
            say(again, b"again\n")
        assert connection.run("echo on", timeout_s=60).text == "on"


def test_a_link_that_is_cut_for_a_moment_goes_on(new_host: NewHost, transport: Transport) -> None:
    host = new_host(has_uv=True)
    with connected(host, transport) as connection, echo(connection) as process:
        with host.link_cut():
            time.sleep(4)
        say(process, b"second\n")


def test_a_pool_runs_on_a_host_behind_another(
    bed: Bed, new_host: NewHost, hosts: Callable[[int], list[Host]], transport: Transport
) -> None:
    hidden, (jump,) = new_host(has_uv=True), hosts(1)
    hidden.hide_from(bed.address)
    provider = sky.SSH(hosts=[hidden.name], jump=jump.name, config_file=str(bed.ssh_config), transport=transport)
    with sky.ComputePool(provider=provider, nodes=1, console=False) as pool:
        assert sky.compute(lambda: __import__("socket").gethostname())() >> pool == hidden.name
    until(lambda: not hidden.started_processes())


@pytest.mark.parametrize("user", ["root", "dev"])
def test_an_agent_outlives_the_log_in_if_logind_kills_leftovers(bed: Bed, new_host: NewHost, user: str) -> None:
    host = new_host(has_uv=True)
    host.write("/etc/systemd/logind.conf.d/kill.conf", "[Login]\nKillUserProcesses=yes\nKillExcludeUsers=\n")
    host.run("systemctl", "restart", "systemd-logind")
    provider = sky.SSH(hosts=[f"{user}@{host.name}"], config_file=str(bed.ssh_config))
    with sky.ComputePool(provider=provider, nodes=1, console=False) as pool:
        group = sky.compute(lambda: Path("/proc/self/cgroup").read_text())() >> pool
        assert "session" not in group
        assert sky.compute(lambda: 42)() >> pool == 42
    until(lambda: not [p for p in host.started_processes() if "skyward" in p.command])
