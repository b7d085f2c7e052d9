"""A runner: one process that opens the pool of one attempt, runs its call, and tells the hub.

It is detached: launcher and server may die and be replaced while it works. If it dies itself, its keeper ends the
nodes, as for any pool.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import queue
import signal
import sys
import tarfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...calls.compute import PendingCompute, compute
from ...calls.options import CallOptions
from ...errors import (
    BudgetExceeded,
    ControlFailed,
    NoCapacity,
    NodeError,
    PoolClosed,
    ProviderError,
    SkywardError,
    SlotLost,
    UsageError,
)
from ...pool.config import provider_of
from ...pool.pool import ComputePool
from ...values.image import Image
from ...values.launch import ProcessLaunch
from ...values.machine import LogLine
from ...wire.failures import encode_failure
from ..client.settings import JOB, URL, Address
from ..model.jobs import AttemptEnd
from .packed_call import CallFailed, run_packed, split_call
from .reporter import HubLink, Reporter, Stale, until_heard
from .sweep_run import run_sweep

OUTPUT_LIMIT = 256 << 20
"""Most bytes of output of an attempt. The rest is dropped, with a line that says so."""
LAST_WORD_S = 7 * 86_400.0
"""Seconds for which the end of an attempt waits for a hub that is away. Its machines are gone by then."""
_SLICE_S = 0.25
LAUNCH = "launch.json"
VISIBLE = "CUDA_VISIBLE_DEVICES"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AttemptOutcome:
    """End of an attempt, with the packed value or exception."""

    end: AttemptEnd
    error: str = ""
    value: bytes | None = None
    failure: bytes | None = None


class JobRunner:
    """Runner of one attempt.

    Args:
        folder: Folder that its launcher made, with the launch in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._launch: Mapping[str, Any] = json.loads((folder / LAUNCH).read_text())
        self._spec: Mapping[str, Any] = self._launch["spec"]
        self._output = (folder / "output").open("ab", buffering=0)
        self._orders: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        self._pool: ComputePool | None = None
        self._cost_usd = 0.0
        self._reporter = Reporter(
            self._link,
            folder / "output",
            on_order=lambda command, grace_s: self._orders.put((command, grace_s)),
            on_stale=lambda: self._orders.put(("stale", 0.0)),
            cost_usd=self._cost,
        )

    def run(self) -> int:
        """Run the attempt to its end. Return the status of the process."""
        link = self._link()
        try:
            until_heard(lambda: self._first_beat(link))
            self._reporter.start()
            content = self._fetch(link)
            outcome = self._work(*content)
            self._report(link, outcome)
        except Stale as error:
            _log.warning("this attempt is over: %s", error)
            return 1
        finally:
            link.close()
        return 0

    def _first_beat(self, link: HubLink) -> None:
        """Be heard before anything is opened: from now on the hub knows that machines may be in use."""
        link.beat(is_running=False, cost_usd=0.0)

    def _fetch(self, link: HubLink) -> tuple[ProcessLaunch, bytes]:
        """Download code and call, and make this process see the code, and with it the nodes."""
        code = self._folder / "code"
        code.mkdir(exist_ok=True)
        archive, call = self._folder / "code.tar.gz", self._folder / "call"
        until_heard(lambda: link.download("code", archive))
        until_heard(lambda: link.download("call", call))
        with tarfile.open(archive) as files:
            files.extractall(code, filter="data")
        archive.unlink()
        (code / self._spec["code_folder"]).mkdir(parents=True, exist_ok=True)
        sys.path[:0] = [str(code / part) for part in self._spec["code_path"]]
        os.chdir(code / self._spec["code_folder"])
        return split_call(call.read_bytes())

    def _work(self, launch: ProcessLaunch, call: bytes) -> AttemptOutcome:
        try:
            pool = self._make_pool()
        except (SkywardError, TypeError) as error:
            return AttemptOutcome(end=AttemptEnd.FAILED, error=_in_words(error), failure=encode_failure(error))
        self._pool = pool
        try:
            with pool:
                self._reporter.is_running = True
                self._reporter.beat_now()
                outcome = self._run_call(pool, _pending(self._spec, launch, call))
        except Exception as error:
            outcome = _of_start(error)
        self._cost_usd = pool.cost_usd
        return outcome

    def _make_pool(self) -> ComputePool:
        """Make the pool of the machine set, for the nodes that the hub has given to this attempt."""
        machines, nodes = self._launch["machines"], self._launch["nodes"]
        description = dict(machines["provider"])
        if machines["kind"] == "fixed" and "hosts" in description:
            description["hosts"] = [description["hosts"][number] for number in nodes]
        options = dict(self._spec["pool"])
        image = dict(self._spec["image"])
        if description["type"] != "local":  # there, nodes have the environment of this process
            image["env"] = {**image.get("env", {}), JOB: self._launch["job"]}
        if numbers := self._launch["devices"]:
            restrict(machines, nodes, numbers, image)
        if machines["kind"] != "fixed":
            asked = {name: self._spec[name] or None for name in ("accelerator", "vcpus", "memory_gib")}
            options |= {name: value for name, value in asked.items() if value is not None}
        return ComputePool(
            provider_of(description),
            nodes=len(nodes),
            image=Image(**image) if image else None,
            budget_usd=self._spec["budget_usd"],
            logs=self._write_line,
            console=False,
            name=f"job-{self._launch['job'][:8]}",
            **options,
        )

    def _run_call(self, pool: ComputePool, pending: PendingCompute[bytes]) -> AttemptOutcome:
        """Run the call, and obey the hub meanwhile."""
        done: queue.SimpleQueue[AttemptOutcome] = queue.SimpleQueue()

        def work() -> None:
            done.put(self._value(pool, pending))
            self._orders.put(("done", 0.0))

        worker = threading.Thread(target=work, name="skyward-job-call", daemon=True)
        worker.start()
        ending = threading.Timer(0, bool)  # the end of a grace
        was_stopped = False
        while True:
            command, grace_s = self._next_order()
            if command == "done":
                ending.cancel()
                outcome = done.get()
                # A training that saved and stopped returns as if it were complete, but the rest of it is to come.
                is_cut = was_stopped and outcome.end is AttemptEnd.COMPLETED
                return AttemptOutcome(end=AttemptEnd.STOPPED, error="saved and stopped") if is_cut else outcome
            if command == "save":
                self._control(pool, pending, "save", 0.0)
            elif command == "stop":
                ending = threading.Timer(grace_s, self._orders.put, [("abort", 0.0)])
                ending.daemon = True
                ending.start()
                was_stopped = self._control(pool, pending, "save_and_stop", 0.0)
                if not was_stopped:
                    self._orders.put(("abort", 0.0))
            else:
                ending.cancel()
                pool.close(cancel=True)
                worker.join()
                outcome = done.get()
                if command == "stale":
                    raise Stale("the hub has given it up")
                stopped = AttemptOutcome(end=AttemptEnd.STOPPED, error="the hub stopped it")
                return outcome if outcome.end is AttemptEnd.COMPLETED else stopped

    def _next_order(self) -> tuple[str, float]:
        """Wait for an order. In slices: a signal may reach another thread, and its handler runs when this one wakes."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._orders.get(timeout=_SLICE_S)

    def _control(self, pool: ComputePool, pending: PendingCompute[bytes], command: str, wait_s: float) -> bool:
        """Send a command to the training within the call. Return False if there is none that takes it."""
        try:
            getattr(pool.control(pending, start_s=0.0), command)(wait_s=wait_s)
        except ControlFailed as error:
            self._write(f"[skyward] {command}: no training in this call took it ({error})\n")
            return False
        return True

    def _value(self, pool: ComputePool, pending: PendingCompute[bytes]) -> AttemptOutcome:
        try:
            if self._spec["sweep"] is not None:
                value = run_sweep(pool, pending, self._spec["sweep"])
                return AttemptOutcome(end=AttemptEnd.COMPLETED, value=pickle.dumps(value, protocol=5))
            packed: Any = (pending @ pool) if self._spec["on"] == "all" else (pending >> pool)
            return AttemptOutcome(end=AttemptEnd.COMPLETED, value=pickle.dumps(packed, protocol=5))
        except CallFailed as error:
            return AttemptOutcome(end=AttemptEnd.FAILED, error=error.text, failure=error.failure)
        except (NodeError, ProviderError) as error:
            # A process that ends by itself, or uses too much memory, would do so again on every machine.
            if isinstance(error, (BudgetExceeded, SlotLost)):
                return AttemptOutcome(end=AttemptEnd.FAILED, error=_in_words(error), failure=encode_failure(error))
            return AttemptOutcome(end=AttemptEnd.LOST, error=_in_words(error))
        except (PoolClosed, CancelledError) as error:
            return AttemptOutcome(end=AttemptEnd.LOST, error=_in_words(error))
        except Exception as error:
            return AttemptOutcome(end=AttemptEnd.FAILED, error=_in_words(error), failure=encode_failure(error))

    def _report(self, link: HubLink, outcome: AttemptOutcome) -> None:
        """Tell the hub how the attempt ended. Everything before is on disk, and is sent until the hub has it."""
        self._reporter.stop()
        for name, content in (("value", outcome.value), ("error", outcome.failure)):
            if content is not None:
                file = self._folder / name
                file.write_bytes(content)
                until_heard(lambda name=name, file=file: link.send_result(name, file), limit_s=LAST_WORD_S)  # type: ignore[misc]
        until_heard(lambda: link.end(outcome.end.value, outcome.error, self._cost_usd), limit_s=LAST_WORD_S)

    # Output -----------------------------------------------------------------------------------------------------------

    def _write_line(self, line: LogLine) -> None:
        node = f"[{line.node}] " if len(self._launch["nodes"]) > 1 else ""
        self._write(f"{node}{line.text}\n")

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        position = self._output.tell()
        if position < OUTPUT_LIMIT:
            if position + len(data) >= OUTPUT_LIMIT:
                data += b"[skyward] the output is too long; the rest is left out\n"
            self._output.write(data)

    def _cost(self) -> float:
        return self._cost_usd if self._pool is None else max(self._cost_usd, self._pool.cost_usd)

    def _link(self) -> HubLink:
        address = Address(url=os.environ[URL], token=self._launch["token"] or None, project=self._launch["project"])
        return HubLink(address, self._launch["job"], self._launch["attempt"])

    def abort(self) -> None:
        """End the call, because this machine shuts down: the job goes back to its queue."""
        self._orders.put(("abort", 0.0))


def restrict(machines: Mapping[str, Any], nodes: Sequence[int], numbers: Sequence[int], image: dict[str, Any]) -> None:
    """Let the nodes of a pool see only the devices that the hub has given to this attempt.

    Nodes on this machine divide the GPUs that this process sees, so theirs are counted through. Other nodes get the
    variable by their image, unless they are used whole.
    """
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # nvidia-smi and the hub count by bus
    if machines["provider"]["type"] == "local":
        env = {name: value for name, value in image.get("env", {}).items() if name != VISIBLE}
        here = [node * machines["devices"] + number for node in nodes for number in numbers]
        given = os.environ.get(VISIBLE)
        if given is not None:  # the launcher has only a part of the machine's itself
            names = [name.strip() for name in given.split(",")]
            os.environ[VISIBLE] = ",".join(names[index] for index in here if index < len(names))
        else:
            os.environ |= {VISIBLE: ",".join(map(str, here)), **order}
    elif len(numbers) < machines["devices"]:
        env = {**image.get("env", {}), VISIBLE: ",".join(map(str, numbers)), **order}
    else:
        return
    if env or "env" in image:
        image["env"] = env


def _pending(spec: Mapping[str, Any], launch: ProcessLaunch, call: bytes) -> PendingCompute[bytes]:
    function = compute(run_packed)
    function.launch = launch
    options = CallOptions(timeout_s=spec["timeout_s"])
    return replace(function(call), options=options)


def _of_start(error: Exception) -> AttemptOutcome:
    """Return the outcome of a pool that did not open, or did not close."""
    if isinstance(error, NoCapacity):
        return AttemptOutcome(end=AttemptEnd.NO_CAPACITY, error=_in_words(error))
    if isinstance(error, Stale):
        raise error
    if isinstance(error, UsageError):
        return AttemptOutcome(end=AttemptEnd.FAILED, error=_in_words(error), failure=encode_failure(error))
    _log.error("the pool failed", exc_info=error)
    return AttemptOutcome(end=AttemptEnd.START_FAILED, error=_in_words(error))


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def main(folder: Path) -> int:
    """Run the attempt in a folder. Return the status of the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal of a launcher closes, and the job goes on
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        runner = JobRunner(folder.absolute())
        signal.signal(signal.SIGTERM, lambda *_: runner.abort())
        return runner.run()
    except BaseException:
        traceback.print_exc()
        raise
