"""Compare DiLoCo with synchronous data parallel training, and a DiLoCo server with a memcpy.

    .venv/bin/python benchmarks/diloco.py                          # about 5 minutes on 2 cores; needs torch
    .venv/bin/python benchmarks/diloco.py --only line waits
    .venv/bin/python benchmarks/diloco.py --only server --millions 25 --formats bf16 4-bit float32

Four workers train the small GPT of `examples/21_gpt_from_scratch.py` on its text: as ranks of DistributedDataParallel
over gloo, as workers of a `DiLoCoServer`, and as workers that stream fragments of 4 bits. All read the same rows. The
rates of learning are options, so that each way can have its best ones, and so are the delay of fragments and the
weight of local progress in it. With `--start-steps`, all begin with a model
that was trained before, as the workers of arXiv 2311.08105 do. A relay between each worker and the others counts the
bytes of all three ways alike.

`--only` chooses parts:

- `loss`: the loss on text that was held out, and the bytes on all lines, by those of the ranks.
- `line`: tokens per second by those of the ranks, over lines of 50 ms each way and 20 Mbit/s.
- `waits`: waiting by the time of a round, where the transfers take half of it.
- `server`: processor time of a mean by that of a memcpy, and memory by the number of parameters.

The exit status is 1 if a target is missed. All processes share this machine, so run it while nothing else does. Losses
and bytes do not depend on that.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import multiprocessing
import os
import platform
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from statistics import mean, median
from typing import Any, Self

import processes
import torch
from diloco_workers import (
    LIMIT_S,
    TOKEN,
    WORKERS,
    LineKind,
    LooselyJoined,
    Order,
    Report,
    Run,
    Sleeping,
    Synchronous,
    loss_of,
    model_of,
    sleeping_model,
    work,
)

from skyward.training.diloco import DiLoCoServer
from skyward.training.diloco.client import DiLoCoClient
from skyward.training.diloco.compression import compress_with_feedback
from skyward.training.diloco.frames import encode, size_of
from skyward.training.diloco.rounds import UpdateKey
from skyward.training.diloco.tensors import exchanged, frame_of, to_tensors, to_wire

SYNC_EVERY = 50
PLAIN: dict[str, Any] = {"sync_every": SYNC_EVERY}
STREAMING: dict[str, Any] = {"sync_every": SYNC_EVERY, "num_fragments": 2, "quantization_bits": 4}
NEAR = LineKind()
FAR = LineKind(delay_s=0.05, bytes_per_s=20e6 / 8)
LONG = LineKind(delay_s=0.01, bytes_per_s=100e6 / 8)
"""For steps that sleep."""
SENDERS = 16
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"bf16_answers": True},
    "4-bit": {"quantization_bits": 4},
}
"""Formats of deltas, with the server's options for answers alike."""
DOWNLOADS = 4
"""Answers that this process fetches at once. It holds them in memory, which the server does not."""


@dataclass(kw_only=True)
class Verdicts:
    """Ratios and their targets."""

    has_missed: bool = False

    def judge(self, title: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
        """Print a ratio with its target."""
        limit = at_most if at_most is not None else at_least
        assert limit is not None
        is_reached = value <= limit if at_most is not None else value >= limit
        self.has_missed |= not is_reached
        bound = "at most" if at_most is not None else "at least"
        print(f"{title}: {value:.3g} ({bound} {limit:.3g}: {'reached' if is_reached else 'missed'})", flush=True)


# Processes ------------------------------------------------------------------------------------------------------------


class Workers:
    """Processes that train. They are started once, because each imports torch."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def obey(self, order: Order) -> list[Report]:
        """Let each process do the same, and return their reports."""
        for connection in self._connections:
            connection.send(order)
        reports: dict[int, Report] = {}
        ready: set[int] = set()
        while len(reports) < WORKERS:
            arrived = wait(self._connections, LIMIT_S)
            if not arrived:
                raise TimeoutError(f"{WORKERS - len(reports)} of {WORKERS} workers gave no report")
            for rank, connection in enumerate(self._connections):
                if connection in arrived:
                    message = connection.recv()
                    if message == "ready":
                        ready.add(rank)
                    elif isinstance(message, Report):
                        reports[rank] = message
                    else:
                        raise RuntimeError(f"worker {rank} failed:\n{message}")
            if len(ready) == WORKERS:
                ready.clear()
                for connection in self._connections:
                    connection.send("begin")
        return [reports[rank] for rank in range(WORKERS)]

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def port_of(server: DiLoCoServer) -> int:
    return int(server.address.rpartition(":")[2])


@contextlib.contextmanager
def serving(model: torch.nn.Module, **options: Any) -> Iterator[DiLoCoServer]:
    with DiLoCoServer(model, WORKERS, port=0, token=TOKEN, heartbeat_timeout=0, **options) as server:
        yield server


# Three ways to train --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Outcome of a run."""

    loss: float
    bytes: float
    """On all lines."""
    tokens_per_s: float
    waited: float = 0.0
    """Share of the time in which training stood still for the exchange."""


def train_synchronously(workers: Workers, run: Run, line: LineKind) -> Trained:
    order = Synchronous(run=run, port=free_port(), line=line)
    reports = workers.obey(order)
    counted = (len(run.range) - order.uncounted) / len(run.range)
    return Trained(
        loss=reports[0].loss,
        bytes=sum(report.carried for report in reports) / counted,
        tokens_per_s=run.tokens * counted / max(report.seconds for report in reports),
    )


def train_loosely(
    workers: Workers, run: Run, line: LineKind, options: Mapping[str, Any], **server_options: Any
) -> Trained:
    model = model_of(run)
    with serving(model, **server_options) as server:
        reports = workers.obey(LooselyJoined(run=run, port=port_of(server), line=line, options=dict(options)))
        frame = DiLoCoClient(server.address, token=TOKEN).parameters()
    assert frame is not None
    parameters = exchanged(model)
    with torch.no_grad():
        for name, value in to_tensors(frame).items():
            parameters[name].copy_(value)
    seconds = max(report.seconds for report in reports)
    return Trained(
        loss=loss_of(model),
        bytes=sum(report.carried for report in reports),
        tokens_per_s=run.tokens / seconds,
        waited=mean(report.waited_s for report in reports) / seconds,
    )


def in_three_ways(
    workers: Workers,
    loosely: Run,
    synchronous: Run,
    line: LineKind,
    outer: Mapping[str, Any],
    streaming: Mapping[str, Any],
) -> dict[str, Trained]:
    """Train in all ways. The synchronous one may take fewer steps, as many as its speed needs."""
    return {
        "DDP": train_synchronously(workers, synchronous, line),
        f"DiLoCo, H={SYNC_EVERY}": train_loosely(workers, loosely, line, PLAIN, **outer),
        "streaming, 4 bits": train_loosely(workers, loosely, line, streaming, quantization_bits=4, **outer),
    }


def title_of(run: Run) -> str:
    parameters = sum(tensor.numel() for tensor in exchanged(model_of(run)).values())
    return f"GPT of {parameters:,} parameters, {WORKERS} workers, {run.rows} rows each"


@contextlib.contextmanager
def started(workers: Workers, run: Run, steps: int) -> Iterator[str]:
    """Train for some steps, and yield a file with the parameters; without steps no file."""
    if not steps:
        yield ""
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "start.pt")
        before = train_synchronously(workers, replace(run, steps=steps, save_file=path), NEAR)
        print(f"\nthe start of all ways: {steps} steps of DDP, loss {before.loss:.4f}")
        yield path


def compare_losses(
    workers: Workers,
    run: Run,
    loosely: Run,
    outer: Mapping[str, Any],
    stream: Mapping[str, Any],
    verdicts: Verdicts,
) -> None:
    print(f"\nloss and bytes: {title_of(run)}, {run.steps} steps, {run.tokens:,} tokens in all")
    ways = in_three_ways(workers, loosely, run, NEAR, outer, stream)
    ddp = ways["DDP"]
    print(f"{'':20}{'loss':>8}{'by DDP':>9}{'MB':>10}{'DDP by it':>11}{'tokens/s':>11}")
    for name, way in ways.items():
        print(
            f"{name:20}{way.loss:8.4f}{way.loss / ddp.loss:9.4f}{way.bytes / 1e6:10.2f}{ddp.bytes / way.bytes:11.1f}"
            f"{way.tokens_per_s:11,.0f}"
        )
    _, plain, streaming = ways.values()
    verdicts.judge("DiLoCo's loss, by DDP's", plain.loss / ddp.loss, at_most=1.02)
    verdicts.judge("DDP's bytes, by DiLoCo's", ddp.bytes / plain.bytes, at_least=40)
    verdicts.judge("streaming's loss, by DDP's", streaming.loss / ddp.loss, at_most=1.03)
    verdicts.judge("DDP's bytes, by streaming's", ddp.bytes / streaming.bytes, at_least=150)


def compare_speeds(
    workers: Workers, run: Run, outer: Mapping[str, Any], stream: Mapping[str, Any], verdicts: Verdicts
) -> None:
    loosely = replace(run, last_step=2 * SYNC_EVERY)
    synchronous = replace(run, last_step=12)
    mbit = 8 * FAR.bytes_per_s / 1e6
    print(f"\nlines of {1000 * FAR.delay_s:.0f} ms each way and {mbit:.0f} Mbit/s: {title_of(run)}")
    ways = in_three_ways(workers, loosely, synchronous, FAR, outer, stream)
    ddp = ways["DDP"]
    print(f"{'':20}{'tokens/s':>10}{'by DDP':>9}{'waiting':>9}")
    for name, way in ways.items():
        print(f"{name:20}{way.tokens_per_s:10,.0f}{way.tokens_per_s / ddp.tokens_per_s:9.1f}{way.waited:9.3f}")
    _, plain, streaming = ways.values()
    verdicts.judge("DiLoCo's tokens per second, by DDP's", plain.tokens_per_s / ddp.tokens_per_s, at_least=10)
    verdicts.judge("streaming's tokens per second, by DDP's", streaming.tokens_per_s / ddp.tokens_per_s, at_least=10)


# Waiting --------------------------------------------------------------------------------------------------------------


def measure_waits(workers: Workers, verdicts: Verdicts) -> None:
    """Measure transfers that training waits for; then let steps be so long that these take half of a round."""
    options: dict[str, Any] = {"sync_every": 40, "num_fragments": 4}
    gap = 10
    values = sum(parameter.numel() for parameter in sleeping_model().parameters())

    def slept(steps: int, step_s: float, **more: Any) -> list[Report]:
        with serving(sleeping_model(), bf16_answers=True) as server:
            order = Sleeping(steps=steps, step_s=step_s, port=port_of(server), line=LONG, options=options | more)
            return workers.obey(order)

    print(f"\nwaiting: {WORKERS} workers stream {values:,} values in bf16; steps sleep, as a GPU's would")
    blocking = slept(4 * gap, 0.01)
    transfer_s = mean(report.waited_s for report in blocking) / 4
    step_s = 2 * transfer_s / gap
    reports = slept(16 * gap, step_s, fragment_sync_delay=gap - 2)
    share = mean(report.waited_s / report.seconds for report in reports)
    print(f"a transfer takes {1000 * transfer_s:.0f} ms, and {gap} steps take {1000 * gap * step_s:.0f} ms")
    verdicts.judge("waiting, by the time of a round", share, at_most=0.05)


# The server -----------------------------------------------------------------------------------------------------------


def serve(connection: Connection, options: dict[str, Any]) -> None:
    """Run a server in a process of its own."""
    with DiLoCoServer(None, SENDERS, port=0, token=TOKEN, heartbeat_timeout=0, **options) as server:
        connection.send(server.address)
        connection.recv()


@contextlib.contextmanager
def server_process(options: dict[str, Any]) -> Iterator[tuple[DiLoCoClient, int]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, options), daemon=True)
    process.start()
    try:
        if not ours.poll(LIMIT_S):
            raise TimeoutError("the server did not start")
        client = DiLoCoClient(ours.recv(), token=TOKEN, timeout_s=LIMIT_S)
        assert process.pid is not None
        yield client, process.pid
    finally:
        process.terminate()
        process.join(LIMIT_S)


@dataclass
class Peak:
    """Largest memory of a process, beyond files that it has mapped, in MiB. A thread looks all the time."""

    pid: int
    mib: float = 0.0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            self.mib = max(self.mib, processes.anonymous_mib(self.pid))


def shapes_of(millions: float) -> dict[str, tuple[int, ...]]:
    """Return shapes as those of a GPT: an embedding, and layers of width 768."""
    layer = {"attention": (2304, 768), "projection": (768, 768), "up": (3072, 768), "down": (768, 3072), "norm": (768,)}
    shapes: dict[str, tuple[int, ...]] = {"embedding": (round(150_000 * millions / 768), 768)}
    for number in range(round(0.85 * millions / 7.08)):
        shapes |= {f"{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def copy_cpu_s(size: int) -> float:
    """Return the processor time of a memcpy of some bytes, between buffers that are in use.

    Not torch's: that shares the copy between threads, which wait for each other with busy processors.
    """
    source, target = bytearray(b"1" * size), bytearray(b"2" * size)
    times = []
    for _ in range(max(5, 2**28 // size)):
        began = time.process_time()
        memoryview(target)[:] = source
        times.append(time.process_time() - began)
    return median(times)


def submit_all(client: DiLoCoClient, round_number: int, submit: Callable[[UpdateKey], None], *, at_once: int) -> None:
    keys = [UpdateKey(worker=f"w{n:02}", base_round=round_number, number=round_number) for n in range(SENDERS)]
    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(submit, keys))


def measure_server(millions: float, delta_format: str, verdicts: Verdicts) -> None:
    shapes = shapes_of(millions)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    parameters = sum(tensor.numel() for tensor in tensors.values())
    bits = {"4-bit": 4}.get(delta_format)
    pieces = frame_of(
        compress_with_feedback(tensors, {}, bits)[0] if bits else tensors, {}, is_bf16=delta_format == "bf16"
    )
    size = size_of(pieces)
    copy_s = copy_cpu_s(size)
    print(f"\nserver: {SENDERS} workers send {parameters:,} values as {delta_format}, {size / 1e6:.0f} MB each")
    with server_process(FORMATS[delta_format]) as (client, pid):
        idle_mib = processes.anonymous_mib(pid)
        for number in range(SENDERS):
            name = f"w{number:02}"
            client.ask("/join", {"worker": name, "session": name, "base_round": None, "layout": shapes})
        client.offer(encode(to_wire(tensors), {}))
        del tensors
        spent: list[float] = []

        def submit(key: UpdateKey) -> None:
            before = processes.all_cpu_seconds(pid)
            client.submit(key, key.worker, pieces)
            spent.append(processes.all_cpu_seconds(pid) - before)

        submit_all(client, 0, submit, at_once=1)
        *receipts, last = spent
        receipt_s = mean(receipts)  # each is a count of the system's ticks of 10 ms
        with Peak(pid) as peak:
            submit_all(client, 1, submit, at_once=SENDERS)
            submit_all(client, 1, lambda key: _fetch(client, key), at_once=DOWNLOADS)
    mean_s = last - receipt_s
    print(f"a memcpy of one delta takes {1000 * copy_s:.1f} ms of a processor; to close the round {mean_s:.2f} s")
    verdicts.judge("to receive and check a delta, by a memcpy", receipt_s / copy_s, at_most=2)
    verdicts.judge("aggregation, by a memcpy of all deltas", mean_s / (SENDERS * copy_s), at_most=2)
    used = (peak.mib - idle_mib) * 2**20 / parameters
    verdicts.judge("memory at the peak, bytes for each parameter", used, at_most=16)


def _fetch(client: DiLoCoClient, key: UpdateKey) -> None:
    assert client.answer(key, key.worker, wait_s=20) is not None


# Everything -----------------------------------------------------------------------------------------------------------


def machine() -> str:
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="DiLoCo beside DistributedDataParallel; see the top of this file")
    parts = ("loss", "line", "waits", "server")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="parts to run (default: all)")
    parser.add_argument("--steps", type=int, default=500, help="steps of the runs for the loss (default: 500)")
    parser.add_argument("--start-steps", type=int, default=0, help="steps of DDP before all ways (default: 0)")
    parser.add_argument("--width", type=int, default=96, help="width of the GPT (default: 96)")
    parser.add_argument("--depth", type=int, default=3, help="layers of the GPT (default: 3)")
    parser.add_argument("--rate", type=float, default=3e-3, help="rate of learning of AdamW (default: 0.003)")
    parser.add_argument("--loose-rate", type=float, help="rate of learning of DiLoCo's workers (default: --rate)")
    parser.add_argument("--outer-lr", type=float, default=0.7, help="rate of the outer SGD (default: 0.7)")
    parser.add_argument("--outer-momentum", type=float, default=0.9, help="its momentum, 0 for none (default: 0.9)")
    parser.add_argument("--delay", type=int, default=5, help="steps that a fragment is on its way (default: 5)")
    parser.add_argument("--alpha", type=float, default=0.0, help="weight of local progress in them (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first parameters and of dropout (default: 0)")
    parser.add_argument("--millions", type=float, default=100, help="parameters of the server's model, in millions")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bf16", "4-bit"], help="formats of deltas")
    options = parser.parse_args(arguments)
    print(f"{machine()}, {datetime.datetime.now(datetime.UTC).date()}, load {os.getloadavg()[0]:.1f}")
    verdicts = Verdicts()
    run = Run(
        steps=options.steps,
        width=options.width,
        depth=options.depth,
        learning_rate=options.rate,
        seed=options.seed,
    )
    loosely = replace(run, learning_rate=options.loose_rate or options.rate)
    outer = {"outer_lr": options.outer_lr, "outer_momentum": options.outer_momentum}
    stream = {**STREAMING, "fragment_sync_delay": options.delay, "fragment_update_alpha": options.alpha}
    if {"loss", "line", "waits"} & set(options.only):
        with Workers() as workers:
            if "loss" in options.only:
                with started(workers, run, options.start_steps) as path:
                    start = {"start_file": path, "read_steps": options.start_steps}
                    compare_losses(workers, replace(run, **start), replace(loosely, **start), outer, stream, verdicts)
            if "line" in options.only:
                compare_speeds(workers, run, outer, stream, verdicts)
            if "waits" in options.only:
                measure_waits(workers, verdicts)
    if "server" in options.only:
        for delta_format in options.formats:
            measure_server(options.millions, delta_format, verdicts)
    return int(verdicts.has_missed)


if __name__ == "__main__":
    raise SystemExit(main())
