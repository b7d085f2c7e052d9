"""Names of the module `skyward.ssh` for users."""

from __future__ import annotations

from skyward import ssh


def test_the_documented_names_are_those_of_the_classes() -> None:
    assert ssh.Target is ssh.SSHTarget
    assert ssh.Completed is ssh.SSHResult
    assert str(ssh.Target(host="gpu1")) == "gpu1"
