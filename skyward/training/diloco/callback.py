"""`DiLoCoCallback`: makes a run under any trainer a worker of loosely joined training."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..events import TrainerCallback
from ..parts import part_of, unwrapped
from .dealing import Hand
from .pool_transport import is_group
from .settings import MAX_SYNC_RETRIES, TIMEOUT_S, check_options, option

if TYPE_CHECKING:
    from .ranks import WorkerOfRanks
    from .token_count import TokenCount
    from .worker import DiLoCoWorker

_log = logging.getLogger(__name__)


class DiLoCoCallback(TrainerCallback):
    """Train as one of several workers that a `DiLoCoServer` averages, on machines without a fast network.

    The run takes `sync_every` optimizer steps on its own. Then it sends its progress and goes on from the average of
    all workers. Gradient accumulation counts once. Without a server the callback does nothing, so one configuration
    serves both.

    The server's parameters replace the model's when training begins. If the server does not answer later, the run
    trains on, and tries again after the next `sync_every` steps. Steps after the last synchronisation are this worker's
    own, so let `max_steps` be a multiple of `sync_every`.

    Logs get `diloco/sync_count`, `diloco/last_sync_time`, `diloco/last_send_mb`, `diloco/steps_per_second` and others,
    before any logger sees them. The server is told the loss that the trainer logs, and shows it (`skyward diloco
    watch`). For a server with `weighting="tokens"`, the callback counts the elements of text batches, padding included;
    see `count_tokens` to count something else.

    Checkpoints keep the worker's name, its round and its step in the round. A run that was killed and resumes in time,
    before the server evicts it, ends with the parameters of a run that was not. Its checkpoint must be from the open
    round, or from the one before. So save at least once in `sync_every` steps, less the `fragment_sync_delay`. This
    holds for streaming, too: the server keeps the last answers for every fragment.

    It works under our trainers, Hugging Face's, Lightning's, and Keras's with the torch backend. The ranks of a process
    group are one worker: rank 0 talks to the server. Each has a whole copy of the model, such as under DDP, or a shard
    of it by `fully_shard`. Then rank 0 gathers the whole model in the CPU's memory.

    An argument that is None comes from the environment, or else it has its default:

    | argument | variable | default |
    |---|---|---|
    | `server_addr` | `DILOCO_SERVER` | none |
    | `sync_every` | `DILOCO_SYNC_EVERY` | 500 |
    | `worker_id` | `DILOCO_WORKER_ID` | host and random letters |
    | `bf16_comm` | `DILOCO_BF16_COMM` | true |
    | `dylu` | `DILOCO_DYLU` | false |
    | `heartbeat_interval` | `DILOCO_HEARTBEAT_INTERVAL` | 30 |
    | `num_fragments` | `DILOCO_NUM_FRAGMENTS` | 1 |
    | `fragment_sync_delay` | `DILOCO_FRAGMENT_SYNC_DELAY` | 0 |
    | `fragment_update_alpha` | `DILOCO_FRAGMENT_UPDATE_ALPHA` | 0.5, or 0 |
    | `quantization_bits` | `DILOCO_QUANTIZATION_BITS` | 0 |

    The server's token is in `DILOCO_TOKEN`, or in the file that `DILOCO_TOKEN_FILE` names. `DILOCO_CA` names the file
    with its certificate.

    Args:
        server_addr: `host:port` or a URL of the server.
        sync_every: optimizer steps between two synchronisations, at least 1.
        worker_id: name of the worker, unique among all workers and the same after a restart.
        bf16_comm: send progress in bfloat16, which halves the upload.
        dylu: let the server lower `sync_every` on slower workers, so that all are ready at the same time.
        heartbeat_interval: seconds between two signs of life; 0: none.
        num_fragments: parts of the model that are sent one after another, one every `sync_every / num_fragments` steps.
            All workers have the same number.
        timeout: longest wait for the other workers in seconds, and longest silence of the server.
        max_sync_retries: retries of a synchronisation that failed, after pauses of 2, 4, 8, ... seconds.
        fragment_sync_delay: steps between sending a fragment and applying the answer. Training goes on meanwhile. 0:
            the step that sends it waits.
        fragment_update_alpha: weight of the worker's own values when an answer is applied, between 0 and 1. The default
            is 0.5 with a delay, and 0 without.
        quantization_bits: send values of 8 or 4 bits, and add the rounding error to the next ones; 0: do not.

    Raises:
        UsageError: a value is not legal. When training begins: the server does not answer or refuses this worker, the
            model is not torch's, or its ranks have other parts of it than shards of `fully_shard`.

    Example:
        >>> from skyward.training import DiLoCoCallback
        >>> callbacks = [DiLoCoCallback("127.0.0.1:8512", sync_every=100, worker_id="berlin")]
        >>> callbacks[0].active
        True
    """

    def __init__(
        self,
        server_addr: str | None = None,
        sync_every: int | None = None,
        worker_id: str | None = None,
        bf16_comm: bool | None = None,
        dylu: bool | None = None,
        heartbeat_interval: float | None = None,
        num_fragments: int | None = None,
        timeout: float = TIMEOUT_S,
        max_sync_retries: int = MAX_SYNC_RETRIES,
        *,
        fragment_sync_delay: int | None = None,
        fragment_update_alpha: float | None = None,
        quantization_bits: int | None = None,
    ) -> None:
        self.server_addr: str | None = option("server_addr", server_addr) or None
        worker_options: dict[str, Any] = {
            "sync_every": option("sync_every", sync_every),
            "dylu": bool(option("dylu", dylu)),
            "heartbeat_interval": option("heartbeat_interval", heartbeat_interval),
            "timeout": timeout,
            "max_sync_retries": max_sync_retries,
            "num_fragments": option("num_fragments", num_fragments),
            "fragment_sync_delay": option("fragment_sync_delay", fragment_sync_delay),
            "fragment_update_alpha": option("fragment_update_alpha", fragment_update_alpha),
            "quantization_bits": option("quantization_bits", quantization_bits),
        }
        check_options(**worker_options)
        names = {"worker_id": option("worker_id", worker_id), "bf16_comm": bool(option("bf16_comm", bf16_comm))}
        self.worker_options = worker_options | names
        """Options of the worker, from arguments, environment and defaults."""
        self.hand = Hand()
        """Rows of this run, for a `DiLoCoSampler`."""
        self._worker: DiLoCoWorker | WorkerOfRanks | None = None
        self._resumed: dict[str, Any] = {}
        self._token_count: TokenCount | None = None
        self._own_tokens = 0
        """Tokens that it has counted itself in this step."""
        self._step: int | None = None
        """Steps of the run that were counted, where its optimizer is none of torch."""

    @property
    def active(self) -> bool:
        """True if there is a server. Otherwise the callback does nothing."""
        return self.server_addr is not None

    def count_tokens(self, tokens: int) -> None:
        """Count tokens of the next step, such as in a loss function; see `DiLoCoWorker.count_tokens`.

        The callback counts the elements of text batches itself, until this is called for the first time: then only what
        you count is counted. Without a server, and before training begins, it counts nothing.
        """
        if self._worker is None:
            return
        if self._token_count is not None:
            self._token_count.close()
            self._token_count = None
            tokens -= self._own_tokens
        self._worker.count_tokens(tokens)

    # State: the worker's ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {} if self._worker is None else self._worker.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        # It comes before on_train_begin, and the worker needs it when it joins.
        self._resumed = dict(state_dict)

    # Events -----------------------------------------------------------------------------------------------------------

    def on_train_begin(self, state: Any, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        self.close()
        if self.server_addr is None:
            return
        if model is None or optimizer is None:
            _log.error("DiLoCoCallback does nothing, because its trainer passes no model or no optimizer")
            return
        if part_of(kwargs.get("trainer")) is not None:
            raise UsageError(
                "DiLoCoCallback: each rank trains a stage of a pipeline, and a worker needs a whole model; use DDP or "
                "fully_shard (FSDP2) inside a worker"
            )
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(unwrapped(model), torch.nn.Module):
            raise UsageError(
                f"DiLoCoCallback: the run's model is of type {type(model).__name__}, not a torch module; "
                "train with torch, or with KERAS_BACKEND=torch"
            )
        from .ranks import WorkerOfRanks
        from .tensors import refuse_deepspeed
        from .token_count import TokenCount
        from .worker import DiLoCoWorker

        refuse_deepspeed(model, optimizer)
        has_hooks = isinstance(optimizer, torch.optim.Optimizer)
        worker = (WorkerOfRanks if is_group() else DiLoCoWorker)(
            model,
            optimizer if has_hooks else None,
            self.server_addr,
            **self.worker_options,
        )
        worker.hand = self.hand
        worker.load_state_dict(self._resumed)
        worker.start()
        self._resumed = {}
        self._own_tokens, self._token_count = 0, TokenCount(unwrapped(model), self._count_own)
        self._worker, self._step = worker, None if has_hooks else state.global_step

    def on_step_end(self, state: Any, **kwargs: Any) -> None:
        self._own_tokens = 0
        if self._worker is None or self._step is None:
            return
        for _ in range(state.global_step - self._step):  # Keras may end several steps at once
            self._worker.count_step()
        self._step = state.global_step

    def on_log_step(self, logs: dict[str, Any], **kwargs: Any) -> None:
        if self._worker is not None:
            if isinstance(logs.get("loss"), int | float):
                self._worker.count_loss(logs["loss"])
            logs.update(self._worker.sync_metrics)

    def on_train_end(self, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.finish()
        self.close()

    def close(self) -> None:
        """Leave the server. The run's trainer calls it, also after a failed run. Idempotent."""
        worker, self._worker = self._worker, None
        count, self._token_count = self._token_count, None
        if count is not None:
            count.close()
        if worker is not None:
            worker.stop()

    def _count_own(self, tokens: int) -> None:
        if self._worker is not None:
            self._own_tokens += tokens
            self._worker.count_tokens(tokens)
