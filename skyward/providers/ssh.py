"""Machines of your own, reached by SSH."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..bootstrap.scripts import Cleared, clear_cache
from ..core.bounds import is_positive
from ..core.signatures import checked_options
from ..errors import NoCapacity, SkywardError, Unreachable, UsageError
from ..events import Emit
from ..ssh import HostKeys, SSHTarget, connect
from ..ssh.connect import Transport
from ..values.image import Image
from ..values.machine import Machine, Offer, PoolSpec
from .remote import Place, RemoteNodeHandle, bring_up, end

__all__ = ["SSH", "SSHHost"]

# With an IPv6 address in brackets, or bare where no port follows: as for `ssh`, all of it is the address then.
_HOST = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^\s:/]+)@)?"
    r"(?:\[(?P<ip>[^\s\[\]]+)\]|(?P<bare>[^@\s\[\]/]*:[^@\s\[\]/]*:[^@\s\[\]/]*)|(?P<host>[^:@\s\[\]/]+))(?::(?P<port>\d+))?"
)
_CONNECT_S = 30.0
"""Seconds for a host to answer that is expected to be up, or in whose place there is another. One that was lost and
has no spare may be booting, and gets the pool's `provision_timeout_s`."""


@checked_options
@dataclass(frozen=True, kw_only=True)
class SSHHost:
    """One machine. None: what `SSH` says for all of them, and behind that the SSH configuration.

    host: name, address, or alias of the SSH configuration.
    private_address: the IPv4 address at which the other nodes reach it, where that is not the one that the SSH
        connection arrives at: a second network card, a tunnel.
    host_keys: see SSH.
    """

    host: str
    user: str | None = None
    port: int | None = None
    key_file: str | os.PathLike[str] | None = None
    jump: str | None = None
    host_keys: str | Sequence[str] | None = None
    private_address: str = ""


@checked_options
@dataclass(frozen=True, kw_only=True)
class SSH:
    """Machines of your own, reached by SSH: a pool of n nodes takes the first n hosts, the others are spare.

    They are never shut down. What a pool starts there ends with it; a cache of environments stays, so that the next
    pool starts at once (`skyward gc --cache --host HOST` clears it). Two pools, and two people, may use one host at a
    time.

    Each host needs what `ssh <host>` needs: an sshd that lets you in without asking, Linux, a writable home. Nothing
    of ours listens on a network there.

    Args:
        hosts: names, addresses or aliases of ~/.ssh/config, as "gpu1", "me@10.0.0.2" or "me@10.0.0.2:2222"; or
            SSHHost, where one differs from the others.
        user, port, key_file, jump: for all hosts that do not say otherwise. `jump` is a host to go through, as in
            `ssh -J`. A key with a passphrase must be in the agent (ssh-add).
        config_file: instead of ~/.ssh/config.
        host_keys: "known_hosts" (the machine's key must be in your known_hosts file), "accept-new" (one that is seen
            for the first time is written there), or the keys themselves: "ssh-ed25519 AAAA..." or "SHA256:...". A key
            that has changed is always refused.
        lease_s: seconds after which a node ends by itself when this machine and its keeper are gone; > 0. A link that
            comes back sooner loses nothing.
        transport: "openssh" (the `ssh` command, faster), "paramiko", or None: the first that is there.

    Raises UsageError, naming the field, when one is not legal.

    Example:
        >>> SSH(hosts=["gpu1", "me@10.0.0.2:2222"]).targets[1].port
        2222
    """

    name: ClassVar[str] = "ssh"
    extra: ClassVar[str] = "ssh"
    acts_on_image: ClassVar[frozenset[str]] = frozenset(f.name for f in dataclasses.fields(Image))
    shares_files: ClassVar[bool] = False
    is_rented: ClassVar[bool] = False

    hosts: Sequence[str | SSHHost | Mapping[str, Any]]
    user: str | None = None
    port: int | None = None
    key_file: str | os.PathLike[str] | None = None
    jump: str | None = None
    config_file: str | os.PathLike[str] | None = None
    host_keys: str | Sequence[str] = "known_hosts"
    lease_s: float = 60.0
    transport: Transport | None = None

    def __post_init__(self) -> None:
        if isinstance(self.hosts, str | Mapping) or not self.hosts:
            raise UsageError(f'SSH.hosts: {self.hosts!r}; it is a list of hosts, such as ["gpu1", "me@10.0.0.2:2222"]')
        if not is_positive(self.lease_s):
            raise UsageError(f"SSH.lease_s: {self.lease_s!r}; it is a number of seconds > 0")
        if self.transport not in (None, "openssh", "paramiko"):
            raise UsageError(f'SSH.transport: {self.transport!r}; it is "openssh", "paramiko" or None')
        hosts = tuple(_host(host) for host in self.hosts)
        object.__setattr__(self, "hosts", hosts)
        if not isinstance(self.host_keys, str) and isinstance(self.host_keys, Sequence):
            object.__setattr__(self, "host_keys", tuple(self.host_keys))
        twice = sorted({str(t) for t in self.targets if self.targets.count(t) > 1})
        if twice:
            raise UsageError(f"SSH.hosts: {', '.join(twice)} twice; for more processes on one host: concurrency=")

    @property
    def targets(self) -> tuple[SSHTarget, ...]:
        """How each host is reached."""
        return tuple(place.target for place in self._places)

    @property
    def _places(self) -> tuple[Place, ...]:
        return tuple(self._place(host) for host in self.hosts if isinstance(host, SSHHost))

    def _place(self, host: SSHHost) -> Place:
        def either(name: str) -> Any:
            own = getattr(host, name)
            return getattr(self, name) if own is None else own

        target = SSHTarget(
            host=host.host,
            user=either("user"),
            port=either("port"),
            key_file=_path(either("key_file")),
            jump=either("jump"),
            config_file=_path(self.config_file),
            host_keys=_host_keys(either("host_keys")),
        )
        return Place(target=target, private_address=host.private_address)

    # The protocol -----------------------------------------------------------------------------------------------------

    def offers(self, spec: PoolSpec) -> list[Offer]:
        """One for all hosts: what they have is known once they are reached. Raises NoCapacity."""
        hosts = self.targets
        if spec.nodes > len(hosts):
            raise NoCapacity(
                f"ssh: nodes={spec.nodes}, and there {_are(len(hosts))}: {', '.join(map(str, hosts))}; "
                "give more hosts, or ask for fewer nodes"
            )
        names = ", ".join(map(str, hosts))
        return [Offer(provider="ssh", instance_type=f"your own: {names}", vcpus=0, memory_gib=0.0)]

    def plan(self, spec: PoolSpec, offer: Offer, pool: str) -> list[SSHTarget]:
        return list(self.targets[: spec.nodes])

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        """On the host that a node had before, if it had one; on a spare one where a host cannot be reached."""
        books = _books_of(pool)
        is_first = not books.knows(nodes)
        tried: dict[int, set[int]] = {node: set() for node in nodes}
        while True:
            chosen = books.choose(tried, len(self.hosts))
            has_spare = books.has_spare(tried, len(self.hosts))
            try:
                return bring_up(
                    [self._places[chosen[node]] for node in nodes],
                    spec,
                    pool,
                    nodes,
                    emit,
                    lease_s=self.lease_s,
                    transport=self.transport,
                    connect_s=min(_CONNECT_S if is_first or has_spare else math.inf, spec.provision_timeout_s),
                )
            except (Unreachable, NoCapacity) as error:
                failed: int = error.node  # type: ignore[assignment,union-attr]
                if not has_spare:
                    raise
                tried[failed].add(chosen[failed])

    def terminate(self, machines: list[Machine]) -> None:
        """One that cannot be reached is no error: its watchdog ends it when its lease is over."""
        end([machine for machine in machines if isinstance(machine.handle, RemoteNodeHandle)])

    def clear_caches(self) -> dict[str, Cleared | SkywardError]:
        """Remove the environments and code that pools have left on the hosts, but for what is in use.

        By host; an error stands for one that could not be cleared.
        """
        outcomes: dict[str, Cleared | SkywardError] = {}
        for target in self.targets:
            try:
                with contextlib.closing(connect(target, transport=self.transport)) as connection:
                    outcomes[str(target)] = clear_cache(connection.run)
            except SkywardError as error:
                outcomes[str(target)] = error
        return outcomes


def _host(host: object) -> SSHHost:
    if isinstance(host, SSHHost):
        return host
    if isinstance(host, Mapping):
        known = {f.name for f in dataclasses.fields(SSHHost)}
        unknown = sorted(set(host) - known)
        if unknown or "host" not in host:
            raise UsageError(f"SSH.hosts: {dict(host)!r}; it has `host` and may have {', '.join(sorted(known))}")
        return SSHHost(**host)
    match = _HOST.fullmatch(host) if isinstance(host, str) else None
    address = match and (match["ip"] or match["bare"])
    if match is None or (address and not _is_ipv6(address)):
        raise UsageError(
            f'SSH.hosts: {host!r}; a host is "name", "user@name", "user@name:port" or an SSHHost; an IPv6 address with '
            'a port stands in brackets: "user@[fd00::2]:22"'
        )
    port = int(match["port"]) if match["port"] else None
    return SSHHost(host=address or match["host"], user=match["user"], port=port)


def _is_ipv6(address: str) -> bool:
    try:
        ipaddress.IPv6Address(address)
    except ValueError:  # that is the answer
        return False
    return True


def _path(given: str | os.PathLike[str] | None) -> str | None:
    return os.fspath(given) if isinstance(given, os.PathLike) else given


def _are(hosts: int) -> str:
    return "is 1 host" if hosts == 1 else f"are {hosts} hosts"


def _host_keys(given: str | Sequence[str]) -> HostKeys:
    if given == "known_hosts":
        return HostKeys()
    if given == "accept-new":
        return HostKeys(policy="pin")
    is_word = isinstance(given, str) and " " not in given and not given.startswith("SHA256:")
    if is_word or not isinstance(given, Sequence) or not given or not all(isinstance(key, str) for key in given):
        raise UsageError(f'SSH.host_keys: {given!r}; it is "known_hosts", "accept-new" or a list of keys')
    return HostKeys(policy="given", keys=(given,) if isinstance(given, str) else tuple(given))


class _Books:
    """Which host each node of a pool has or had, so that a replacement tries that one first, then one that is free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._host_of: dict[int, int] = {}

    def choose(self, tried: Mapping[int, set[int]], hosts: int) -> dict[int, int]:
        """A host for each of these nodes, none of those that it has tried. Raises NoCapacity."""
        with self._lock:
            for node, refused in tried.items():
                taken = {host for other, host in self._host_of.items() if other != node}
                first = [self._host_of[node]] if node in self._host_of else [node]
                fit = [h for h in (*first, *range(hosts)) if h < hosts and h not in taken | refused]
                if not fit:
                    raise NoCapacity(f"ssh: node {node}: there {_are(hosts)}, and none is free that has not failed")
                self._host_of[node] = fit[0]
            return {node: self._host_of[node] for node in tried}

    def has_spare(self, tried: Mapping[int, set[int]], hosts: int) -> bool:
        """Whether one of these nodes could go elsewhere if it had to."""
        with self._lock:
            return len(set(self._host_of.values()).union(*tried.values())) < hosts

    def knows(self, nodes: Sequence[int]) -> bool:
        with self._lock:
            return any(node in self._host_of for node in nodes)


_books: dict[str, _Books] = {}
_books_lock = threading.Lock()
_POOLS = 64


def _books_of(pool: str) -> _Books:
    """Those of the last pools of this process: a pool that is closed says so to nobody."""
    with _books_lock:
        if pool not in _books and len(_books) >= _POOLS:
            del _books[next(iter(_books))]
        return _books.setdefault(pool, _Books())
