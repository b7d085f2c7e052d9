"""Notices: news of a job that its owner gets by a command or a signed webhook, and what an operator allows of that."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ...core.spellings import suggestion
from ...errors import UsageError

MOST = 8
"""Targets of a job."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_PORTS = {"https": 443, "http": 80}
_VISIBLE = re.compile(r"[!-~]{1,2000}")
_FIELDS = ("url", "secret", "command", "on")


class NoticeKind(StrEnum):
    """Kind of news."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    """Its time to run or to wait was over."""
    LOST = "lost"
    """An attempt was lost, and the job is tried again."""
    WAITING = "waiting"
    """It has waited for its `notify_wait_s`."""
    CHECKPOINT_LATE = "checkpoint_late"
    """Its newest checkpoint is older than its interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeTarget:
    """Receiver of the news of a job.

    Attributes:
        url: Address of a webhook: https, or http on this machine. Empty for a command.
        secret: Name of the secret by which its messages are signed.
        command: Program of the hub's operator, with arguments. It gets the message on its standard input.
        on: Kinds of news that it gets.

    Raises:
        UsageError: A field is illegal, or two contradict each other.
    """

    url: str = ""
    secret: str = ""
    command: Sequence[str] = ()
    on: Sequence[str] = tuple(NoticeKind)

    def __post_init__(self) -> None:
        if bool(self.url) == bool(self.command):
            raise UsageError("notify: a target has either a url or a command; give one of them", field="notify")
        if self.url and not self.secret:
            raise UsageError("notify.secret: missing; name the secret that signs the messages", field="notify.secret")
        for name in self.on:
            if name not in tuple(NoticeKind):
                near = suggestion(name, tuple(NoticeKind))
                advice = f"did you mean {near}?" if near else f"use some of {', '.join(NoticeKind)}"
                raise UsageError(f"notify.on={name[:40]!r}: no such news; {advice}", field="notify.on")
        if not all(isinstance(part, str) and part and "\0" not in part for part in self.command):
            raise UsageError("notify.command: not a list of texts; write program and arguments", field="notify.command")
        if self.url:
            _split(self.url)

    @property
    def name(self) -> str:
        """Host or program, for lists."""
        return (_split(self.url).hostname or "") if self.url else self.command[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeRules:
    """Receivers that the hub's operator allows.

    Attributes:
        hosts: Hosts of webhooks, such as `hooks.example.org`, `*.example.org` or `127.0.0.1:8080`.
        commands: Absolute paths of programs that jobs may name.
    """

    hosts: Sequence[str] = ()
    commands: Sequence[str] = field(default_factory=tuple)

    def check(self, target: NoticeTarget) -> None:
        """Check a target.

        Raises:
            UsageError: The operator does not allow it.
        """
        if target.command:
            if target.command[0] not in self.commands:
                raise UsageError(
                    f"notify.command={target.command[0][:80]!r}: the hub's operator does not allow this program; ask "
                    "for it in notify.commands",
                    field="notify.command",
                )
            return
        split = _split(target.url)
        port = split.port or _PORTS[split.scheme]
        host = split.hostname or ""
        names = {f"{host}:{port}"} | ({host} if port == _PORTS[split.scheme] else set())
        wild = {f"*.{name.partition('.')[2]}" for name in names}
        if not (names | wild) & {allowed.lower() for allowed in self.hosts}:
            raise UsageError(
                f"notify.url: the hub's operator does not allow the host {host}:{port}; ask for it in notify.hosts",
                field="notify.url",
            )


def parse_targets(entries: Any) -> list[NoticeTarget]:
    """Read targets as a job's spec has them.

    Raises:
        UsageError: One has an unknown field, with the nearest known one, or an illegal value.

    Example:
        >>> [target.name for target in parse_targets([{"url": "https://hooks.example.org/x", "secret": "LAB"}])]
        ['hooks.example.org']
    """
    if not isinstance(entries, list | tuple) or len(entries) > MOST:
        raise UsageError(f"notify: not a list of at most {MOST} targets; write a list", field="notify")
    return [_target(entry) for entry in entries]


def _target(entry: Any) -> NoticeTarget:
    if not isinstance(entry, Mapping):
        raise UsageError("notify: a target is not a mapping; write url and secret, or command", field="notify")
    for name in entry:
        if name not in _FIELDS:
            near = suggestion(str(name), _FIELDS)
            advice = f"did you mean {near}?" if near else f"use some of {', '.join(_FIELDS)}"
            raise UsageError(f"notify.{str(name)[:40]}: unknown field; {advice}", field="notify")
    texts = all(isinstance(entry.get(name, ""), str) for name in ("url", "secret"))
    lists = all(isinstance(entry.get(name, []), list | tuple) for name in ("command", "on"))
    if not (texts and lists):
        raise UsageError(
            "notify: a field has another type; url and secret are texts, command and on are lists", field="notify"
        )
    return NoticeTarget(**dict(entry))


def _split(url: str) -> SplitResult:
    try:
        split = urlsplit(url)
        _ = split.port
    except ValueError:
        split = urlsplit("")
    if not _VISIBLE.fullmatch(url) or split.scheme not in _PORTS or not split.hostname or "@" in split.netloc:
        raise UsageError("notify.url: no address of a webhook; write https://HOST/PATH", field="notify.url")
    if split.scheme == "http" and split.hostname not in _LOOPBACK:
        raise UsageError("notify.url: http is for this machine only; use https", field="notify.url")
    return split
