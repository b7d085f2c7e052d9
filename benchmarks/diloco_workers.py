"""The processes that train for `diloco.py`: ranks of DistributedDataParallel, or workers of a DiLoCo server.

Each process obeys one order after another. A line (`tests/relay.py`) leads from each rank or worker to the others. It
counts the bytes, and may be long and narrow.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from skyward.training.diloco import DiLoCoWorker
from tests.relay import ROOT, Relay

WORKERS = 4
TOKEN = "a token of the benchmark"
HELD_OUT = 128
"""Rows of the text for the loss."""
WARM_UP = 20
"""Steps in which the learning rate rises. Then it falls, as a cosine, to a tenth."""
LIMIT_S = 300.0
"""Longest wait for others, in seconds."""
_NEXT = 256
"""Distance of a line's port from that of its rank; see `_StoreOfLines`."""
_IPV4 = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)
"""A sockaddr_in of this machine."""


@dataclass(frozen=True, kw_only=True)
class LineKind:
    """Line between a worker and the others, in each direction."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    """0: unlimited."""

    def to(self, port: int, *, own_port: int = 0, has_handshakes: bool = True) -> Relay:
        """Return a line to a port of this machine."""
        return Relay(
            ("127.0.0.1", port),
            delay_s=self.delay_s,
            bytes_per_s=self.bytes_per_s,
            has_handshakes=has_handshakes,
            port=own_port,
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run: the same model, data and rate of learning for all ways to train."""

    steps: int
    last_step: int | None = None
    """Step after which the run ends; None: the last one of its rate of learning."""
    start_file: str = ""
    """File with the parameters of the model before its first step; "": random ones."""
    save_file: str = ""
    """File for the parameters after its last step, of the synchronous way only."""
    read_steps: int = 0
    """Steps of an earlier run, whose rows this one does not read again in the same epoch."""
    rows: int = 8
    """Rows of each worker in each step."""
    learning_rate: float = 3e-3
    width: int = 64
    depth: int = 2
    seed: int = 0

    @property
    def range(self) -> range:
        return range(self.steps if self.last_step is None else self.last_step)

    @property
    def tokens(self) -> int:
        """Tokens of all workers."""
        return len(self.range) * WORKERS * self.rows * int(gpt().CONTEXT)

    def rate(self, step: int) -> float:
        if step < WARM_UP:
            return (step + 1) / WARM_UP
        return 0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(1, self.steps - WARM_UP))


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings of one worker."""

    seconds: float
    carried: int = 0
    """Bytes of its line, in both directions."""
    loss: float = math.nan
    """On the text that was held out. Workers of a server leave it to the server's model."""
    waited_s: float = 0.0
    """Seconds in which training stood still for the exchange."""


class Order(Protocol):
    """Task of one process."""

    def obey(self, rank: int, together: Together) -> Report: ...


class Together:
    """Lets all processes begin at the same time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def begin(self) -> float:
        """Wait for the others, and return the time."""
        self._connection.send("ready")
        if not self._connection.poll(LIMIT_S):
            raise TimeoutError("the others did not come")
        self._connection.recv()
        return time.perf_counter()


def work(connection: Connection, rank: int) -> None:
    """Obey orders until there are no more. Each answer is a report, or a text that says why there is none."""
    torch.set_num_threads(1)
    together = Together(connection)
    while (order := connection.recv()) is not None:
        try:
            connection.send(order.obey(rank, together))
        except Exception:
            connection.send("".join(traceback.format_exc()))


# Model and data -------------------------------------------------------------------------------------------------------


@cache
def gpt() -> ModuleType:
    """Return the example with the model and its text."""
    spec = importlib.util.spec_from_file_location("gpt_from_scratch", ROOT / "examples" / "21_gpt_from_scratch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_of(run: Run) -> torch.nn.Module:
    """Return the model before its first step."""
    torch.manual_seed(run.seed)
    model: torch.nn.Module = gpt().GPT(run.width, run.depth)
    if run.start_file:
        model.load_state_dict(torch.load(run.start_file))
    return model


@cache
def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels, each of shape (rows, context)."""
    rows = gpt().windows(gpt().TEXT.read_text())
    return torch.stack([row["input_ids"] for row in rows]), torch.stack([row["labels"] for row in rows])


@cache
def order_of(epoch: int) -> torch.Tensor:
    return HELD_OUT + torch.randperm(len(text()[0]) - HELD_OUT, generator=torch.Generator().manual_seed(epoch))


def batch(run: Run, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of one worker in a step. All workers together read each row once in an epoch."""
    inputs, labels = text()
    begin = ((run.read_steps + step) * WORKERS + rank) * run.rows
    places = [divmod(position, len(inputs) - HELD_OUT) for position in range(begin, begin + run.rows)]
    chosen = torch.stack([order_of(epoch)[place] for epoch, place in places])
    return inputs[chosen], labels[chosen]


@torch.no_grad()
def loss_of(model: torch.nn.Module) -> float:
    """Return the mean loss on the text that was held out."""
    model.eval()
    inputs, labels = (rows[:HELD_OUT] for rows in text())
    return float(model(inputs, labels)[0])


def train(run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Iterator[int]:
    """Train, and yield the number of steps after each of them."""
    torch.manual_seed(1000 * run.seed + rank)  # for dropout
    for step in run.range:
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate * run.rate(step)
        optimizer.zero_grad()
        inputs, labels = batch(run, step, rank)
        model(inputs, labels)[0].backward()
        optimizer.step()
        yield step + 1


# Synchronous: each step waits for the gradients of all ranks ----------------------------------------------------------


class _StoreOfLines(dist.Store):  # type: ignore[misc, name-defined]  # torch gives it no types
    """Store in which the others find a line's address instead of this rank's own.

    Of two ranks, gloo lets the one with the larger address connect, and reads ports in the network's order of bytes. So
    a port that is larger by 256 has the place next to it in that order, and both ranks agree.
    """

    def __init__(self, inner: Any, kind: LineKind) -> None:
        super().__init__()
        self._inner, self._kind = inner, kind
        self.line: Relay | None = None

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(key, _IPV4.sub(self._line_to, data))

    def _line_to(self, address: re.Match[bytes]) -> bytes:
        port = int.from_bytes(address[1], "big")
        if self.line is None:
            self.line = self._kind.to(port, own_port=port + _NEXT, has_handshakes=False)
        return b"\x02\x00" + self.line.port.to_bytes(2, "big") + b"\x7f\x00\x00\x01"

    def get(self, key: str) -> bytes:
        return bytes(self._inner.get(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=LIMIT_S)) -> None:
        self._inner.wait(keys, timeout)


@dataclass(frozen=True, kw_only=True)
class Synchronous:
    """Train as a rank of DistributedDataParallel, over gloo."""

    run: Run
    port: int
    """Port of the ranks' store."""
    line: LineKind
    uncounted: int = 2
    """First steps, which the time leaves out. In them gloo makes its buffers."""

    def obey(self, rank: int, together: Together) -> Report:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        limit = timedelta(seconds=LIMIT_S)
        inner: Any = dist.TCPStore(  # type: ignore[attr-defined]  # torch gives it no types
            "127.0.0.1", self.port, WORKERS, is_master=rank == 0, timeout=limit
        )
        store = _StoreOfLines(inner, self.line)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS, timeout=limit)
        try:
            model = model_of(self.run)
            parallel = torch.nn.parallel.DistributedDataParallel(model)
            return self._trained(model, parallel, rank, together, store)
        finally:
            dist.destroy_process_group()
            if store.line is not None:
                store.line.close()

    def _trained(
        self, model: torch.nn.Module, parallel: torch.nn.Module, rank: int, together: Together, store: _StoreOfLines
    ) -> Report:
        assert store.line is not None
        optimizer = torch.optim.AdamW(model.parameters())
        began, carried = together.begin(), 0
        for steps in train(self.run, parallel, optimizer, rank):
            if steps == self.uncounted:
                dist.barrier()
                began, carried = together.begin(), store.line.count_bytes()
        seconds = time.perf_counter() - began
        together.begin()  # so that the bytes of all have passed
        carried = store.line.count_bytes() - carried
        if rank == 0 and self.run.save_file:
            torch.save(model.state_dict(), self.run.save_file)
        return Report(seconds=seconds, carried=carried, loss=loss_of(model) if rank == 0 else math.nan)


# Loosely joined -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LooselyJoined:
    """Train as a worker of a DiLoCo server."""

    run: Run
    port: int
    """The server's port."""
    line: LineKind
    options: dict[str, Any] = field(default_factory=dict)
    """Of the worker."""

    def obey(self, rank: int, together: Together) -> Report:
        model = model_of(self.run)
        optimizer = torch.optim.AdamW(model.parameters())
        with self.line.to(self.port) as line:
            address = f"{line.host}:{line.port}"
            with DiLoCoWorker(
                model, optimizer, address, worker_id=f"w{rank}", timeout=LIMIT_S, token=TOKEN, **self.options
            ) as worker:
                began, carried = together.begin(), line.count_bytes()
                for _ in train(self.run, model, optimizer, rank):
                    pass
                worker.finish()
                seconds = time.perf_counter() - began
                carried = line.count_bytes() - carried
                waited_s = worker.sync_metrics["diloco/total_sync_time"]
        return Report(seconds=seconds, carried=carried, waited_s=waited_s)


@dataclass(frozen=True, kw_only=True)
class Sleeping:
    """Take steps that sleep, as those of a GPU leave the processor idle, and exchange a model beside them."""

    steps: int
    step_s: float
    port: int
    line: LineKind
    options: dict[str, Any] = field(default_factory=dict)

    def obey(self, rank: int, together: Together) -> Report:
        model = sleeping_model()
        with self.line.to(self.port) as line:
            address = f"{line.host}:{line.port}"
            with DiLoCoWorker(
                model, None, address, worker_id=f"w{rank}", timeout=LIMIT_S, token=TOKEN, **self.options
            ) as worker:
                began, waited_s = together.begin(), 0.0
                for _ in range(self.steps):
                    time.sleep(self.step_s)
                    step_ended = time.perf_counter()
                    worker.count_step()
                    waited_s += time.perf_counter() - step_ended
                seconds = time.perf_counter() - began
        return Report(seconds=seconds, waited_s=waited_s)


def sleeping_model() -> torch.nn.Module:
    """Return a model of about a million parameters."""
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
