"""Behaviour of the fake EC2: settings of a test, and the faults that it injects."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Fault", "Settings"]


@dataclass(kw_only=True)
class Settings:
    """Way in which machines are made and ended from now on. Times are in seconds."""

    pending_s: float = 0.2
    """How long a new one is pending, at least."""
    shutdown_s: float = 0.2
    """How long one that was terminated is shutting down, at least."""
    boots: Literal["normally", "never"] = "normally"
    """never: it runs, as EC2 sees it, but sshd and its user data never start."""
    ssh_after_s: float = 0.0
    """A slow boot: sshd starts so late. User data runs before."""
    list_after_s: float = 0.0
    """How long describe_instances and terminate_instances do not know a new one."""
    console_after_s: float = 0.0
    """How long the console's output is empty, counted from when it is listed."""
    software: str = ""
    """Archive that a new one has on its disk, as if its image had been made with it; empty: a bare Debian."""
    has_uv: bool = True
    """Whether the image has uv. Without it, each pool uploads it to each machine."""
    refuses_terminate_while_pending: bool = False
    enforces_security_groups: bool = True

    def copy(self) -> Settings:
        return dataclasses.replace(self)


@dataclass(kw_only=True)
class Fault:
    """An API call that fails. `where` must match the call: instance_type, zone, market, instance_id."""

    action: str
    """RunInstances, or * for all."""
    code: str = ""
    message: str = ""
    status: int = 400
    times: int | None = None
    """How many calls fail; None: all, until the faults are cleared."""
    where: dict[str, str] = field(default_factory=dict)
    is_done: bool = False
    """What was asked for is done all the same, and only the answer says otherwise."""
    is_dropped: bool = False
    """There is no answer: the connection ends."""

    def strikes(self, action: str, facts: Mapping[str, Any]) -> bool:
        """Return whether it hits this call. If so, the call is counted."""
        if self.times == 0 or self.action not in (action, "*"):
            return False
        if any(facts.get(name) != value for name, value in self.where.items()):
            return False
        if self.times is not None:
            self.times -= 1
        return True
