"""Assignment of keys in known_hosts to machines, by both transports."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from skyward.errors import HostKeyChanged
from skyward.providers.ssh import SSH
from skyward.ssh import Connection, HostKeys, SSHTarget
from skyward.ssh.hostkeys import known_keys
from tests.ssh.conftest import target_of
from tests.ssh.server import Server, make_key

Connects = Callable[[SSHTarget], Connection]


def test_lines_are_read_as_ssh_reads_them(tmp_path: Path) -> None:
    (tmp_path / "known").write_bytes(
        b"# gpu1 ssh-ed25519 comment\n\nbroken\nx y\n@cert-authority *.lab ssh-rsa AUTHORITY\n"
        b"gpu1,10.0.0.? ssh-ed25519 ONE name \xff\n"
        b"@revoked * ssh-ed25519 STOLEN\n!gpu9.lab,*.lab ssh-ed25519 LAB\n[gpu1]:2222 ssh-ed25519 PORT\n"
    )
    (tmp_path / "hashed").write_text("gpu2 ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEHash\n|1|broken ssh-rsa X\n")
    subprocess.run(["ssh-keygen", "-qHf", str(tmp_path / "hashed")], capture_output=True, check=True)
    files = [str(tmp_path / name) for name in ("known", "hashed", "nowhere")]

    def said(name: str) -> list[str]:
        return [f"{one.mark} {one.key.split()[1]}".strip() for one in known_keys(files, name)]

    assert said("gpu1") == ["ONE", "revoked STOLEN"]
    assert said("10.0.0.7") == ["ONE", "revoked STOLEN"]
    assert said("[gpu1]:2222") == ["revoked STOLEN", "PORT"]
    assert said("GPU3.lab") == ["cert-authority AUTHORITY", "revoked STOLEN", "LAB"]
    assert said("gpu9.lab") == ["cert-authority AUTHORITY", "revoked STOLEN"]
    assert said("gpu2") == ["revoked STOLEN", "AAAAC3NzaC1lZDI1NTE5AAAAIEHash"]
    assert known_keys(files, "gpu1")[0].where == f"{tmp_path}/known:6"


def test_marks_and_patterns_apply_by_both_transports(to: Connects, server: Server, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other").with_suffix(".pub").read_text()
    known = tmp_path / "known"
    target = replace(target_of(server), host_keys=HostKeys(file=str(known)))
    known.write_text(f"broken\n@cert-authority *.lab {other}[127.0.0.*]:{server.port} {server.public_host_key}\n")
    assert to(target).run("echo hi", timeout_s=20).text == "hi"
    known.write_text(f"@revoked * {server.public_host_key}\n{server.known_hosts.read_text()}")
    with pytest.raises(HostKeyChanged, match="marks as @revoked"):
        to(target)


def test_accepting_a_new_key_ignores_no_key_that_the_user_knows(to: Connects, server: Server, tmp_path: Path) -> None:
    """The keys are known in whatever file the configuration names."""
    config, own, of_all = (tmp_path / name for name in ("config", "own", "of_all"))
    own_line = f"  UserKnownHostsFile {server.known_hosts}\n"
    text = server.config.read_text()
    assert own_line in text
    config.write_text(text.replace(own_line, f"  UserKnownHostsFile {own}\n  GlobalKnownHostsFile {of_all}\n"))
    target = SSH(hosts=[server.name], config_file=config, host_keys="accept-new").targets[0]
    to(target).close()
    assert server.public_host_key in own.read_text()
    own.unlink()
    other = make_key(tmp_path / "other").with_suffix(".pub").read_text()
    of_all.write_text(f"[{server.host}]:{server.port} {other}")
    with pytest.raises(HostKeyChanged, match=f"{of_all}:1"):
        to(target)
