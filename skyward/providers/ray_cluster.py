"""A Ray cluster that exists: each node is a bundle of a placement group, and is reached through the cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from ..bootstrap.ray.files import STUB, program, program_files
from ..core.bounds import is_positive
from ..core.frozenmap import FrozenMap
from ..core.interrupts import shielded
from ..core.records import dataclass
from ..core.signatures import checked_options
from ..errors import NoCapacity, ProviderError, SkywardError, Unreachable, UsageError
from ..events import Emit, PhaseEnded, PhaseFailed, PhaseOutput, PhaseStarted
from ..ssh import Connection, SSHResult, SSHTarget, connect
from ..ssh.commands import CommandConnection
from ..values.image import Image
from ..values.machine import Machine, Offer, PoolSpec
from .choice import requested_of
from .node_setup import Place, RemoteNodeHandle
from .remote import bring_up, end
from .ssh_host import SSHHost, read_host, target_of

_LEAST_RAY = (2, 50)
_LEAST_PYTHON = (3, 11)
_START_S = 90.0
"""Seconds for the driver to start and for Ray to take it; the driver itself gives up earlier."""
_ASK_S = 30.0
_SPARE_S = 60.0
"""Seconds that the driver may answer later than it was told to wait."""
_NO_CONNECTION = 255
_PHASE = "placement group"
_FACTS = """
import json, sys
try:
    import importlib.metadata
    ray = importlib.metadata.version("ray")
except Exception:
    ray = ""
print(json.dumps([".".join(map(str, sys.version_info[:3])), ray]))
"""
"""Program for any Python 3, so that an old one can be named in an error."""
_RESOURCES = {"aws": "neuron_cores", "google": "TPU"}
"""Ray's names of the accelerators of a vendor; all others are GPUs."""


@checked_options
@dataclass(frozen=True)
class RayCluster:
    """Nodes on a Ray cluster that exists: on Kubernetes (KubeRay), a managed one, or a lab's own; Ray 2.50 or newer.

    A pool asks the cluster for a placement group with a bundle for each node, all on different machines. So the
    cluster's own autoscaler may add machines. Nothing of the pool's stays there when it has ended. This machine needs
    no Ray.

    Tasks run in the cluster's Python, with all its packages, whose minor version must be that of this Python. If the
    image names packages, they run in an environment of their own. No task runs in a process of Ray's.

    Args:
        shell: A machine of the cluster: an SSH host, as `SSH` takes it, or a command that runs the command behind it
            on such a machine, such as ["kubectl", "exec", "-i", "head", "--"].
        address: Address of the cluster for `ray.init` on that machine.
        python: Interpreter of the cluster on that machine: a name, or a path.
        resources: Further resources of Ray's that each node needs, such as {"big_disk": 1}. {"CPU": 0} asks for no
            processor; otherwise it is `vcpus` of the pool, or 1.
        lease_s: Seconds after which a node shuts itself down when it has lost contact with this machine; > 0.

    Raises:
        UsageError: An option is not legal; the message names it.

    Example:
        >>> cluster = RayCluster(["kubectl", "exec", "-i", "head", "--"], resources={"big_disk": 1})
        >>> cluster.python
        'python3'
    """

    name: ClassVar[str] = "ray_cluster"
    extra: ClassVar[str] = ""
    acts_on_image: ClassVar[frozenset[str]] = frozenset(f.name for f in dataclasses.fields(Image)) - {"container"}
    shares_files: ClassVar[bool] = False
    is_rented: ClassVar[bool] = False

    shell: str | SSHHost | Sequence[str]
    _: dataclasses.KW_ONLY
    address: str = "auto"
    python: str = "python3"
    resources: Mapping[str, float] = FrozenMap()  # immutable
    lease_s: float = 60.0

    def __post_init__(self) -> None:
        if isinstance(self.shell, str):
            _check_host(self.shell)
        if isinstance(self.shell, str | SSHHost):
            object.__setattr__(self, "shell", read_host(self.shell, "RayCluster.shell"))
        elif _is_command(self.shell):
            object.__setattr__(self, "shell", tuple(self.shell))
        else:
            raise UsageError(
                f'RayCluster.shell={self.shell!r}: neither a host nor a command; write "user@host" or '
                '["kubectl", "exec", "-i", "POD", "--"]'
            )
        for field in ("address", "python"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field):
                raise UsageError(
                    f"RayCluster.{field}={getattr(self, field)!r}: must be a text; leave it out for the usual"
                )
        if not isinstance(self.resources, Mapping):
            raise UsageError(f'RayCluster.resources={self.resources!r}: must be a dict; write resources={{"disk": 1}}')
        for name, amount in self.resources.items():
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
                raise UsageError(f"RayCluster.resources[{name!r}]={amount!r}: must be a number >= 0; set 1")
        object.__setattr__(self, "resources", FrozenMap(self.resources))
        if not is_positive(self.lease_s):
            raise UsageError(f"RayCluster.lease_s={self.lease_s!r}: must be a number of seconds > 0; set lease_s=60")

    # The protocol -----------------------------------------------------------------------------------------------------

    def offers(self, spec: PoolSpec) -> list[Offer]:
        """Return one offer, the cluster: what is free there, and what it may add, is Ray's to say."""
        if spec.image.container:
            raise UsageError(
                f"Image.container={spec.image.container!r}: nodes of a Ray cluster run on its machines as they "
                "are; leave it out, or use sky.SSH"
            )
        cores, memory = spec.vcpus or 0, spec.memory_gib or 0.0
        return [
            Offer(provider="ray_cluster", instance_type=f"Ray through {self.where}", vcpus=cores, memory_gib=memory)
        ]

    def plan(self, spec: PoolSpec, offer: Offer, pool: str) -> list[dict[str, float | str]]:
        """Return the bundle of each node, without a connection to the cluster."""
        return [self._bundle(spec)] * spec.nodes

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        """Launch nodes where Ray has room for them. A node that was lost gets its bundle again, wherever it is now."""
        cluster = _cluster_of(pool, self)
        try:
            with _phase(nodes, emit):
                facts = cluster.place({node: self._bundle(spec) for node in nodes}, spec, _telling(nodes, emit))
        except BaseException:
            shielded(lambda: cluster.release({}))
            raise
        places = [cluster.place_of(node, facts[node], has_own=_is_plain(spec.image)) for node in nodes]
        try:
            return bring_up(places, spec, pool, nodes, emit, lease_s=self.lease_s)
        except BaseException:
            shielded(lambda: cluster.release({place.node: place.ticket for place in places}))
            raise

    def terminate(self, machines: list[Machine]) -> None:
        """Shut the nodes down, and give their room back. A node that cannot be reached ends with its lease."""
        nodes = [machine for machine in machines if isinstance(machine.handle, RemoteNodeHandle)]
        end(nodes)
        tickets: dict[_Cluster, dict[int, str]] = {}
        for machine in nodes:
            place = machine.handle.place
            assert isinstance(place, _Bundle)
            tickets.setdefault(place.cluster, {})[machine.node] = place.ticket
        for cluster, theirs in tickets.items():
            cluster.release(theirs)

    @property
    def where(self) -> str:
        """Name of the way into the cluster, for messages."""
        return str(self.shell.host) if isinstance(self.shell, SSHHost) else os.path.basename(str(self.shell[0]))

    def _bundle(self, spec: PoolSpec) -> dict[str, float | str]:
        bundle: dict[str, float | str] = {"CPU": spec.vcpus or 1}
        if spec.memory_gib is not None:
            bundle["memory"] = int(spec.memory_gib * 2**30)
        if spec.accelerator is not None:
            bundle[_RESOURCES.get(str(spec.accelerator.metadata.get("vendor")), "GPU")] = spec.accelerator.count
            bundle["accelerator"] = spec.accelerator.name
        bundle |= self.resources
        return {name: amount for name, amount in bundle.items() if amount}


def _check_host(shell: str) -> None:
    """Refuse a text that is another thing than a host, and say how that is written. Raises UsageError."""
    if "://" in shell:
        raise UsageError(
            f'RayCluster.shell={shell!r}: an address, which leads to no machine; write "user@host", and '
            f"address={shell!r} if ray.init needs it there"
        )
    if len(shell.split()) > 1:
        raise UsageError(f"RayCluster.shell={shell!r}: a command in one text; write a list: {shlex.split(shell)!r}")


def _is_command(shell: object) -> bool:
    return isinstance(shell, Sequence) and bool(shell) and all(isinstance(word, str) and word for word in shell)


def _is_plain(image: Image) -> bool:
    """Return whether tasks can run in the cluster's own Python: the image installs nothing for it."""
    return not (image.pip or image.lock or image.pip_indexes or image.run)


@contextlib.contextmanager
def _phase(nodes: list[int], emit: Emit) -> Iterator[None]:
    began = time.monotonic()
    for node in nodes:
        emit(PhaseStarted(node=node, phase=_PHASE))
    try:
        yield
    except BaseException as error:
        for node in nodes:
            emit(PhaseFailed(node=node, phase=_PHASE, seconds=time.monotonic() - began, reason=str(error)))
        raise
    for node in nodes:
        emit(PhaseEnded(node=node, phase=_PHASE, seconds=time.monotonic() - began))


def _telling(nodes: list[int], emit: Emit) -> Callable[[str], None]:
    return lambda text: emit(PhaseOutput(node=nodes[0], phase=_PHASE, text=text))


# The cluster of a pool ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Bundle(Place):
    """Place of a node in a cluster. `ticket` tells this stay in the bundle from later ones."""

    cluster: _Cluster
    node: int
    ticket: str


class _Cluster:
    """A pool's way into a cluster: a driver there, which the first launch starts. Thread-safe."""

    def __init__(self, pool: str, provider: RayCluster) -> None:
        self._pool, self._provider = pool, provider
        self._starting = threading.Lock()
        self._shell: Connection | None = None
        self._name = ""
        """Name of the driver's folder."""
        self._stub = ""
        """Line of sh that starts the stub there, without its last arguments."""

    # Room -----------------------------------------------------------------------------------------------------------

    def place(
        self, bundles: dict[int, dict[str, float | str]], spec: PoolSpec, tell: Callable[[str], None]
    ) -> dict[int, dict[str, str]]:
        """Return facts about the nodes that the bundles got. Raises NoCapacity, ProviderError, UsageError."""
        with self._starting:
            if not self._answers():
                self._start(spec)
        limit_s = spec.provision_timeout_s
        answers = self._ask({"place": bundles, "limit_s": limit_s}, limit_s + _SPARE_S, spec.stop, tell)
        last = answers[-1] if answers else {}
        where = self._provider.where
        if "lacking" in last:
            resources = self._provider.resources
            asked = {**requested_of(spec), **({"resources": resources} if resources else {}), "nodes": spec.nodes}
            asked.pop("architecture", None)  # bundles do not have it
            field, value = next(iter(asked.items()))
            raise NoCapacity(
                f"ray_cluster {where}: no room after {limit_s:g} s: {last['lacking']}; ask for less, "
                "let the cluster grow, or set provision_timeout_s to more",
                field=field,
                value=value,
            )
        if "placed" not in last:
            why = last.get("problem", "no answer")
            raise ProviderError(
                f"ray_cluster {where}: no bridge to its nodes ({why}); see `ray status` there", retryable=True
            )
        return {int(node): facts for node, facts in last["placed"].items()}

    def release(self, tickets: dict[int, str]) -> None:
        """Give room back. Without nodes, the driver ends. A cluster that does not answer does so by itself."""
        if not self._stub:
            return
        with contextlib.suppress(SkywardError, TimeoutError):
            self._ask({"release": tickets}, _ASK_S)

    def place_of(self, node: int, facts: Mapping[str, str], *, has_own: bool) -> _Bundle:
        """Return the place of a node that has its bundle."""
        name = f"{self._provider.where}/node-{node}"
        return _Bundle(
            target=SSHTarget(host=name),
            private_address=facts["address"],
            connect=functools.partial(self._connection, name, node, facts["python"]),
            python=facts["python"] if has_own else "",
            cluster=self,
            node=node,
            ticket=facts["ticket"],
        )

    def _connection(self, name: str, node: int, python: str) -> Connection:
        shell, stub = self._shell, self._stub
        assert shell is not None
        dial = shlex.join([python, "-S", "-E", "-s", "-c", program("bootstrap/ray/stub.py"), "", "dial"])
        return CommandConnection(
            name,
            lambda line: shell.argv(f"{stub} run {node} {shlex.quote(line)}"),
            by="ray_cluster",
            dialled=lambda port: f"exec {dial} {port}",
        )

    # The driver -----------------------------------------------------------------------------------------------------

    def _answers(self) -> bool:
        if self._shell is None:
            return False
        try:
            return bool(self._ask({"ended": ""}, _ASK_S))
        except (SkywardError, TimeoutError):
            return False

    def _run(self, line: str, timeout_s: float, **options: Any) -> SSHResult:
        """Run a command through the shell. Raises Unreachable: it did not end in time, so the shell may hang."""
        assert self._shell is not None
        try:
            return self._shell.run(line, timeout_s=timeout_s, **options)
        except TimeoutError as error:
            where = self._provider.where
            text = f"ray_cluster {where}: no answer within {timeout_s:g} s; check `shell`, and the cluster"
            raise Unreachable(text, host=where, is_final=False) from error

    def _ask(
        self,
        question: dict[str, Any],
        timeout_s: float,
        stop: threading.Event | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> list[dict[str, Any]]:
        assert self._shell is not None
        answers: list[dict[str, Any]] = []

        def on_line(line: str) -> None:
            with contextlib.suppress(ValueError):  # of a start-up file of the shell
                answer = json.loads(line)
                answers.append(answer)
                if tell is not None and "waits" in answer:
                    tell(answer["waits"])

        line = f"{self._stub} ask {shlex.quote(json.dumps(question))}"
        done = self._run(line, timeout_s, on_line=on_line, stop=stop)
        if done.code == _NO_CONNECTION:
            where = self._provider.where
            raise Unreachable(f"ray_cluster {where}: {done.error_text}; check the cluster", host=where, is_final=False)
        return answers

    def _start(self, spec: PoolSpec) -> None:
        provider = self._provider
        if self._shell is None:
            self._shell = self._open(spec)
        name = f"{re.sub('[^A-Za-z0-9]', '', self._pool)[:12]}-ray-{os.urandom(3).hex()}"
        order = {"address": provider.address, "pool": self._pool, "lease_s": provider.lease_s}
        before, self._name = self._name, name
        start = json.dumps({"name": name, "before": before, "files": program_files(), "order": order}).encode()
        self._check(spec)
        python = provider.python
        line = f"exec {shlex.join([python, '-c', program('bootstrap/ray/start.py')])}"
        done = self._run(line, _START_S, input=start, stop=spec.stop)
        answer = json.loads(done.text.splitlines()[-1]) if done.text else {"log": done.error_text}
        if "listens" not in answer:
            why = answer.get("problem") or answer["log"].strip() or "no answer"
            raise ProviderError(
                f"RayCluster.address={provider.address!r}: Ray through {provider.where}: {why}; see `ray status` there"
            )
        stub = f"{os.path.dirname(answer['listens'])}/{STUB}"
        self._stub = f"exec {shlex.join([python, '-S', '-E', '-s', stub, answer['listens']])}"

    def _check(self, spec: PoolSpec) -> None:
        """Refuse an interpreter of the cluster, or a Ray, that is of no use. Raises UsageError."""
        assert self._shell is not None
        provider, minor = self._provider, ".".join(spec.image.python_version.split(".")[:2])
        done = self._run(f"exec {shlex.join([provider.python, '-c', _FACTS])}", _ASK_S, stop=spec.stop)
        if done.code == _NO_CONNECTION:
            raise Unreachable(f"ray_cluster {provider.where}: {done.error_text}; check `shell`", host=provider.where)
        if done.code:
            raise _refused(
                provider,
                f"does not run ({done.error_text or f'exit code {done.code}'}); name the cluster's Python by its path",
            )
        python, ray = json.loads(done.text.splitlines()[-1])
        if _numbers(python) < _LEAST_PYTHON:
            least = ".".join(map(str, _LEAST_PYTHON))
            raise _refused(
                provider, f"is Python {python}, and skyward needs {least}; install a cluster with Python {minor}"
            )
        if _is_plain(spec.image) and not f"{python}.".startswith(f"{minor}."):
            raise _refused(
                provider,
                f"is Python {python}, and this is {minor}; install Python {minor} and Ray there, run this "
                f"program in Python {'.'.join(python.split('.')[:2])}, or list the packages in Image(pip=[...])",
            )
        if not ray:
            raise _refused(provider, f"Python {python} has no Ray; name the cluster's own Python by its path")
        if _numbers(ray) < _LEAST_RAY:
            least = ".".join(map(str, _LEAST_RAY))
            raise _refused(provider, f"has Ray {ray}, and skyward needs {least}; install 'ray>={least}' on the cluster")

    def _open(self, spec: PoolSpec) -> Connection:
        shell = self._provider.shell
        if isinstance(shell, SSHHost):
            return connect(target_of(shell), stop=spec.stop, timeout_s=spec.provision_timeout_s)
        words = [str(word) for word in shell]
        if shutil.which(words[0]) is None:
            raise UsageError(f"RayCluster.shell={words!r}: there is no command {words[0]!r} here; install it")
        return CommandConnection(self._provider.where, lambda line: [*words, "sh", "-c", line], by="command")


def _refused(provider: RayCluster, problem: str) -> UsageError:
    message = f"RayCluster.python={provider.python!r}: through {provider.where}: {problem}"
    return UsageError(message, field="python", value=provider.python)  # words: ok, each problem says what to do


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


_clusters: dict[tuple[str, str], _Cluster] = {}
_clusters_lock = threading.Lock()
_POOLS = 64


def _cluster_of(pool: str, provider: RayCluster) -> _Cluster:
    """Return the way of a pool into its cluster. Only the latest are kept, because no pool reports when it closes."""
    with _clusters_lock:
        key = pool, repr(provider)
        if key not in _clusters and len(_clusters) >= _POOLS:
            del _clusters[next(iter(_clusters))]
        return _clusters.setdefault(key, _Cluster(pool, provider))
