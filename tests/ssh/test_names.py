"""The names under which users know this room."""

from __future__ import annotations

from skyward import ssh


def test_the_names_of_the_page_are_those_of_the_classes() -> None:
    assert ssh.Target is ssh.SSHTarget
    assert ssh.Completed is ssh.SSHResult
    assert str(ssh.Target(host="gpu1")) == "gpu1"
