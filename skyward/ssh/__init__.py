"""SSH: one pooled connection per machine, commands that run there, and local command lines that lead there.

Example:
    target = Target(host="gpu1")                      # does what `ssh gpu1` would do, ~/.ssh/config included
    connection = connect(target)
    connection.run("uname -a", timeout_s=10).text     # runs now, and waits
    connection.argv("cat")                            # a local command line, for any process, at any time

This package knows nothing of agents and frames, and they know nothing of it.
"""

from .command import SSHResult
from .connect import connect, wait_until_ready
from .connection import Connection
from .target import HostKeys, SSHTarget

Completed = SSHResult
"""Public name of `SSHResult`."""
Target = SSHTarget
"""Public name of `SSHTarget`."""

__all__ = ["SSHResult", "Completed", "Connection", "HostKeys", "SSHTarget", "Target", "connect", "wait_until_ready"]
