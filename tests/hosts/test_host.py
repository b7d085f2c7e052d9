"""The test bed itself: a host behaves like a real one, and each fault breaks it as named."""

from __future__ import annotations

import math
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.hosts.fixtures import NewHost
from tests.hosts.host import Host
from tests.waiting import until

pytestmark = pytest.mark.hosts


@pytest.fixture
def pair(hosts: Callable[[int], list[Host]]) -> list[Host]:
    return hosts(2)


@pytest.fixture
def echoing(new_host: NewHost) -> Iterator[tuple[Host, socket.socket]]:
    """Return a host, and an open connection to a program there that echoes its input."""
    host = new_host()
    program = "import socket; c = socket.create_server(('', 9000)).accept()[0]\nwhile d := c.recv(99): c.sendall(d)"
    host.run("systemd-run", "-q", "python3", "-c", program)
    until(lambda: "python3" in {process.name for process in host.started_processes()})
    connections: list[socket.socket] = []

    def connect() -> bool:
        try:
            connections.append(socket.create_connection((host.address, 9000), timeout=5))
        except ConnectionRefusedError:
            return False
        return True

    until(connect)
    with connections[0] as connection:
        assert _echo(connection)
        yield host, connection


def _echo(connection: socket.socket, within_s: float = 60.0) -> bool:
    """Return whether it answers. Raises ConnectionError when it is gone."""
    connection.settimeout(within_s)
    try:
        connection.sendall(b"hello")
        if not connection.recv(99):
            raise ConnectionResetError
    except TimeoutError:
        return False
    return True


def test_ssh_answers_within_seconds_of_the_start(new_host: NewHost, capsys: pytest.CaptureFixture[str]) -> None:
    boots = [new_host().boot_s for _ in range(3)]
    with capsys.disabled():
        print("\nssh answered after", ", ".join(f"{boot_s:.2f} s" for boot_s in boots))
    assert min(boots) < 10


def test_root_and_ordinary_users_log_in_by_ssh(pair: list[Host]) -> None:
    host = pair[0]
    assert host.ssh("whoami").stdout == "root\n"
    assert host.ssh("whoami; sudo whoami", user="dev").stdout == "dev\nroot\n"
    assert host.ssh("hostname").stdout == "node0\n"


def test_each_host_has_its_own_host_key(pair: list[Host]) -> None:
    assert pair[0].host_key() != pair[1].host_key()
    seen = subprocess.run(["ssh-keyscan", "-t", "ed25519", pair[0].address], capture_output=True, text=True, check=True)
    assert pair[0].host_key() in seen.stdout


def test_a_host_with_a_new_host_key_is_refused(new_host: NewHost) -> None:
    host = new_host()
    assert host.ssh("true").returncode == 0
    host.change_host_key()
    assert "IDENTIFICATION HAS CHANGED" in host.ssh("true").stderr


def test_hosts_reach_each_other_by_name_and_nothing_else(pair: list[Host]) -> None:
    lookup = "import socket; print(socket.gethostbyname(socket.gethostname()))"
    assert pair[0].ssh(f'python3 -c "{lookup}"').stdout == f"{pair[0].address}\n"
    reach = "import socket; socket.create_connection(('{}', {}), timeout=5)"
    assert pair[0].ssh(f'python3 -c "{reach.format("node1", 22)}"').returncode == 0
    assert "unreachable" in pair[0].ssh(f'python3 -c "{reach.format("192.0.2.1", 80)}"').stderr


def test_processes_of_a_host_are_known(new_host: NewHost) -> None:
    host = new_host()
    assert host.started_processes() == []
    host.ssh("setsid sleep 600 > /dev/null 2>&1 & exit")
    until(lambda: [process.command for process in host.started_processes()] == ["sleep 600"])
    pid = host.started_processes()[0].pid
    host.run("kill", f"{pid}")
    until(lambda: not host.started_processes())


def test_files_of_a_host_are_read_and_written_from_outside(new_host: NewHost) -> None:
    host = new_host()
    host.write("/opt/given", "from outside\n")
    assert host.ssh("cat /opt/given; echo inside > /tmp/taken; echo disk > /root/kept").stdout == "from outside\n"
    assert host.read("/tmp/taken") == "inside\n"
    assert {"/opt/given", "/root/kept"} <= set(host.changed_files())
    assert host.memory_mib() > 10


def test_a_host_is_shut_down_and_boots_again_with_its_disk(new_host: NewHost) -> None:
    host = new_host()
    host.write("/root/kept", "kept")
    host.shutdown()
    assert not host.is_on
    assert not host.answers_ssh(timeout_s=0.2)
    host.start().wait_ssh()
    assert host.read("/root/kept") == "kept"


def test_a_host_powers_itself_off(new_host: NewHost) -> None:
    host = new_host()
    host.ssh("systemctl poweroff")
    host.wait_off()
    assert not host.is_on


def test_peers_of_a_host_without_power_hear_nothing(echoing: tuple[Host, socket.socket]) -> None:
    host, connection = echoing
    host.power_loss()
    assert not _echo(connection, within_s=1.0)
    host.start().wait_ssh()


def test_peers_of_a_crashed_host_see_closed_connections(echoing: tuple[Host, socket.socket]) -> None:
    host, connection = echoing
    host.power_loss(is_silent=False)
    with pytest.raises(ConnectionError):
        _echo(connection)


def test_a_cut_link_is_silent_and_sent_bytes_arrive_when_it_is_back(echoing: tuple[Host, socket.socket]) -> None:
    host, connection = echoing
    with host.link_cut():
        assert not _echo(connection, within_s=1.0)
        assert host.run("echo", "from outside").stdout == "from outside\n"
    connection.settimeout(60)
    assert connection.recv(99) == b"hello"


def test_a_host_that_boots_slowly_answers_late(new_host: NewHost) -> None:
    host = new_host(ssh_after_s=8.0)  # long enough to be seen
    until(lambda: "/bin/sleep 8" in {process.command for process in host.processes()})
    assert not host.answers_ssh()
    assert host.wait_ssh().boot_s > 8


def test_a_boot_that_never_ends_never_answers(new_host: NewHost) -> None:
    host = new_host(ssh_after_s=math.inf)
    until(lambda: "/bin/sleep infinity" in {process.command for process in host.processes()})
    with pytest.raises(AssertionError, match="not within"):
        host.wait_ssh(within_s=1.0)
    host.power_loss()
    host.start().wait_ssh()


@pytest.mark.parametrize("where", ["/", "/tmp", "/dev/shm"])
def test_a_full_disk_refuses_writes(new_host: NewHost, where: str) -> None:
    host = new_host()
    write = f"head -c 1M /dev/zero > {where}/more"
    with host.disk_full(where):
        assert "No space left on device" in host.ssh(write).stderr
    assert host.ssh(write).returncode == 0


def test_a_disk_has_the_size_it_was_made_with(new_host: NewHost) -> None:
    host = new_host(disk_mib=16)
    assert "No space left on device" in host.ssh("head -c 20M /dev/zero > /root/more").stderr


def test_a_wrong_clock_is_seen_by_programs_that_start_there(new_host: NewHost) -> None:
    host = new_host()
    clock = 'python3 -c "import time; a = time.monotonic(); time.sleep(0.1); print(time.time(), time.monotonic() - a)"'
    host.set_clock(-400 * 86400)
    now, slept = (float(word) for word in host.ssh(clock).stdout.split())
    assert 399 * 86400 < time.time() - now < 401 * 86400
    assert 0.09 < slept < 10, "the other clocks are right"
    assert abs(time.time() - int(host.ssh("date +%s").stdout) - 400 * 86400) < 60
    host.set_clock(0)
    assert abs(time.time() - int(host.ssh("date +%s").stdout)) < 60


def test_a_host_that_hides_is_reached_through_another(pair: list[Host], new_host: NewHost) -> None:
    hidden = new_host()
    hidden.hide_from(hidden.bed.address)
    assert not hidden.answers_ssh(timeout_s=0.5)
    assert hidden.ssh("hostname", options=["-J", pair[0].name]).stdout == f"{hidden.name}\n"
    hidden.show_to_all()
    assert hidden.answers_ssh()
