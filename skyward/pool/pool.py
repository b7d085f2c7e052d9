"""The pool, as users hold it: its options, and some of its nodes as targets of calls.

What starts and ends it is `pool_life`, its machines are `pool_machines`, its calls `targets`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future as StdFuture
from typing import Any, Literal, Self, Unpack

from ..accelerators import Accelerator
from ..calls.compute import PendingCompute
from ..calls.control import Client
from ..console.announcer import EventStream
from ..core.signatures import checked_options
from ..core.user_lines import drop_our_frames
from ..errors import SkywardError, UsageError
from ..events import Event
from ..node.slot.handle import TargetHandle
from ..providers.base import Provider, least_billed_s
from ..values.allocation import AllocationStrategy
from ..values.image import DEFAULT_IMAGE, Image
from ..values.machine import LogSink, Offer, PoolSpec
from .config import of_file, pool_fields
from .cost import Forecast, forecast
from .life import PoolLife
from .options import ALIASES, PoolAliases, check_nodes, check_options, check_roles, is_pool_name
from .remote_control import control_of
from .targets import PoolSender, PoolTarget

__all__ = ["ComputePool", "NodeCount", "NodeTarget"]


@checked_options(aliases=ALIASES, check=check_options)
class ComputePool(PoolTarget):
    """Machines to send calls to, made when the block is entered and gone when it is left.

    Leaving the block waits for calls that are still open, and closes streams that were not read to their end; leaving
    it by an exception (Ctrl-C too) cancels them. If this process dies, however it dies, its nodes end within `lease_s`.
    Thread-safe; several pools may be open at once. Instead of `with`, `start()` and `close()` may be used (a notebook:
    open in one cell, use in others).

    Args:
        provider: where machines come from: `sky.Local()`, `sky.SSH(hosts=[...])`, `sky.AWS(...)`.
        nodes: number of nodes, >= 1.
        roles: nodes that are kept for something: `roles={"evaluation": [2]}`. They take only the calls that are sent
            to `pool.role("evaluation")`, or to such a node by its number; `>> pool`, `@ pool`, map and the rest use
            the other nodes, of which there must be one.
        concurrency: slots on each node, >= 1: so many plain calls run there at once.
        accelerator: of each node: a name ("A100") or a value of `sky.accelerators`; None: none is asked for. A name is
            one device, with the largest memory that it is sold with; on rented machines both must be just these.
        vcpus, memory_gib, architecture: of each node, at least; None: whatever there is.
        allocation: "spot", "on-demand", "spot-if-available" or "cheapest".
        image: what is installed and set on the nodes.
        executor: "process": a process for each slot. "thread": the slots of a node are threads of one process; they
            share its memory and its GIL, a running call cannot be killed, and C-level output is tagged by node only.
        logs: True prints the calls' output here as it comes, each line with its node; False drops it; a function is
            called with each `LogLine`, in order, by a thread of its own. One that blocks loses the oldest lines.
            `sky.LogFiles(folder)` keeps a file for each rank.
        preload: modules that each node imports once, before its slots are forked, which then share them: with many
            slots the first calls come sooner, and memory is saved. One that starts a thread, or fails to be imported,
            makes nothing faster and breaks nothing.
        initializer, initargs: run once in each process before its first call.
        default_timeout_s: for calls that set no `timeout_s`; None: no limit.
        max_inflight: calls of a map on their way at once; None: two for each slot.
        max_hourly_cost: USD per hour for the whole pool at most; None: no limit.
        budget_usd: for the whole pool, from its first machine to the end of its last; None: no limit. Nothing is
            launched that would cost more even if it were given back at once. At 80 % there is a `BudgetWarning`;
            before the rest is spent the pool is closed, and open calls raise BudgetExceeded.
        cancel_grace_s: seconds between the SIGINT and the SIGKILL of a call that is cancelled, >= 0.
        provision_timeout_s: seconds that machines may take to come up, > 0.
        on_event: called with each event of the pool (see `skyward.events`), in order, by a thread of ours. What it
            raises is reported once and harms nothing.
        console: what is shown on standard error. None: on a terminal a few lines at its bottom that follow the nodes,
            plain lines elsewhere, a line in a notebook; of `sky.Local()`, which starts in a moment, only what goes
            wrong, and on a terminal the lines after two seconds. True: all of it, always. False: nothing.
        name: what `skyward ls`, `logs`, `ssh` and `down` call it: letters, digits, "-", "_" and ".". A process has one
            open pool of a name; in a notebook the next one closes it, as does a pool assigned to the same variable.

    Raises:
        UsageError: a field is out of its range; the message names it.
        ProviderError: on entering, when the machines cannot be had.

    Example:
        >>> import skyward as sky
        >>> @sky.compute
        ... def double(x: int) -> int:
        ...     return 2 * x
        >>> with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        ...     double(21) >> pool
        42
    """

    def __init__(  # noqa: PLR0913  # keyword-only options
        self,
        provider: Provider,
        *,
        nodes: int = 1,
        roles: Mapping[str, Sequence[int]] | None = None,
        concurrency: int = 1,
        accelerator: str | Accelerator | None = None,
        vcpus: int | None = None,
        memory_gib: float | None = None,
        architecture: Literal["x86_64", "arm64"] | None = None,
        allocation: AllocationStrategy = "spot-if-available",
        image: Image | None = None,
        executor: Literal["process", "thread"] = "process",
        logs: bool | LogSink = True,
        preload: Sequence[str] = (),
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        default_timeout_s: float | None = None,
        max_inflight: int | None = None,
        max_hourly_cost: float | None = None,
        budget_usd: float | None = None,
        cancel_grace_s: float = 3.0,
        provision_timeout_s: float = 300.0,
        on_event: Callable[[Event], object] | None = None,
        console: bool | None = None,
        name: str | None = None,
        **aliases: Unpack[PoolAliases],
    ) -> None:
        self.provider = provider
        self._roles = check_roles(roles, nodes)
        self.concurrency = concurrency
        self._max_inflight = max_inflight
        self._budget_usd = budget_usd
        kept = frozenset(itertools.chain.from_iterable(self._roles.values()))
        spec = PoolSpec(
            nodes=nodes,
            concurrency=concurrency,
            executor=executor,
            accelerator=Accelerator.from_name(accelerator) if isinstance(accelerator, str) else accelerator,
            vcpus=vcpus,
            memory_gib=memory_gib,
            architecture=architecture,
            allocation=allocation,
            image=image or DEFAULT_IMAGE,
            preload=tuple(preload),
            max_hourly_cost=max_hourly_cost,
            cancel_grace_s=cancel_grace_s,
            provision_timeout_s=provision_timeout_s,
        )
        self._life = PoolLife(
            self,
            provider,
            spec,
            # Part of the path of sockets, which is short.
            name=f"{(name or 'pool')[:15]}-{uuid.uuid4().hex[:8]}",
            label=name or "",
            kept=kept,
            initializer=None if initializer is None else (initializer, tuple(initargs)),
            default_timeout_s=default_timeout_s,
            budget_usd=budget_usd,
            logs=logs,
            console=console,
            on_event=on_event,
        )
        ordinary = tuple(node for node in range(nodes) if node not in kept)
        self._sender = self._sender_to(ordinary, is_whole=True)

    @classmethod
    def named(cls, name: str, **overrides: Any) -> ComputePool:
        """The pool that `skyward.toml`, or a file of the user's own, calls so; see `skyward.pool.config`.

        Args:
            overrides: arguments of ComputePool that win over those of the files.

        Raises:
            UsageError: there is no such pool, or something in the files is wrong: where, and what may stand there.
            MissingDependency: its provider needs an extra that is not installed.
        """
        fields = pool_fields(name, cls.__init__)
        overrides = {ALIASES.get(key, key): value for key, value in overrides.items()}
        if "name" not in overrides and is_pool_name(name):
            fields["name"] = name
        try:
            return cls(**{**fields, **overrides})
        except UsageError as error:
            raise (error if overrides or type(error) is not UsageError else of_file(name, error)) from error

    Named = named

    def _sender_to(self, nodes: tuple[int, ...], *, is_whole: bool = False) -> PoolSender:
        return PoolSender(
            self._life.running,
            nodes,
            is_whole=is_whole,
            slots=len(nodes) * self.concurrency,
            max_inflight=self._max_inflight,
        )

    # Life -----------------------------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether calls can be sent now."""
        return self._life.is_active

    @property
    def nodes(self) -> NodeCount:
        """The number of nodes. Called, it gives some of them as a target of calls: `pool.nodes([0, 2])`."""
        return NodeCount(self.spec.nodes, self)

    def node(self, number: int) -> NodeTarget:
        """One node, as a target of calls: `f(x) >> pool.node(1)`; `number` in [0, nodes). Raises UsageError."""
        (chosen,) = check_nodes("node", (number,), self.spec.nodes)
        return NodeTarget(self, (chosen,), f"node {chosen}")

    def role(self, name: str) -> NodeTarget:
        """The nodes that are kept for a role, as a target of calls. Raises UsageError: there is no such role."""
        if name not in self._roles:
            there = ", ".join(map(repr, self._roles)) or "none; give ComputePool(roles={...})"
            raise UsageError(f"role: {name!r} is no role of this pool; there are: {there}", field="role")
        return NodeTarget(self, self._roles[name], f"role {name!r}")

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """By name: the nodes that are kept for it."""
        return dict(self._roles)

    @property
    def name(self) -> str:
        """The name that its user gave it, or empty."""
        return self._life.label

    @property
    def job_id(self) -> str:
        """The name of this pool and no other, which `sky.instance_info().job_id` is in its calls."""
        return self._life.name

    def __reduce__(self) -> tuple[Any, ...]:
        """In a call's arguments it becomes a handle, which is a target of calls there; see `TargetHandle`."""
        return TargetHandle, (self.job_id, self.node_numbers, True, "the whole", self.total_slots)

    @property
    def spec(self) -> PoolSpec:
        """What the pool asks of its provider."""
        return self._life.spec

    def events(self) -> EventStream:
        """What happens to the pool from now on, as it comes: an iterator of `skyward.events`.

        Any thread may read it, and there may be several. It ends when the pool is closed. At most 10,000 events wait in
        it; then the oldest are dropped, and `EventsDropped` says how many. To see the pool start, ask before
        it is entered.
        """
        return self._life.announcer.listen()

    def offers(self) -> list[Offer]:
        """What the provider has for this pool now, in the order in which it would be tried. Rents nothing."""
        return self.provider.offers(self.spec)

    def plan(self) -> list[Any]:
        """Exactly what would be asked of the provider for the first offer. Sends nothing that changes anything."""
        return self.provider.plan(self.spec, self.offers()[0], self.job_id)

    def forecast(self) -> Forecast:
        """What the pool would cost by its first offer. Rents nothing; raises BudgetExceeded if it may not start."""
        minimum_s = least_billed_s(self.provider)
        return forecast(self.offers(), nodes=self.spec.nodes, minimum_s=minimum_s, budget_usd=self._budget_usd)

    def agent_pids(self) -> dict[int, int]:
        """By node: the process id of its agent, on that node's machine. A node that is being replaced is not in it.

        For tests and tools (see `skyward.testing.Faults`); calls need none of it.
        """
        engine, _ = self._life.running()
        return engine.nodes.agent_pids()

    @property
    def cost_usd(self) -> float:
        """What its machines have cost until now, by the prices of their offers; 0 where nothing is rented."""
        return self._life.cost_usd

    def start(self) -> Self:
        """Make the machines and connect to them; what fails, or is interrupted, leaves nothing behind.

        In a notebook it first closes the open pool of the same name, and the one in whose variable it will be.

        Raises:
            UsageError: it is open already; elsewhere, another open pool of this process has its name.
        """
        self._life.start(self, sys._getframe())
        return self

    def give_way(self, why: str) -> None:
        """Close for another pool: open calls, and later ones, raise PoolClosed. For notebooks, see `replacing`."""
        self._life.give_way(why)

    def close(self, *, cancel: bool = False) -> None:
        """Wait for open calls (`cancel`: stop them instead), then end the machines. Idempotent."""
        self._life.close(cancel=cancel)

    def __enter__(self) -> Self:
        try:
            try:
                return self.start()
            except SkywardError as error:
                drop_our_frames(error)
                raise
        except KeyboardInterrupt:  # it may come when all is done, and then nobody calls __exit__
            self.close(cancel=True)
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(cancel=kind is not None)

    def __del__(self) -> None:
        life = getattr(self, "_life", None)  # there is none where an option was refused
        if life is not None and life.is_active and not sys.is_finalizing():
            warnings.warn(f"{self!r} was never closed; use `with`, or call close()", ResourceWarning, stacklevel=2)
            with contextlib.suppress(Exception):  # `__del__` must not raise, and the keeper ends what is left
                self.close(cancel=True)

    def __repr__(self) -> str:
        state = "open" if self.is_active else "closed"
        count = self.spec.nodes
        return f"<ComputePool {self.job_id} {self.provider!r} nodes={count} concurrency={self.concurrency} {state}>"

    def control(
        self,
        task: StdFuture[Any] | PendingCompute[Any] | str | None = None,
        *,
        job_id: str | None = None,
        start_s: float = 60.0,
    ) -> Client:
        """Control of a training run in a call that is open here: its status, and to save, stop or abort it.

        It reaches the run's `skyward.training.TrainerControlCallback` by the channel that the pool has to the node
        anyway, on any provider; no port is opened. In a gang rank 0 answers.

        Args:
            task: the call: its future, the pending call that was sent, or its name. None: the only one that is open.
            job_id: of the run; None: the only one in that call.
            start_s: how long to wait until the run has begun, when it is asked for the first time.

        Raises:
            UsageError: `task` is not one call. Everything else is raised when the run is asked, as ControlFailed.
        """
        self._life.running()
        return control_of(lambda: self._life.running()[0], task, job_id, start_s)


class NodeTarget(PoolTarget):
    """Some nodes of a pool, as a target of calls: `f(x) >> pool.node(1)`. Made by a pool; lives no longer than it.

    `>>` and `>` send to one of these nodes, whichever has room; `@` to each of them, in the order in which they were
    named. A function under an integration runs as a gang on one of them, or on all. `map` and `executor` use their
    slots and no others.

    A call to these nodes waits for them and goes to no other. When such a node is lost, a call that had been sent to
    it fails with NodeLost, unless its `retries` allow another run; one that had not been sent waits for the machine
    that takes the node's place. If no machine does, calls that could go to that node only fail with NodeLost.

    Example:
        >>> import skyward as sky
        >>> with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        ...     node = pool.node(1)
        ...     sky.compute(lambda: sky.instance_info().node)() >> node
        1
    """

    def __init__(self, pool: ComputePool, nodes: tuple[int, ...], label: str) -> None:
        self._pool = pool
        self._label = label
        self._sender = pool._sender_to(nodes)

    @property
    def pool(self) -> ComputePool:
        """The pool that they belong to."""
        return self._pool

    def __reduce__(self) -> tuple[Any, ...]:
        """In a call's arguments it becomes a handle, which is a target of calls there; see `TargetHandle`."""
        return TargetHandle, (self._pool.job_id, self.node_numbers, False, self._label, self.total_slots)

    def __repr__(self) -> str:
        return f"<{self._label} of {self._pool!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeTarget) and (other._pool is self._pool) and other.node_numbers == self.node_numbers

    def __hash__(self) -> int:
        return hash((id(self._pool), self.node_numbers))


class NodeCount(int):
    """`pool.nodes` is how many nodes there are, and may be called: `pool.nodes([0, 2])` is those two of them."""

    _pool: ComputePool

    def __new__(cls, count: int, pool: ComputePool) -> Self:
        made = super().__new__(cls, count)
        made._pool = pool
        return made

    def __call__(self, numbers: Iterable[int]) -> NodeTarget:
        """Those nodes, as a target of calls; each number in [0, nodes), at least one and none twice.

        Raises UsageError.
        """
        chosen = check_nodes("nodes", numbers, int(self))
        return NodeTarget(self._pool, chosen, f"nodes {', '.join(map(str, chosen))}")

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)
