"""`ComputePool` as users hold it: its options, its lifecycle, and its nodes as targets of calls.

`life` starts and ends a pool, `machines` has its machines, and `targets` sends its calls. Almost half of the lines here
tell users what each option and method does.
"""

from __future__ import annotations

import itertools
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

from ..accelerators import Accelerator
from ..console.announcer import EventStream
from ..console.words import usd
from ..core import interrupts
from ..core.html import card
from ..core.signatures import checked_options
from ..core.user_lines import drop_our_frames
from ..errors import ArgumentNotPicklable, CheckpointSaveFailed, SkywardError, UsageError
from ..events import Event
from ..providers.base import Provider, least_billed_s
from ..providers.choice import Selection
from ..values.allocation import AllocationStrategy
from ..values.image import DEFAULT_IMAGE, Image
from ..values.machine import LogSink, Offer, PoolSpec
from ..values.nodes import Nodes
from ..values.pinned import refuse_to_keep
from ..values.ref import Ref
from ..values.volume import Volume, check_volumes
from ..wire.task_channel import loss_of
from .attach_file import adopt
from .cost import Forecast, forecast
from .detached_access import DetachedAccess
from .detaching import Detachment, attachable, check_detached, provider_of
from .engines import RAY_AFTER_S, EngineName, Way, choose_way
from .life import PoolLife
from .node_access import NodeAccess
from .options import ALIASES, PoolAliases, check_nodes, check_options, check_roles, check_scale, is_pool_name
from .scaler import Sizing
from .shared_names import SharedNames
from .sources import source_of
from .targets import PoolSender, PoolTarget
from .task_access import TaskAccess

if TYPE_CHECKING:
    from ..engine.engine import SharedStore

T = TypeVar("T")


@checked_options(aliases=ALIASES, check=check_options)
class ComputePool(PoolTarget, NodeAccess, TaskAccess, DetachedAccess, SharedNames):
    """Machines that run calls, created when the `with` block is entered and gone when it is left.

    Leaving the block waits for open calls, and closes streams that were not read to their end. Leaving it by an
    exception, such as Ctrl-C, cancels them. If this process dies, its nodes end within the provider's `lease_s`. A pool
    is thread-safe, and several pools may be open at once. `start()` and `close()` replace the `with` block, for example
    in a notebook.

    Args:
        provider: Source of the machines: `sky.Local()`, `sky.SSH(hosts=[...])` or `sky.AWS(...)`.
        any_of: Several sources instead of one, such as `[sky.SSH(hosts=[...]), sky.AWS()]`. Their offers are tried in
            the order of `selection` until one has machines for all nodes; every node comes from that source. An offer
            without machines is tried last for 5 minutes.
        selection: Order of several sources, accelerators or regions: "cheapest" by price, "first" by the order in which
            they are written, "fastest" by the 16-bit TFLOPS of the accelerators, then by virtual CPUs.
        region: Region, or a list of regions, for each source that has one. None: the source's own.
        nodes: Number of nodes, >= 1. `(min, max)` or a `sky.Nodes` makes an elastic pool: it grows while calls wait,
            and gives idle nodes back. With `min=0`, an idle pool has none.
        idle_timeout_s: Seconds without use, > 0, after which a pool of a fixed size gives all machines back, and the
            next call gets new ones. An elastic pool shrinks to `min`, and gives back nodes that it did not need for
            that long. None: 300 s for elastic pools, never for others.
        on_idle: "rest" is the above. "close" closes the idle pool, and later calls raise PoolClosed.
        roles: Nodes reserved for a role, such as `roles={"evaluation": [2]}`. They run only calls sent to
            `pool.role("evaluation")`, or to the node by its number. `>> pool`, `@ pool` and `map` use the other nodes;
            at least one must be left.
        concurrency: Slots per node, >= 1: the number of plain calls that run there at once.
        accelerator: Accelerator of each node: a name ("A100") or a value of `sky.accelerators`. A name stands for one
            device with its largest memory; rented machines must match both exactly. A list allows any of several, but
            one for all nodes. None: no accelerator is requested.
        vcpus: Lowest number of virtual CPUs per node; None for any.
        memory_gib: Lowest memory per node, in GiB; None for any. `memory_gb` is an alias.
        architecture: "x86_64" or "arm64"; None for any.
        allocation: "spot", "on-demand", "spot-if-available" or "cheapest"; see `AllocationStrategy`.
        image: Environment of the nodes; None for the client's Python version and nothing else.
        executor: "process" runs each slot as a process. "thread" runs the slots of a node as threads of one process:
            they share its memory and GIL, running calls cannot be killed, and output of C code is labelled by node
            only.
        logs: True prints the calls' output here, each line with its node. False drops it. `sky.LogFiles(folder)` writes
            one file per rank. A function receives each `LogLine`, in order, in a separate thread; if it blocks, the
            oldest lines are dropped. `logging` is an alias.
        preload: Modules that each node imports once, before it forks its slots. The first calls start sooner, and slots
            share the memory. A module that starts a thread, or cannot be imported, has no effect.
        initializer: Function that each process runs once, before its first call.
        initargs: Arguments of the initializer.
        default_timeout_s: Time limit in seconds of calls without their own `timeout_s`; None for no limit.
            `default_compute_timeout` is an alias.
        max_inflight: Most calls of a map that are sent or running at once; None for two per slot.
        direct_transfers: Send kept values straight from node to node, if both have private addresses. False: through
            this program, inside the links to the nodes. If the scheduler runs on the first node, large arguments
            travel like kept values.
        max_hourly_cost: Highest price of the whole pool, in USD per hour; None for no limit.
        budget_usd: Highest cost of the whole pool in USD, from its first machine to the end of its last; None for no
            limit. Machines that would exceed it even if returned at once are not launched. At 80 % a `BudgetWarning` is
            emitted. Before the rest is spent, the pool is closed and open calls raise BudgetExceeded. A detached pool
            ends by itself, also without a client.
        volumes: Folders that outlive the pool, by path: `volumes={"/data": sky.Volume("cache")}`. In a task,
            `sky.volume("/data")` is the folder. On other machines than this one, a link at that path leads there too,
            if nothing else is there and the login may create it.
        cancel_grace_s: Seconds between SIGINT and SIGKILL for a cancelled call, 0 to 6,500.
        provision_timeout_s: Time limit in seconds until all nodes answer, > 0. `provision_timeout` is an alias.
        on_event: Function that receives each event of the pool, in order, in a separate thread; see `skyward.events`.
            Its exceptions are reported once and have no other effect.
        console: Display on standard error. None: a live panel on a terminal, plain lines elsewhere, one line in a
            notebook. For the fast `sky.Local()`, None shows only problems, and the panel after two seconds. True:
            always everything. False: nothing.
        name: Name for `skyward ls`, `logs`, `ssh` and `down`: 1 to 60 letters, digits, "-", "_" and ".". Open pools of
            one process need different names. In a notebook, a new pool closes the one with the same name or variable.
        detached_for_s: Seconds > 0 that the pool goes on without a client, from the moment when the client dies or
            calls `detach()`. Another program gets it by `ComputePool.attach(name)`. Leaving the block still closes the
            pool. Needs a `name`, and at least one node of `sky.SSH` or `sky.AWS`. Several nodes go on alone once Ray
            carries the calls to all of them. Lost nodes are replaced, and those of an elastic pool come and go, while
            a client is there. None: the pool ends with this program.
        engine: Carrier of the calls. "direct": this program schedules, and is connected to each node. "ray": the first
            node schedules, and Ray joins the nodes, so calls and values of tasks go straight between them. It needs
            `sky.SSH` or `sky.AWS`, and a `max` of at least 2. If Ray does not come up, the pool ends with a
            ProviderError. "auto": as "ray" where that is possible, but Ray is started after ten seconds, and if it
            does not come up, this program goes on carrying the calls, and one event says why; else "direct".
        aliases: Aliases of options, listed above.

    Raises:
        UsageError: An option is illegal; the message names it.
        ProviderError: The machines are not available. Raised on entering the block.

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
        provider: Provider | None = None,
        *,
        any_of: Sequence[Provider] = (),
        selection: Selection = "cheapest",
        region: str | Sequence[str] | None = None,
        nodes: int | tuple[int, int] | Nodes = 1,
        idle_timeout_s: float | None = None,
        on_idle: Literal["rest", "close"] = "rest",
        roles: Mapping[str, Sequence[int]] | None = None,
        concurrency: int = 1,
        accelerator: str | Accelerator | Sequence[str | Accelerator] | None = None,
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
        direct_transfers: bool = True,
        max_hourly_cost: float | None = None,
        budget_usd: float | None = None,
        volumes: Mapping[str, Volume | str] | None = None,
        cancel_grace_s: float = 3.0,
        provision_timeout_s: float = 300.0,
        on_event: Callable[[Event], object] | None = None,
        console: bool | None = None,
        name: str | None = None,
        detached_for_s: float | None = None,
        engine: EngineName = "auto",
        **aliases: Unpack[PoolAliases],
    ) -> None:
        self.provider, wanted = source_of(provider, any_of, selection, region, accelerator)
        size = Nodes.of(nodes)
        self._roles = check_roles(roles, size.min)
        self.concurrency = concurrency
        self._max_inflight = max_inflight
        self._budget_usd = budget_usd
        kept = frozenset(itertools.chain.from_iterable(self._roles.values()))
        spec = PoolSpec(
            nodes=size.start,
            max_nodes=size.max,
            concurrency=concurrency,
            executor=executor,
            accelerator=wanted,
            vcpus=vcpus,
            memory_gib=memory_gib,
            architecture=architecture,
            allocation=allocation,
            image=image or DEFAULT_IMAGE,
            preload=tuple(preload),
            max_hourly_cost=max_hourly_cost,
            cancel_grace_s=cancel_grace_s,
            direct_transfers=direct_transfers,
            is_detached=detached_for_s is not None,
            volumes=check_volumes(volumes or {}),
            provision_timeout_s=provision_timeout_s,
        )
        check_detached(
            detached_for_s,
            name=name,
            provider=self.provider,
            least=size.min,
            ends_idle=idle_timeout_s is not None if size.is_fixed else on_idle == "close",
        )
        way = choose_way(
            engine,
            provider=self.provider,
            spec=spec,
            is_detached=detached_for_s is not None,
        )
        self._life = PoolLife(
            self,
            self.provider,
            spec,
            sizing=Sizing(nodes=size, idle_timeout_s=idle_timeout_s, on_idle=on_idle, roles=self._roles),
            # Short, because it becomes part of socket paths, which have 108 bytes at most.
            name=f"{(name or 'pool')[:15]}-{uuid.uuid4().hex[:8]}",
            label=name or "",
            initializer=None if initializer is None else (initializer, tuple(initargs)),
            default_timeout_s=default_timeout_s,
            budget_usd=budget_usd,
            logs=logs,
            console=console,
            on_event=on_event,
        )
        self._life.way = way
        self._life.ray_after_s = RAY_AFTER_S if way is Way.RAY_OR_LENT else 0.0
        if detached_for_s is not None:
            self._life.detachment = Detachment(for_s=detached_for_s, key=os.urandom(16).hex())
        self._sender = PoolSender(
            self._life.sending,
            self._life.ordinary,  # not a method of the pool, which would then refer to itself and outlive its last use
            is_whole=True,
            # For elastic pools those of all nodes, so that a map sends enough calls to let the pool grow.
            slots=(size.max - len(kept)) * concurrency,
            max_inflight=max_inflight,
            wake=self._life.wake,
        )

    @classmethod
    def named(cls, name: str, **overrides: Any) -> ComputePool:
        """Return the pool of that name in `skyward.toml`, or in one of the user's files; see `skyward.pool.config`.

        Args:
            name: Name of the pool.
            overrides: Arguments of ComputePool that take precedence over the files.

        Raises:
            UsageError: There is no such pool, or a file has a mistake. The message names the file, the key and the fix.
            MissingDependency: The provider needs an extra that is not installed.
        """
        from .config import of_file, pool_fields

        fields = pool_fields(name, cls.__init__)
        overrides = {ALIASES.get(key, key): value for key, value in overrides.items()}
        if not overrides.keys().isdisjoint(("provider", "any_of")):  # one stands for the other
            fields = {key: value for key, value in fields.items() if key not in ("provider", "any_of")}
        if "name" not in overrides and is_pool_name(name):
            fields["name"] = name
        try:
            return cls(**{**fields, **overrides})
        except UsageError as error:
            raise (error if overrides or type(error) is not UsageError else of_file(name, error)) from error

    Named = named

    @classmethod
    @checked_options(place="ComputePool.attach")
    def attach(
        cls,
        name: str | None = None,
        *,
        file: str | os.PathLike[str] | None = None,
        take_over: bool = False,
        logs: bool | LogSink = True,
        console: bool | None = None,
        on_event: Callable[[Event], object] | None = None,
    ) -> ComputePool:
        """Connect to a detached pool, and return it open.

        Its calls have gone on meanwhile: `calls()` lists them, and `future(call)` gets their values. Output continues
        where the last client left it. A pool has one client at a time. Leaving a `with` block closes the pool;
        `detach()` leaves it again.

        Args:
            name: Name of the pool, as it was given to `ComputePool`.
            file: Instead of a name, a file that `skyward ps NAME --export FILE` has written on another machine. The
                SSH configuration and keys are those of this user. Afterwards the pool is known here by its name too.
            take_over: Take the pool from a client that is still connected. That program's open calls raise PoolClosed.
            logs: Destination of the calls' output; see `ComputePool`.
            console: Display; see `ComputePool`.
            on_event: Receiver of the events; see `ComputePool`.

        Raises:
            UsageError: There is no such pool, it has ended, another client has it, or its head runs another version of
                skyward. Or the file cannot be read, or others may read it. The message says what to do.
            NodeError, ProviderError: Its machine cannot be reached.

        Example:
            with sky.ComputePool.attach("train") as pool:
                for call in pool.calls():
                    print(call.name, call.state, pool.future(call).result())
        """
        if (name is None) == (file is None):
            raise UsageError("attach(): takes the name of a pool or file=, one of the two; pass one", field="name")
        known = attachable(adopt(file).pool if file is not None else name or "")
        pool = cls(
            provider_of(known),
            name=known.name,
            detached_for_s=known.detached_for_s,
            logs=logs,
            console=console,
            on_event=on_event,
            image=Image(**known.image),
            **known.options,
        )
        pool._life.name = known.pool
        pool._life.detachment = Detachment.of(known, takes_over=take_over)
        pool._life.start(pool, sys._getframe())
        return pool

    def _sender_to(self, nodes: tuple[int, ...]) -> PoolSender:
        return PoolSender(
            self._life.sending,
            lambda: nodes,
            is_whole=False,
            slots=len(nodes) * self.concurrency,
            max_inflight=self._max_inflight,
            wake=self._life.wake,
        )

    # Life -----------------------------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Return whether calls can be sent now."""
        return self._life.is_active

    @property
    def nodes(self) -> NodeCount:
        """Number of nodes that are there. Call it to select some as a target of calls: `pool.nodes([0, 2])`.

        A pool of a fixed size that rests has its number all the same: the next call brings them back.
        """
        return NodeCount(len(self._life.nodes()), self)

    def scale(self, nodes: int | None) -> None:
        """Bring an elastic pool to a number of nodes, and keep it there until it is idle.

        Waits for nodes that come. Nodes that go get no new calls, and are given back when their calls have ended; no
        call or gang is interrupted. An idle pool still shrinks to its `min`, and decides for itself from then on. So
        does a pool with 0 nodes: the next call brings some.

        Args:
            nodes: Number of nodes, in [min, max] of the pool; None: let the pool decide again.

        Raises:
            UsageError: The number is out of the bounds.
            ProviderError: There are no more nodes.
            PoolClosed: The pool is not open.

        Example:
            >>> import skyward as sky
            >>> with sky.ComputePool(provider=sky.Local(), nodes=(1, 3)) as pool:
            ...     pool.scale(3)
            ...     len(sky.compute(abs)(-1) @ pool)
            3
        """
        check_scale(nodes, self._life.sizing.nodes)
        self._life.scale(nodes)

    def node(self, number: int) -> NodeTarget:
        """Return one node as a target of calls: `f(x) >> pool.node(1)`.

        Args:
            number: Index of the node, in [0, nodes). An elastic pool has as many as its `max`, and a call to one that
                is not there brings it.

        Raises:
            UsageError: There is no such node.
        """
        (chosen,) = check_nodes("node", (number,), self.spec.most_nodes)
        return NodeTarget(self, (chosen,), f"node {chosen}")

    def actor(self, name: str) -> Any:
        """Return the handle of the actor with that name; see `ActorOptions`.

        Args:
            name: Name of an actor that lives in this pool.

        Raises:
            UsageError: There is none.
            PoolClosed: The pool is not open.
        """
        return self._life.running()[1].actors.named(name)

    def role(self, name: str) -> NodeTarget:
        """Return the nodes of a role as a target of calls. Raises UsageError if there is no such role."""
        if name not in self._roles:
            names = ", ".join(map(repr, self._roles))
            advice = f"use {names}" if names else "set roles with ComputePool(roles={...})"
            raise UsageError(f"role={name!r}: no such role in this pool; {advice}", field="role", value=name)
        return NodeTarget(self, self._roles[name], f"role {name!r}")

    @property
    def roles(self) -> dict[str, tuple[int, ...]]:
        """Role -> its nodes."""
        return dict(self._roles)

    @property
    def name(self) -> str:
        """Name that the user gave the pool; may be empty."""
        return self._life.label

    @property
    def job_id(self) -> str:
        """Unique name of this pool. In its calls, `sky.instance_info().job_id` is the same."""
        return self._life.name

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the pool as a handle, which is a target of calls inside tasks; see `TargetHandle`."""
        from ..node.slot.handle import TargetHandle

        return TargetHandle, (self.job_id, self.node_numbers, True, "the whole", self.total_slots)

    @property
    def engine(self) -> Literal["direct", "ray"]:
        """Carrier of the calls now: "direct" for connections of this program, "ray" for Ray between the nodes.

        A pool on Ray is "direct" until Ray stands, and while a lost Ray is replaced. With `engine="auto"` it stays so
        if Ray does not come up. The events `EngineUp` and `EngineLost` tell of the changes.

        Raises:
            PoolClosed: The pool is not open.

        Example:
            >>> import skyward as sky
            >>> with sky.ComputePool(provider=sky.Local()) as pool:
            ...     pool.engine
            'direct'
        """
        return self._life.running()[0].carrier

    @property
    def spec(self) -> PoolSpec:
        """Request of the pool to its provider."""
        return self._life.spec

    def events(self) -> EventStream:
        """Return an iterator of the pool's events from now on, in order; see `skyward.events`.

        Any thread may read it, and several iterators may exist. It ends when the pool is closed. At most 10,000 events
        wait in it; then the oldest are dropped, and `EventsDropped` reports their number. To see the start of a pool,
        call `events` before entering it.
        """
        return self._life.announcer.listen()

    def offers(self) -> list[Offer]:
        """Return the current offers for this pool, of all its sources, in the order of trying them. Rents nothing."""
        return self.provider.offers(self.spec)

    def plan(self) -> list[Any]:
        """Return the exact requests that the first offer would cause. Changes nothing."""
        return self.provider.plan(self.spec, self.offers()[0], self.job_id)

    def forecast(self) -> Forecast:
        """Return the cost of the pool with its first affordable offer, or raise BudgetExceeded. Rents nothing."""
        minimum_s = least_billed_s(self.provider)
        nodes = max(1, self.spec.nodes)
        return forecast(self.offers(), nodes=nodes, minimum_s=minimum_s, budget_usd=self._budget_usd)

    def agent_pids(self) -> dict[int, int]:
        """Return node -> process id of its agent, on that node's machine. A node that is being replaced is missing.

        For tests and tools (see `skyward.testing.Faults`); calls do not need it.
        """
        engine, _ = self._life.running()
        return engine.nodes.agent_pids()

    @property
    def cost_usd(self) -> float:
        """Cost of the pool's machines so far in USD, by the prices of their offers; 0 if nothing is rented."""
        return self._life.cost_usd

    def start(self) -> Self:
        """Create the machines and connect to them. A failed or interrupted start leaves nothing behind.

        In a notebook, it first closes the open pool with the same name, and the pool in the variable that it is
        assigned to. That one stays open, with a warning, while it has work or another object refers to it.

        Raises:
            UsageError: The pool is open already. Outside notebooks: another open pool of this process has its name.
            ProviderError: The machines are not available.
        """
        self._life.start(self, sys._getframe())
        return self

    @property
    def has_work(self) -> bool:
        """Return whether calls, actors, kept values or connections are open. For notebooks; see `replacement`."""
        return self._life.has_work

    def give_way(self, why: str) -> None:
        """Close in favour of another pool: open and later calls raise PoolClosed. For notebooks; see `replacement`."""
        self._life.give_way(why)

    def close(self, *, cancel: bool = False) -> None:
        """Wait for open calls, then end the machines. Idempotent.

        Args:
            cancel: Cancel open calls instead of waiting.

        Raises:
            TerminateFailed: Machines may still be running. The error has their ids.
            CheckpointSaveFailed: A server of `sky.integrations.diloco` could not save its last state. The machines are
                gone. If a `with` block raises, its error has a note of it.
        """
        self._life.close(cancel=cancel)
        loss = loss_of(self.job_id)
        if loss is not None:
            raise loss

    def __enter__(self) -> Self:
        if self._life.is_attached:
            return self
        try:
            try:
                return self.start()
            except SkywardError as error:
                drop_our_frames(error)
                raise
        except KeyboardInterrupt:  # it may arrive after the start has succeeded, and then nobody calls __exit__
            self.close(cancel=True)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        try:
            self.close(cancel=kind is not None)
        except CheckpointSaveFailed as loss:
            if error is None:
                raise
            error.add_note(str(loss))

    def __repr__(self) -> str:
        state = "open" if self.is_active else "closed"
        sizes = f"nodes={int(self.nodes)} concurrency={self.concurrency}"
        if actors := self._life.actors:
            sizes = f"{sizes} actors={len(actors)}"
        return f"<ComputePool {self.job_id} {self.provider!r} {sizes} {state}>"

    def _repr_html_(self) -> str:
        is_open, nodes = self.is_active, int(self.nodes)
        facts = [
            ("provider", repr(self.provider)),
            ("nodes", str(nodes) + "".join(f", {len(kept)} for {role!r}" for role, kept in self._roles.items())),
            ("slots", f"{nodes * self.concurrency} ({self.concurrency} on each node)"),
            ("cost", f"{usd(self.cost_usd)} so far" if self.provider.is_rented else "nothing is rented"),
        ]
        if actors := self._life.actors:
            facts.append(("actors", "; ".join(map(str, actors))))
        hint = "`.close()` ends its machines; so does the end of the kernel" if is_open else "`.start()` opens it again"
        return card(f"ComputePool {self.name or self.job_id}", "open" if is_open else "closed", facts, hint)

    def shared_store(self) -> SharedStore:
        """Return the store of the shared things, to which `pool.dict(name)` and the others send their requests."""
        return self._life.running()[0].shared

    def put(self, value: T, *, nodes: Iterable[int] | None = None) -> Ref[T]:
        """Pickle a value once, and return a reference that calls take as an argument instead of the value.

        The bytes go to a node with the first call that uses them there, and stay for the next. The program keeps its
        copy, so the value survives the loss of all nodes. Later changes of the value are not seen.

        Args:
            value: Any picklable value.
            nodes: Nodes to send it to at once, as indexes in [0, nodes), or below the `max` of an elastic pool. A node
                that is not there gets it with the first call. None: none yet.

        Raises:
            ArgumentNotPicklable: The value cannot be pickled.
            UsageError: There is no such node.
            PoolClosed: The pool is not open.

        Example:
            >>> import skyward as sky
            >>> with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
            ...     data = pool.put([3, 1, 2])
            ...     sky.compute(sorted)(data) >> pool
            [1, 2, 3]
        """
        engine, dispatch = self._life.running()
        chosen = () if nodes is None else check_nodes("nodes", nodes, self.spec.most_nodes)
        try:
            payload = dispatch.packing.payload(value)
        except Exception as error:
            if interrupts.is_from_handler(error):
                raise
            raise ArgumentNotPicklable(
                f"put(): a {type(value).__qualname__} cannot be pickled: {type(error).__name__}: {error}; put plain "
                "data or arrays",
                argument="value",
            ) from error
        refuse_to_keep(payload.pinned)
        return engine.values.put(payload, chosen)


class NodeTarget(PoolTarget):
    """Some nodes of a pool as a target of calls: `f(x) >> pool.node(1)`. Made by a pool; valid while the pool is.

    `>>` and `>` send to one of these nodes, the one with the most room. `@` sends to each, in the order in which they
    were named. A function under an integration runs as a gang on one of them, or on all. `map` and `executor` use only
    their slots.

    Calls wait for these nodes and go to no others. When a node is lost, a call that was already sent to it fails with
    NodeLost, unless its `retries` allow another run. A call that still waits goes to the replacement. If there is no
    replacement, calls that only that node could run fail with NodeLost.

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
        """Pool of these nodes."""
        return self._pool

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the target as a handle, which is a target of calls inside tasks; see `TargetHandle`."""
        from ..node.slot.handle import TargetHandle

        return TargetHandle, (self._pool.job_id, self.node_numbers, False, self._label, self.total_slots)

    def __repr__(self) -> str:
        return f"<{self._label} of {self._pool!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeTarget) and (other._pool is self._pool) and other.node_numbers == self.node_numbers

    def __hash__(self) -> int:
        return hash((id(self._pool), self.node_numbers))


class NodeCount(int):
    """Number of nodes that can also be called: `pool.nodes([0, 2])` selects those two."""

    _pool: ComputePool

    def __new__(cls, count: int, pool: ComputePool) -> Self:
        made = super().__new__(cls, count)
        made._pool = pool
        return made

    def __call__(self, numbers: Iterable[int]) -> NodeTarget:
        """Return these nodes as a target of calls.

        Args:
            numbers: Indexes of the nodes, each in [0, nodes); at least one, none twice.

        Raises:
            UsageError: A number is illegal.
        """
        chosen = check_nodes("nodes", numbers, self._pool.spec.most_nodes)
        return NodeTarget(self._pool, chosen, f"nodes {', '.join(map(str, chosen))}")

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)
