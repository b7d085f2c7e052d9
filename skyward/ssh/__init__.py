"""Machines that answer to SSH: one pooled connection to each, commands there, and command lines that lead there.

    target = Target(host="gpu1")                      # whatever `ssh gpu1` would do, ~/.ssh/config included
    connection = connect(target)
    connection.run("uname -a", timeout_s=10).text     # here and now
    connection.argv("cat")                            # a command of this machine, for whoever runs it, whenever

This package knows nothing of agents and frames; they know nothing of it.
"""

from .command import SSHResult
from .connect import connect, wait_until_ready
from .connection import Connection
from .target import HostKeys, SSHTarget

Completed = SSHResult
"""The name that users know."""
Target = SSHTarget
"""The name that users know."""

__all__ = ["SSHResult", "Completed", "Connection", "HostKeys", "SSHTarget", "Target", "connect", "wait_until_ready"]
