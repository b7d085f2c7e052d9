"""Your own machines, reached over SSH."""

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
from .node_setup import Place, RemoteNodeHandle
from .remote import bring_up, end

# An IPv6 address stands in brackets. Without brackets no port can follow, and the whole text is the address, as in ssh.
_HOST = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^\s:/]+)@)?"
    r"(?:\[(?P<ip>[^\s\[\]]+)\]|(?P<bare>[^@\s\[\]/]*:[^@\s\[\]/]*:[^@\s\[\]/]*)|(?P<host>[^:@\s\[\]/]+))(?::(?P<port>\d+))?"
)
_CONNECT_S = 30.0
"""Seconds that a host gets to answer if it should be up, or if a spare host can take its place.

A lost host without a spare may be rebooting, so it gets the pool's `provision_timeout_s` instead."""


@checked_options
@dataclass(frozen=True, kw_only=True)
class SSHHost:
    """One host of an `SSH` provider, with options that differ from the other hosts.

    An option that is None falls back to the option of `SSH`, and then to the SSH configuration.

    Args:
        host: name, address, or alias of the SSH configuration.
        user: login name.
        port: TCP port of sshd, 1 to 65535.
        key_file: path of the private key. A key with a passphrase must be loaded in the SSH agent.
        jump: host to connect through, as in `ssh -J`.
        host_keys: accepted host keys; see `SSH`.
        private_address: IPv4 address at which the other nodes reach this host. Set it when nodes use a second
            network card or a tunnel. Empty: the address at which the SSH connection arrives.

    Raises:
        UsageError: an option is not one of these.

    Example:
        >>> SSHHost(host="gpu1", user="me", private_address="10.0.0.2").port is None
        True
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
    """Your own machines, reached over SSH.

    A pool of n nodes takes the first n hosts; the others are spares. Hosts are never shut down. Processes that a pool
    starts on a host end with the pool. A cache of environments stays, so that the next pool starts at once;
    `skyward gc --cache --host HOST` clears it. Several pools, and several people, may share a host.

    Each host needs what `ssh <host>` needs: Linux, a writable home, and an sshd that accepts your key without a
    prompt. skyward opens no network port there, except the rendezvous ports of a gang while it runs.

    Args:
        hosts: names, addresses or aliases of ~/.ssh/config, such as "gpu1", "me@10.0.0.2" or "me@10.0.0.2:2222".
            Use an `SSHHost`, or a mapping of its fields, for a host whose options differ.
        user: login name for hosts that do not set one.
        port: TCP port for hosts that do not set one.
        key_file: path of the private key for hosts that do not set one. A key with a passphrase must be loaded in
            the SSH agent (`ssh-add`).
        jump: host to connect through, as in `ssh -J`, for hosts that do not set one.
        config_file: SSH configuration to read instead of ~/.ssh/config.
        host_keys: "known_hosts" accepts keys of your known_hosts file. "accept-new" also accepts a new host and
            writes its key to that file. A list of keys, "ssh-ed25519 AAAA..." or "SHA256:...", accepts exactly these.
            A changed key is always refused.
        lease_s: seconds after which a node shuts itself down when it has lost contact with this machine; > 0. A
            connection that returns sooner loses nothing.
        transport: "openssh" (the `ssh` command, faster) or "paramiko". None takes the first that is installed.

    Raises:
        UsageError: an option is not legal; the message names it.

    Example:
        >>> ssh = SSH(hosts=["gpu1", "me@10.0.0.2:2222"], key_file="~/.ssh/id_ed25519")
        >>> ssh.targets[1].user, ssh.targets[1].port
        ('me', 2222)
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
            raise UsageError(
                f'SSH.hosts={self.hosts!r}: must be a list of at least one host; write hosts=["gpu1", "me@10.0.0.2:22"]'
            )
        if not is_positive(self.lease_s):
            raise UsageError(f"SSH.lease_s={self.lease_s!r}: must be a number of seconds > 0; set lease_s=60")
        if self.transport not in (None, "openssh", "paramiko"):
            raise UsageError(f'SSH.transport={self.transport!r}: unknown transport; set "openssh", "paramiko" or None')
        hosts = tuple(_host(host) for host in self.hosts)
        object.__setattr__(self, "hosts", hosts)
        if not isinstance(self.host_keys, str) and isinstance(self.host_keys, Sequence):
            object.__setattr__(self, "host_keys", tuple(self.host_keys))
        duplicates = sorted({str(t) for t in self.targets if self.targets.count(t) > 1})
        if duplicates:
            raise UsageError(
                f"SSH.hosts: {', '.join(duplicates)} listed twice; name each host once, and set concurrency= for more "
                "processes on one host"
            )

    @property
    def targets(self) -> tuple[SSHTarget, ...]:
        """Connection details of each host, in the order of `hosts`."""
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
        """Return one offer for all hosts, because their hardware is unknown until they are reached."""
        hosts = self.targets
        if spec.most_nodes > len(hosts):
            raise NoCapacity(
                f"ssh: nodes={spec.most_nodes} exceeds the {_count(len(hosts))} ({', '.join(map(str, hosts))}); "
                "add hosts, or request fewer nodes"
            )
        names = ", ".join(map(str, hosts))
        return [Offer(provider="ssh", instance_type=f"your own: {names}", vcpus=0, memory_gib=0.0)]

    def plan(self, spec: PoolSpec, offer: Offer, pool: str) -> list[SSHTarget]:
        """Return the hosts that the nodes would use, without connecting to any."""
        return list(self.targets[: spec.nodes])

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        """Launch each node on its previous host if it had one, or on a spare when a host is unreachable."""
        books = _books_of(pool, self.targets)
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
        """Shut the nodes down. An unreachable one is not an error: its watchdog stops it when its lease expires."""
        end([machine for machine in machines if isinstance(machine.handle, RemoteNodeHandle)])

    def clear_caches(self) -> dict[str, Cleared | SkywardError]:
        """Remove cached environments and code from the hosts, except those in use.

        Returns:
            By host: the removed and kept environments, or the error that prevented it.
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
            raise UsageError(
                f"SSH.hosts={dict(host)!r}: not a host; give `host`, and only these fields: {', '.join(sorted(known))}"
            )
        return SSHHost(**host)
    match = _HOST.fullmatch(host) if isinstance(host, str) else None
    address = match and (match["ip"] or match["bare"])
    if match is None or (address and not _is_ipv6(address)):
        raise UsageError(
            f'SSH.hosts={host!r}: not a host; write "name", "user@name", "user@name:port" or an SSHHost, and put an '
            'IPv6 address with a port in brackets: "user@[fd00::2]:22"'
        )
    port = int(match["port"]) if match["port"] else None
    return SSHHost(host=address or match["host"], user=match["user"], port=port)


def _is_ipv6(address: str) -> bool:
    try:
        ipaddress.IPv6Address(address)
    except ValueError:  # not an address
        return False
    return True


def _path(path: str | os.PathLike[str] | None) -> str | None:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _count(hosts: int) -> str:
    return "1 host" if hosts == 1 else f"{hosts} hosts"


def _host_keys(option: str | Sequence[str]) -> HostKeys:
    if option == "known_hosts":
        return HostKeys()
    if option == "accept-new":
        return HostKeys(policy="pin")
    is_word = isinstance(option, str) and " " not in option and not option.startswith("SHA256:")
    if is_word or not isinstance(option, Sequence) or not option or not all(isinstance(key, str) for key in option):
        raise UsageError(
            f'SSH.host_keys={option!r}: not a policy or a list of keys; set "known_hosts", "accept-new" or a list such '
            'as ["SHA256:..."]'
        )
    return HostKeys(policy="given", keys=(option,) if isinstance(option, str) else tuple(option))


class _Books:
    """Hosts of a pool's nodes, past and present: a replacement tries the node's old host first, then a free one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._host_of: dict[int, int] = {}

    def choose(self, tried: Mapping[int, set[int]], hosts: int) -> dict[int, int]:
        """Choose a host for each node, none that it has tried already. Raises NoCapacity."""
        with self._lock:
            for node, refused in tried.items():
                taken = {host for other, host in self._host_of.items() if other != node}
                first = [self._host_of[node]] if node in self._host_of else [node]
                fit = [h for h in (*first, *range(hosts)) if h < hosts and h not in taken | refused]
                if not fit:
                    raise NoCapacity(f"ssh: node {node}: no free host is left of {_count(hosts)}; add spare hosts")
                self._host_of[node] = fit[0]
            return {node: self._host_of[node] for node in tried}

    def has_spare(self, tried: Mapping[int, set[int]], hosts: int) -> bool:
        """Return whether one of these nodes could move to another host."""
        with self._lock:
            return len(set(self._host_of.values()).union(*tried.values())) < hosts

    def knows(self, nodes: Sequence[int]) -> bool:
        with self._lock:
            return any(node in self._host_of for node in nodes)


_books: dict[tuple[str, tuple[SSHTarget, ...]], _Books] = {}
_books_lock = threading.Lock()
_POOLS = 64


def _books_of(pool: str, hosts: tuple[SSHTarget, ...]) -> _Books:
    """Return the books of a pool on these hosts. Only the latest are kept, because no pool reports when it closes."""
    key = pool, hosts
    with _books_lock:
        if key not in _books and len(_books) >= _POOLS:
            del _books[next(iter(_books))]
        return _books.setdefault(key, _Books())
