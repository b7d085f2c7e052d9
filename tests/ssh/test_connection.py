"""Contract of a Connection: both transports against a real sshd."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from skyward.errors import AuthFailed, HostKeyChanged, HostKeyUnknown, Unreachable, UsageError
from skyward.ssh import Connection, HostKeys, SSHTarget, connect, wait_until_ready
from skyward.ssh.connect import Transport
from tests.ssh.conftest import target_of
from tests.ssh.server import Server, make_key
from tests.waiting import lines_of, until

Connects = Callable[[SSHTarget], Connection]


@pytest.fixture
def connection(to: Connects, server: Server) -> Connection:
    return to(target_of(server))


def test_a_command_gives_its_exit_code_and_output(connection: Connection) -> None:
    done = connection.run("echo out; echo err >&2; exit 3", timeout_s=60)
    assert (done.code, done.text, done.error_text) == (3, "out", "err")


def test_exit_code_255_is_the_commands_own(connection: Connection) -> None:
    assert connection.run("exit 255", timeout_s=60).code == 255


def test_all_input_reaches_the_command(connection: Connection) -> None:
    data = os.urandom(5_000_000)
    wanted = hashlib.sha256(data).hexdigest()
    assert connection.run("sha256sum", input=data, timeout_s=60).text.split()[0] == wanted
    assert connection.run("sha256sum", input=io.BytesIO(data), timeout_s=60).text.split()[0] == wanted


def test_a_command_that_reads_only_part_of_its_input_is_no_error(connection: Connection) -> None:
    assert connection.run("head -c 10", input=b"x" * 5_000_000, timeout_s=60).stdout == b"x" * 10


def test_all_output_arrives(connection: Connection) -> None:
    assert len(connection.run("head -c 5000000 /dev/zero", timeout_s=60).stdout) == 5_000_000


def test_lines_come_while_the_command_runs(connection: Connection, tmp_path: Path) -> None:
    lines: list[str] = []

    def note(text: str) -> None:
        lines.append(text)
        (tmp_path / "go").touch()  # the command goes on once its first line is here

    wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    connection.run(f"echo first; {wait}; echo second >&2; printf last", timeout_s=60, on_line=note)
    assert lines == ["first", "second", "last"]


def test_a_command_that_times_out_is_killed_on_the_remote_side_too(connection: Connection, tmp_path: Path) -> None:
    for timeout_s in (1, 5, 25):  # a busy machine may not have begun it after a second
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=f"within {timeout_s} s"):
            connection.run(f"echo $$ > {tmp_path}/pid; (sleep 61.5 & wait)", timeout_s=timeout_s)
        assert time.monotonic() - began < timeout_s + 40
        if lines_of(tmp_path / "pid"):
            break
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert connection.run("echo on", timeout_s=60).text == "on"


def test_closing_ends_a_command_that_another_thread_waits_for(connection: Connection, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(connection.run, f"touch {tmp_path}/begun; sleep 62.5", timeout_s=60)
        until((tmp_path / "begun").exists)
        connection.close()
        with pytest.raises(Unreachable, match="closed here"):
            waiting.result(60)  # the command takes a minute
    with pytest.raises(Unreachable, match="closed here"):
        connection.run("true", timeout_s=5)


def test_argv_is_a_channel_to_a_command(connection: Connection) -> None:
    with subprocess.Popen(connection.argv("cat"), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for word in (b"one\n", b"two\n"):
            process.stdin.write(word)
            process.stdin.flush()
            assert process.stdout.readline() == word
        process.stdin.close()
        assert process.wait(60) == 0


def test_argv_passes_on_exit_code_and_standard_error(connection: Connection) -> None:
    done = subprocess.run(connection.argv("echo 'it''s' >&2; exit 7"), capture_output=True, timeout=60, check=False)
    assert done.returncode == 7
    assert done.stderr.endswith(b"its\n")  # after the greeting of a log-in shell


def test_killing_argv_ends_the_remote_commands_input(connection: Connection, tmp_path: Path) -> None:
    command = f"touch {tmp_path}/begun; cat; touch {tmp_path}/ended"
    with subprocess.Popen(connection.argv(command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        until((tmp_path / "begun").exists)
        process.kill()
    until((tmp_path / "ended").exists)


def test_twelve_channels_can_be_open_at_once(connection: Connection) -> None:
    """More than sshd's ten sessions for each connection."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(connection.argv("cat"), stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(12)
        ]
        for number, process in enumerate(processes):
            assert process.stdin is not None
            process.stdin.write(b"%d\n" % number)
            process.stdin.flush()
        for number, process in enumerate(processes):
            assert process.stdout is not None
            assert process.stdout.readline() == b"%d\n" % number
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(60) == 0


def test_commands_share_one_connection(to: Connects, own_server: Server) -> None:
    own_server.start()
    connection = to(target_of(own_server))
    for _ in range(3):
        connection.run("true", timeout_s=60)
        subprocess.run(connection.argv("true"), timeout=60, check=True)
    assert own_server.log.count("Accepted publickey") == 1


def test_a_lost_connection_is_reopened_by_the_next_command(to: Connects, own_server: Server) -> None:
    own_server.start()
    connection = to(target_of(own_server))
    own_server.drop_connections()
    assert subprocess.run(connection.argv("echo hi"), capture_output=True, timeout=60, check=True).stdout == b"hi\n"
    own_server.drop_connections()
    until(lambda: not own_server.sessions())
    assert connection.run("echo hi", timeout_s=60).text == "hi"


def test_a_connection_that_is_lost_during_a_command_is_unreachable(
    to: Connects, own_server: Server, tmp_path: Path
) -> None:
    own_server.start()
    connection = to(target_of(own_server))
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(connection.run, f"touch {tmp_path}/begun; sleep 30", timeout_s=60)
        until((tmp_path / "begun").exists)
        own_server.drop_connections()
        with pytest.raises(Unreachable, match="lost while"):
            waiting.result(60)


def _processes_naming(text: Path) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if str(text).encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_process_that_died_or_hangs_is_replaced(
    to: Connects, server: Server, runtime: Path, number: signal.Signals
) -> None:
    connection = to(target_of(server))
    holders = _processes_naming(runtime)
    assert holders
    for pid in holders:
        os.kill(pid, number)
    done = subprocess.run(connection.argv("echo hi"), capture_output=True, timeout=60, check=True)
    assert done.stdout == b"hi\n"
    assert connection.run("echo hi", timeout_s=60).text == "hi"
    assert not set(holders) & set(_processes_naming(runtime))


def test_nothing_is_left_here_after_close(to: Connects, server: Server, runtime: Path) -> None:
    connection = to(target_of(server))
    connection.run("true", timeout_s=60)
    connection.close()
    connection.close()
    until(lambda: not _processes_naming(runtime))
    assert not list(runtime.glob("*/*"))


def test_leftovers_of_dead_programs_are_removed_and_those_of_living_ones_stay(server: Server, runtime: Path) -> None:
    mine = connect(target_of(server), transport="openssh")
    folders = list(runtime.glob("skyward-ssh-*/*"))
    left = folders[0].parent / "left"
    left.mkdir()
    (left / "owner").write_text("999999999")
    for folder in (*folders, left):
        os.utime(folder, (1, 1))
    connect(target_of(server), transport="openssh").close()
    assert not left.exists()
    assert all(folder.exists() for folder in folders)
    mine.close()


# Errors ---------------------------------------------------------------------------------------------------------------


def test_a_refused_key_fails_at_once(to: Connects, server: Server, tmp_path: Path) -> None:
    stranger = make_key(tmp_path / "stranger")
    with pytest.raises(AuthFailed, match="ssh-add"):
        to(replace(target_of(server), key_file=str(stranger)))


def test_a_missing_key_file_is_named(to: Connects, server: Server) -> None:
    with pytest.raises(UsageError, match="key_file=./nowhere/key.: no such file"):
        to(replace(target_of(server), key_file="/nowhere/key"))


def test_an_unknown_host_key_is_refused_and_the_error_says_what_adds_it(
    to: Connects, server: Server, tmp_path: Path
) -> None:
    known = tmp_path / "known_hosts"
    target = replace(target_of(server), host_keys=HostKeys(file=str(known)))
    with pytest.raises(HostKeyUnknown) as caught:
        to(target)
    error = caught.value
    shown = subprocess.run(["ssh-keygen", "-lf", str(server.host_key)], capture_output=True, text=True, check=True)
    assert error.fingerprint == shown.stdout.split()[1]
    assert error.fingerprint in str(error)
    command = str(error).partition("make it known: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert to(target).run("echo hi", timeout_s=60).text == "hi"


def test_a_changed_host_key_is_refused_by_every_policy(to: Connects, server: Server, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other").with_suffix(".pub").read_text()
    known = tmp_path / "known_hosts"
    for policy in (HostKeys(file=str(known)), HostKeys(policy="pin", file=str(known))):
        known.write_text(f"[{server.host}]:{server.port} {other}\n")
        with pytest.raises(HostKeyChanged):
            to(replace(target_of(server), host_keys=policy))
    given = HostKeys(policy="given", keys=(" ".join(other.split()[:2]),))
    with pytest.raises(HostKeyChanged):
        to(replace(target_of(server), host_keys=given))


def test_a_key_that_is_pinned_at_the_first_contact_holds_from_then_on(
    to: Connects, own_server: Server, tmp_path: Path
) -> None:
    own_server.start()
    pinned = HostKeys(policy="pin", file=str(tmp_path / "pinned"), alias="i-1")
    target = replace(target_of(own_server), host_keys=pinned)
    to(target).close()
    assert own_server.public_host_key in (tmp_path / "pinned").read_text()
    assert "i-1 " in (tmp_path / "pinned").read_text()
    to(target).close()
    own_server.stop()
    own_server.host_key.unlink()
    make_key(own_server.host_key)
    own_server.start()
    with pytest.raises(HostKeyChanged):
        to(target)


@pytest.mark.parametrize("kind", ["key", "fingerprint"])
def test_host_keys_can_be_given(to: Connects, server: Server, kind: str, tmp_path: Path) -> None:
    shown = subprocess.run(["ssh-keygen", "-lf", str(server.host_key)], capture_output=True, text=True, check=True)
    key = server.public_host_key if kind == "key" else shown.stdout.split()[1]
    target = replace(target_of(server), host_keys=HostKeys(policy="given", keys=(key,)))
    assert to(target).run("echo hi", timeout_s=60).text == "hi"
    other = make_key(tmp_path / "other")
    shown = subprocess.run(["ssh-keygen", "-lf", str(other)], capture_output=True, text=True, check=True)
    with pytest.raises(HostKeyChanged, match="which host_keys does not name|has another one"):
        to(replace(target, host_keys=HostKeys(policy="given", keys=(shown.stdout.split()[1],))))


def test_a_port_without_a_listener_is_unreachable_for_now(to: Connects, own_server: Server) -> None:
    with pytest.raises(Unreachable) as caught:
        to(target_of(own_server))
    assert not caught.value.is_final


def test_a_host_name_that_does_not_exist_is_unreachable_for_good(to: Connects, server: Server) -> None:
    with pytest.raises(Unreachable) as caught:
        to(replace(target_of(server), host="no-such-host.invalid"))
    assert caught.value.is_final or "emporary" in str(caught.value)  # without any name server it is temporary
    assert "ssh -G no-such-host.invalid" in str(caught.value), "what to do next"


def test_a_machine_that_accepts_and_stays_silent_times_out(to: Connects, server: Server) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(Unreachable):
            to(replace(target_of(server), port=port, connect_timeout_s=2))
        assert time.monotonic() - began < 60


# Routes ---------------------------------------------------------------------------------------------------------------


def test_an_alias_of_the_configuration_is_followed(to: Connects, server: Server) -> None:
    """The alias sets HostName, Port, User, IdentityFile and UserKnownHostsFile."""
    connection = to(SSHTarget(host=server.name, config_file=str(server.config)))
    assert connection.run("echo hi", timeout_s=60).text == "hi"


def test_a_machine_behind_another_is_reached_through_it(to: Connects, server: Server, own_server: Server) -> None:
    own_server.start()
    config = own_server.folder / "both"
    jump = own_server.config.read_text().replace(f"Host {own_server.name}", "Host jump", 1)
    inner = server.config.read_text().replace(f"Host {server.name}", "Host inner", 1)
    config.write_text(jump + inner)
    before = own_server.log.count("Accepted publickey")
    connection = to(SSHTarget(host="inner", jump="jump", config_file=str(config)))
    assert connection.run("echo hi", timeout_s=60).text == "hi"
    assert own_server.log.count("Accepted publickey") == before + 1
    connection.close()
    config.write_text(jump + inner + "  ProxyJump jump\n")
    assert to(SSHTarget(host="inner", config_file=str(config))).run("echo hi", timeout_s=60).text == "hi"


def test_a_proxy_command_is_followed(to: Connects, server: Server, tmp_path: Path) -> None:
    code = """
import os, socket, sys, threading
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def up():
    while piece := os.read(0, 65536):
        sock.sendall(piece)
threading.Thread(target=up, daemon=True).start()
while piece := sock.recv(65536):
    os.write(1, piece)
"""
    (tmp_path / "proxy.py").write_text(code)
    config = tmp_path / "config"
    config.write_text(server.config.read_text() + f"  ProxyCommand python3 {tmp_path}/proxy.py %h %p\n")
    assert to(SSHTarget(host=server.name, config_file=str(config))).run("echo hi", timeout_s=60).text == "hi"


# A machine that boots -------------------------------------------------------------------------------------------------


def test_a_booting_machine_is_awaited(transport: Transport, own_server: Server, runtime: Path) -> None:
    retries: list[object] = []

    def boot(error: object) -> None:
        retries.append(error)
        if len(retries) == 2:
            own_server.start()

    connection = wait_until_ready(target_of(own_server), timeout_s=60, transport=transport, on_retry=boot)
    assert connection.run("echo hi", timeout_s=60).text == "hi"
    assert len(retries) >= 2
    connection.close()


def test_a_machine_that_does_not_know_our_key_yet_is_given_time(
    transport: Transport, own_server: Server, runtime: Path
) -> None:
    keys = own_server.authorized.read_text()
    own_server.authorized.write_text("")
    own_server.start()
    began = time.monotonic()
    with pytest.raises(AuthFailed):
        wait_until_ready(target_of(own_server), timeout_s=120, transport=transport)
    assert time.monotonic() - began < 60
    timer = threading.Timer(1.0, lambda: own_server.authorized.write_text(keys))
    timer.start()
    wait_until_ready(target_of(own_server), timeout_s=120, auth_grace_s=90, transport=transport).close()
    timer.join()


def test_waiting_ends_at_its_deadline_and_when_it_is_told_to(
    transport: Transport, own_server: Server, runtime: Path
) -> None:
    with pytest.raises(Unreachable, match="tried for 1 s"):
        wait_until_ready(target_of(own_server), timeout_s=1, transport=transport)
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    began = time.monotonic()
    with pytest.raises(Unreachable):
        wait_until_ready(target_of(own_server), timeout_s=120, transport=transport, stop=stop)
    assert time.monotonic() - began < 60


def test_a_log_in_shell_that_prints_does_not_spoil_output(
    transport: Transport, own_server: Server, runtime: Path
) -> None:
    config = own_server.folder / "sshd_config"
    config.write_text(config.read_text() + 'ForceCommand echo "Welcome!"; eval "$SSH_ORIGINAL_COMMAND"\n')
    own_server.start()
    connection = connect(target_of(own_server), transport=transport)
    assert connection.run("echo hi", timeout_s=60).stdout == b"hi\n"
    connection.close()
