"""Journals: their owner, known by facts that outlive the machine's name, and what other processes record."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from skyward.state import journal
from skyward.state.journal import Journal, Owner

IOREG = """\
+-o J314sAP  <class IOPlatformExpertDevice>
    {
      "IOPlatformUUID" = "%s"
    }
"""


def test_another_user_of_this_machine_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Owner.this_process()
    assert mine.is_here
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert not mine.is_here
    assert mine.is_alive(), "for it cannot be known"
    assert Owner.this_process().host != mine.host


def test_records_and_tags_without_a_user_are_understood() -> None:
    machine = Path("/etc/machine-id").read_text().strip() if Path("/etc/machine-id").exists() else ""
    space = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    host = hashlib.sha256(f"{machine}|{platform.node()}|{space}".encode()).hexdigest()[:12]
    if platform.system() != "Linux":
        pytest.skip("/etc/machine-id is Linux's")
    old = replace(Owner.this_process(), host=host)
    assert Owner.from_tag(old.tag) == old
    assert old.is_here
    assert old.is_alive()
    assert not replace(old, pid=2**22 - 7).is_alive()


def test_a_mac_is_known_by_its_hardware_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ioreg = tmp_path / "ioreg"
    hosts = []
    for uuid, name in (("A-1", "home"), ("A-1", "office"), ("B-2", "home")):
        ioreg.write_text(f"#!/bin/sh\ncat <<'END'\n{IOREG % uuid}END\n")
        ioreg.chmod(0o755)
        monkeypatch.setattr(platform, "node", lambda name=name: name)
        journal.machine_id.cache_clear()
        hosts.append(Owner.this_process().host)
    journal.machine_id.cache_clear()
    assert hosts[0] == hosts[1] != hosts[2]


def test_a_journal_learns_what_another_process_has_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    mine = Journal.open_new(pool="train-1f2e3d4c", provider="aws", fields={}, scope="account")
    (theirs,) = journal.journals(mine.pool)
    theirs.settle(theirs.begin(offer={}, nodes=[2], at=1.0).token, ["i-1", "i-2"])
    theirs.ended(["i-1"])
    assert mine.living == {}
    mine.refresh()
    assert list(mine.living) == ["i-2"]
    assert mine.next_token == theirs.next_token
