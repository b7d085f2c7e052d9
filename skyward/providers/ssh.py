"""Your own machines, reached over SSH."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..bootstrap.scripts import Cleared, clear_cache
from ..core.bounds import is_positive
from ..core.records import dataclass
from ..core.signatures import checked_options
from ..errors import NoCapacity, SkywardError, Unreachable, UsageError
from ..events import Emit, ignore
from ..ssh import SSHTarget, connect
from ..ssh.connect import Transport
from ..ssh.target import check_login
from ..values.image import Image
from ..values.machine import Machine, Offer, PoolSpec
from .detached import describe_machine, reach_machine
from .node_setup import Place, RemoteNodeHandle
from .remote import bring_up, end, let_go
from .ssh_host import SSHHost, read_host, target_of

_CONNECT_S = 30.0
"""Seconds that a host gets to answer if it should be up, or if a spare host can take its place.

A lost host without a spare may be rebooting, so it gets the pool's `provision_timeout_s` instead."""


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
        check_login(self)
        hosts = tuple(read_host(host, "SSH.hosts") for host in self.hosts)
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
        own = {name: getattr(host, name) for name in ("user", "port", "key_file", "jump", "host_keys")}
        general = {name: getattr(self, name) if value is None else value for name, value in own.items()}
        target = target_of(dataclasses.replace(host, **general), config_file=self.config_file)
        return Place(target=target, private_address=host.private_address)

    # The protocol -----------------------------------------------------------------------------------------------------

    def offers(self, spec: PoolSpec) -> list[Offer]:
        """Return one offer for all hosts, because their hardware is unknown until they are reached."""
        hosts = self.targets
        if spec.most_nodes > len(hosts):
            raise NoCapacity(
                f"ssh: nodes={spec.most_nodes} exceeds the {_count(len(hosts))} ({', '.join(map(str, hosts))}); "
                "add hosts, or request fewer nodes",
                field="nodes",
                value=spec.most_nodes,
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

    def fields(self) -> dict[str, Any]:
        """Return the arguments that make this provider again, as plain data."""
        described = dataclasses.asdict(self)
        for table in (described, *described["hosts"]):
            table["key_file"] = _as_text(table["key_file"])
        return {**described, "config_file": _as_text(self.config_file), "hosts": list(described["hosts"])}

    def describe(self, machine: Machine) -> dict[str, Any]:
        """Return what another process needs to reach a node of a detached pool."""
        return describe_machine(machine)

    def reach(self, description: dict[str, Any], emit: Emit = ignore) -> Machine:
        """Reach a node again that `describe` has described. Raises what connecting raises."""
        return reach_machine(description, self.transport)

    def leave(self, machines: list[Machine]) -> None:
        """Close the connections of this process to nodes that go on."""
        let_go(machines)

    def resume(self, pool: str, descriptions: list[dict[str, Any]]) -> None:
        """Learn on which hosts the nodes of a pool are that another process has launched."""
        hosts = [(target.host, target.port, target.user) for target in self.targets]
        books = _books_of(pool, self.targets)
        for each in descriptions:
            target = each["place"]["target"]
            books.note(each["node"], hosts.index((target["host"], target["port"], target["user"])))

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
            except TimeoutError as error:
                text = f"ssh: {target} does not answer ({error}); see what its disks wait for"
                outcomes[str(target)] = Unreachable(text, host=str(target), is_final=False)
        return outcomes


def _as_text(path: str | os.PathLike[str] | None) -> str | None:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _count(hosts: int) -> str:
    return "1 host" if hosts == 1 else f"{hosts} hosts"


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

    def note(self, node: int, host: int) -> None:
        """Note the host of a node, unless this process has moved it."""
        with self._lock:
            self._host_of.setdefault(node, host)

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
