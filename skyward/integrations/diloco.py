"""DiLoCo: the ranks of a call are workers, and the pool's program is their server, by the pool's own channels.

The server's options stay in the program: the decorator declares them there, and its nodes know its name only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from ..errors import UsageError
from ..node.slot.runtime import current_rank
from ..training.diloco.pool_servers import declare
from ..training.diloco.pool_transport import address_of, seated
from ..training.diloco.server_settings import DiLoCoSettings
from ..training.diloco.settings import HEARTBEAT_INTERVAL_S, MAX_SYNC_RETRIES, SYNC_EVERY, TIMEOUT_S, check_options
from ..values.topology import Rank
from .base import IntegrationBase, decorator_of, load_framework, numeric_threads

_VARIABLES = {
    "sync_every": "DILOCO_SYNC_EVERY",
    "bf16_comm": "DILOCO_BF16_COMM",
    "dylu": "DILOCO_DYLU",
    "heartbeat_interval": "DILOCO_HEARTBEAT_INTERVAL",
    "num_fragments": "DILOCO_NUM_FRAGMENTS",
    "fragment_sync_delay": "DILOCO_FRAGMENT_SYNC_DELAY",
    "fragment_update_alpha": "DILOCO_FRAGMENT_UPDATE_ALPHA",
    "quantization_bits": "DILOCO_QUANTIZATION_BITS",
}
_DEFAULTS: dict[str, Any] = {
    "sync_every": SYNC_EVERY,
    "dylu": False,
    "heartbeat_interval": HEARTBEAT_INTERVAL_S,
    "num_fragments": 1,
    "fragment_sync_delay": 0,
    "fragment_update_alpha": None,
    "quantization_bits": 0,
}
_SERVER_OPTIONS = tuple(
    field.name for field in fields(DiLoCoSettings) if field.name not in ("outer_optimizer", "quantization_bits")
)


@dataclass(frozen=True, kw_only=True)
class DiLoCoIntegration(IntegrationBase):
    """Train with DiLoCo: the ranks of the call are workers, and the pool's program is the server.

    `DiLoCoCallback()` in the function finds the server by itself. All traffic goes through the pool's own channels, so
    no port is opened, also over SSH. Each rank is a worker, which means each node of `@ pool`. With
    `sky.integrations.torch` on the same function, all ranks of the call are one worker, with DDP or FSDP inside: rank
    0 talks to the server, and the others get the parameters by the process group. `nodes_per_worker` splits the call
    into several such workers: each node, or each group of neighbouring nodes, then has a process group of its own. The
    other integrations see the ranks of the group only, and `sky.instance_info()` tells of all ranks of the call.

    The server begins and ends with the call. Calls of the function that run at the same time share it, also those of
    several pools. Their first round waits for `num_workers`, so set it to the workers of all of them. If
    `max_restarts` restarts the call, its server goes on.

    When the steps of a run are a multiple of `sync_every`, each worker ends with the global parameters: return them
    from the function. `save_dir` keeps them in the program too. If the server cannot save its last state there, the
    end of the pool raises `CheckpointSaveFailed`.

    Outside a pool, and in `.local(...)`, the function is called as it is, and the callback does nothing. Write the
    decorator below `@sky.compute`; it stacks with other integrations and output decorators in any order. The program
    needs `pip install 'skyward[diloco]'`, and nodes need torch and numpy.

    Args:
        processes_per_node: ranks on each node, >= 1. "auto" starts one per accelerator, at least one.
        returns: ranks whose values `@` returns as a list: "nodes" for the first of each node, "ranks" for all, "head"
            for rank 0 alone.
        server: name of the server in the program; None: that of the function. Functions that name the same server share
            it.
        nodes_per_worker: nodes of each worker with DDP or FSDP inside, >= 1; None: all nodes of the call, or each rank
            without a process group. If a worker has several ranks, the function also needs `sky.integrations.torch`, or
            another integration that opens a process group.
        sync_every: optimizer steps between two synchronisations; None: DILOCO_SYNC_EVERY on the nodes, or 500.
        bf16_comm: send progress in bfloat16; None: DILOCO_BF16_COMM, or true.
        dylu: let the server lower `sync_every` on slower workers; None: DILOCO_DYLU, or false.
        heartbeat_interval: seconds between two signs of life, 0: none; None: DILOCO_HEARTBEAT_INTERVAL, or 30.
        num_fragments: parts of the model that are sent one after another; None: DILOCO_NUM_FRAGMENTS, or 1.
        fragment_sync_delay: steps between the sending of a part and its use, during which the worker trains on; None:
            DILOCO_FRAGMENT_SYNC_DELAY, or 0.
        fragment_update_alpha: weight of the worker's own values when such a part arrives; None:
            DILOCO_FRAGMENT_UPDATE_ALPHA, or 0.5 with a delay.
        quantization_bits: 8 or 4 bits for each value on the way up and down, 0 for none; None:
            DILOCO_QUANTIZATION_BITS on the way up, and none down. In async_mode it counts on the way up only.
        num_workers: workers that the first round waits for; None: those of the call that comes first.
        min_workers: least number of workers that end a round, >= 1.
        outer_lr: learning rate of the outer optimizer, > 0.
        outer_momentum: its Nesterov momentum, in [0, 1).
        save_dir: folder on the program's machine for the server's state; None: it is lost with the call. A later call
            goes on from there.
        save_every_n_rounds: rounds between two saves, >= 1.
        heartbeat_timeout: seconds of silence after which a worker is evicted; 0: never.
        bf16_answers: answer with updates in bfloat16, which halves the download.
        async_mode: apply each worker's update as it arrives, so that no worker waits for another.
        dn_buffer_size: updates between two updates of the momentum in asynchronous mode; 0: `num_workers`.
        weighting: weight of each worker in the mean: "equal"; "samples" that it has read by a `DiLoCoSampler` since its
            base round; or "tokens" that it has counted since then by `DiLoCoCallback.count_tokens`.

    Raises:
        UsageError: an option is out of range, or the decorated object is not a plain function. In the rank: the program
            has no server of that name, or `nodes_per_worker` does not divide the nodes of the call.
        MissingDependency: in the rank: torch is not installed on the node.

    Example:
        >>> @diloco(sync_every=100, min_workers=2)
        ... def train() -> None:
        ...     from skyward.training import DiLoCoCallback, Trainer
        ...     model, arguments, rows = ...
        ...     Trainer(model, arguments, train_dataset=rows, callbacks=[DiLoCoCallback()]).train()
        >>> train.__name__
        'train'
    """

    name: ClassVar[str] = "diloco"
    extra: ClassVar[str] = "diloco"
    packages: ClassVar[tuple[str, ...]] = ("torch", "numpy")
    preload: ClassVar[tuple[str, ...]] = ("torch", "torch.distributed", "torch._dynamo", "numpy.random")

    server: str | None = None
    nodes_per_worker: int | None = None
    sync_every: int | None = None
    bf16_comm: bool | None = None
    dylu: bool | None = None
    heartbeat_interval: float | None = None
    num_fragments: int | None = None
    fragment_sync_delay: int | None = None
    fragment_update_alpha: float | None = None
    quantization_bits: int | None = None
    num_workers: int | None = None
    min_workers: int = 1
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    save_dir: str | None = None
    save_every_n_rounds: int = 1
    heartbeat_timeout: float = 120.0
    bf16_answers: bool = False
    async_mode: bool = False
    dn_buffer_size: int = 0
    weighting: str = "equal"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {name: getattr(self, name) for name in _DEFAULTS}
        chosen = {name: default if given[name] is None else given[name] for name, default in _DEFAULTS.items()}
        check_options(timeout=TIMEOUT_S, max_sync_retries=MAX_SYNC_RETRIES, **chosen)
        self._server_settings()
        nodes = self.nodes_per_worker
        if nodes is not None and (not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1):
            raise UsageError(
                f"nodes_per_worker={nodes!r}: @{self.name} takes a whole number >= 1, or None; set nodes_per_worker=1",
                field="nodes_per_worker",
                value=nodes,
            )

    @property
    def nodes_per_group(self) -> int | None:
        return self.nodes_per_worker

    def _server_settings(self) -> DiLoCoSettings:
        """Return the settings of the server, or raise UsageError."""
        options = {name: getattr(self, name) for name in _SERVER_OPTIONS}
        return DiLoCoSettings(**options, quantization_bits=0 if self.async_mode else self.quantization_bits or 0)

    def attached_to(self, fn: Callable[..., Any]) -> Self:
        """Return this integration with the server's name, whose options this program now knows."""
        named = self.server or f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', '')}"
        declare(named, self._server_settings())
        return replace(self, server=named, save_dir=None)

    def environment(self, rank: Rank) -> dict[str, str]:
        """Return the server's address, and the options that have a value."""
        given = {variable: getattr(self, name) for name, variable in _VARIABLES.items()}
        chosen = {variable: str(value).lower() for variable, value in given.items() if value is not None}
        return {"DILOCO_SERVER": address_of(self.server or ""), **chosen}

    @contextmanager
    def session(self, rank: Rank) -> Iterator[None]:
        framework = load_framework("torch", extra=self.extra)
        # The module was imported with one thread, so that the node could fork this process.
        framework.set_num_threads(numeric_threads(rank))
        with seated(self.server or "", current_rank() or rank) as worker:  # its seat is that of the whole call
            os.environ["DILOCO_WORKER_ID"] = worker
            yield


diloco = decorator_of(DiLoCoIntegration)
