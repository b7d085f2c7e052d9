"""paramiko reads the user's configuration as `ssh` does, and failures on the way are described."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skyward.errors import AuthFailed, HostKeyUnknown, Unreachable
from skyward.ssh import Connection, SSHTarget
from skyward.ssh.login import configuration
from tests.ssh.conftest import target_of
from tests.ssh.server import Server

Connects = Callable[[SSHTarget], Connection]

CONFIG = """
Include {folder}/hosts/*
User everybody
Host other
  Include {folder}/not-meant
Match host inner.lab
  Include {folder}/inner
  ConnectTimeout 7
"""


def test_included_files_apply_where_they_are_included_and_no_further(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts" / "lab").write_text(
        "Host gpu1\n  HostName inner.lab\nHost last # \xe9\n  User last\n", "latin-1"
    )
    (tmp_path / "not-meant").write_text("Host gpu1\n  Port 1\n")
    (tmp_path / "inner").write_text("Port 2222\nHost nobody\n  Port 3\n")
    said = configuration(SSHTarget(host="gpu1", config_file=str(tmp_path / "config")))
    argv = ["ssh", "-G", "-F", str(tmp_path / "config"), "gpu1"]
    told = dict(re.findall(r"(\w+) (.*)", subprocess.run(argv, capture_output=True, text=True, check=True).stdout))
    for name in ("hostname", "user", "port", "connecttimeout"):
        assert said[name] == told[name], name


def test_a_failure_on_the_way_to_a_machine_is_described(to: Connects, server: Server, own_server: Server) -> None:
    """An OpenSSH client that is a master discards the messages of its jump host's client."""
    own_server.start()
    jump = own_server.config.read_text().replace(f"Host {own_server.name}", "Host jump", 1)
    inner = server.config.read_text().replace(f"Host {server.name}", "Host inner", 1)
    config = own_server.folder / "config"
    target = SSHTarget(host="inner", config_file=str(config))
    config.write_text(inner + "  ProxyJump jump\n" + jump.replace(str(own_server.known_hosts), "/nowhere"))
    with pytest.raises(HostKeyUnknown):
        to(target)
    config.write_text(inner + "  ProxyJump jump\n" + jump.replace(str(own_server.key), str(server.key)))
    with pytest.raises(AuthFailed):
        to(target)
    config.write_text(inner + "  ProxyCommand no-such-proxy %h\n")
    with pytest.raises(Unreachable, match="no-such-proxy"):
        to(target)


@pytest.mark.parametrize("transport", ["openssh"])
def test_a_proxy_is_run_again_if_the_client_died_without_a_message(to: Connects, server: Server) -> None:
    proxy = server.folder / "proxy"
    proxy.write_text('#!/bin/sh\n[ -e "$0.ran" ] && echo "no way through" >&2 && exit 1\n: > "$0.ran"; kill -9 $PPID\n')
    proxy.chmod(0o700)
    inner = server.config.read_text().replace(f"Host {server.name}", "Host inner", 1)
    config = server.folder / "config-with-proxy"
    config.write_text(inner + f"  ProxyCommand {proxy}\n")
    with pytest.raises(Unreachable, match="no way through"):
        to(SSHTarget(host="inner", config_file=str(config)))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Start an agent of this test that holds a key with a passphrase."""
    said = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
    path, pid = re.findall(r"SSH_A\w+=([^;]+)", said)
    monkeypatch.setenv("SSH_AUTH_SOCK", path)
    key, ask = tmp_path / "key", tmp_path / "ask"
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "open sesame", "-f", str(key)], check=True)
    ask.write_text("#!/bin/sh\necho open sesame\n")
    ask.chmod(0o700)
    asking = {**os.environ, "SSH_ASKPASS": str(ask), "SSH_ASKPASS_REQUIRE": "force"}
    subprocess.run(["ssh-add", "-q", str(key)], env=asking, stdin=subprocess.DEVNULL, check=True)
    yield key
    os.kill(int(pid), 15)


def test_a_key_with_a_passphrase_comes_from_the_agent(
    to: Connects, own_server: Server, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_server.authorized.write_text(agent.with_suffix(".pub").read_text())
    own_server.start()
    target = replace(target_of(own_server), key_file=str(agent))
    to(target).close()
    text = own_server.config.read_text().replace(str(own_server.key), f"{agent}.pub")
    config = own_server.folder / "config"
    config.write_text(f"{text}  IdentitiesOnly yes\n  IdentityAgent {os.environ['SSH_AUTH_SOCK']}\n")
    monkeypatch.delenv("SSH_AUTH_SOCK")
    to(SSHTarget(host=own_server.name, config_file=str(config))).close()
    with pytest.raises(AuthFailed, match="ssh-add"):
        to(target)


def test_a_file_without_a_key_is_no_reason_to_retry(to: Connects, server: Server, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no key")
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(AuthFailed):
        to(replace(target_of(server), key_file=str(tmp_path / "key")))
