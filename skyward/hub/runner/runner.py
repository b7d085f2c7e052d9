"""A runner: one process that opens a pool, runs one attempt on it after the other, and tells the hub.

It is detached: launcher and server may die and be replaced while it works. If it dies itself, its keeper ends the
nodes, as for any pool.

Its folder always describes the attempt that it runs now: the launch, and the output that the hub may still lack.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...calls.pending import PendingCompute
from ...errors import HubUnreachable, NoCapacity, SkywardError, UsageError
from ...events.base import Event
from ...events.machine import PhaseOutput, PhaseStarted, PreemptionNotice
from ...events.periodic import NodeUsage
from ...pool.config import provider_of
from ...pool.pool import ComputePool
from ...training.checkpoint.fence import WRITER
from ...values.image import Image
from ...values.machine import LogLine
from ...wire.failures import encode_failure
from ..client.settings import JOB, URL, Address
from ..model.jobs import FEEDS, AttemptEnd
from .attempt_run import AttemptOutcome, AttemptRun, in_words
from .command import CANCEL_S
from .gpu_samples import VISIBLE, GpuSamples, own_gpus
from .launch_file import CHECKPOINT_DIR, CODE, LAUNCH, checkpoint_folder, read_launch, write_private
from .packed_call import split_call
from .reporter import HubLink, Stale, Unheard, until_heard
from .secrets import secrets_of
from .unpacked_code import place_code, unpack_code

NEXT_S = 5.0
"""Seconds for which the hub may hold the question for the next attempt."""
GIVE_BACK_S = 60.0
"""Seconds for which the hub is told that kept machines are gone. Then it hears from the launcher that the runner is."""
_RETRY_S = 1.0
_LATE_S = 60.0
"""Seconds beyond its time for which a runner that waits relies on the hub to end it."""

_log = logging.getLogger(__name__)


class JobRunner:
    """Runner of one pool.

    Args:
        folder: Folder that its launcher made, with the launch of its first attempt in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._launch: Mapping[str, Any] = read_launch(folder)
        self._first = self._launch
        self._pool: ComputePool | None = None
        self._cost_usd = 0.0
        self._idle_cost_usd = 0.0
        self._must_end = threading.Event()
        self._gpus = GpuSamples()
        self._run = self._new_run()

    def run(self) -> int:
        """Run attempts until there is none. Return the status of the process."""
        link = self._link()
        try:
            return self._run_all(link)
        except Stale as error:
            _log.warning("this attempt is over: %s", error)
            return 1
        finally:
            link.close()

    def _run_all(self, link: HubLink) -> int:
        try:
            until_heard(lambda: self._first_beat(link))
            self._run.reporter.start()
            if self._launch["spec"].get("trials") is not None:
                self._drive(link)
            else:
                self._fetch_code(link)
                self._work(link)
        except Stale:
            raise
        except Exception as error:  # of a refusal by the hub, or of this machine's disk
            _log.exception("the runner failed")
            end = AttemptEnd.START_FAILED if self._pool is None else AttemptEnd.FAILED
            with contextlib.closing(self._link()) as own:  # the attempt is perhaps not the first one
                self._run.report_fault(own, end, error)
            return 1
        return 0

    def abort(self) -> None:
        """End the call, because this machine shuts down: the job goes back to its queue."""
        self._must_end.set()
        self._run.abort()

    def _first_beat(self, link: HubLink) -> None:
        """Be heard before anything is opened: from now on the hub knows that machines may be in use."""
        link.beat(is_running=False, cost_usd=0.0)

    def _drive(self, link: HubLink) -> None:
        """Drive a sweep whose trials are jobs: it has no machines, and loads nothing of the user's."""
        self._run.reporter.is_running = True
        self._run.reporter.beat_now()
        self._run.report(link, self._run.drive(), keeps=False)

    def _work(self, link: HubLink) -> None:
        """Open the pool, and run the first attempt and those that follow it."""
        try:
            pool = self._pool = self._make_pool()
        except (SkywardError, TypeError) as error:
            self._run.report(link, _of_mistake(error), keeps=False)
            return
        is_kept, outcome = False, AttemptOutcome(end=AttemptEnd.START_FAILED)
        try:
            ended = self._run.open(pool)
            with contextlib.ExitStack() as opened:
                opened.push(pool)
                while ended is None:
                    self._run.reporter.is_running = True
                    self._run.reporter.beat_now()
                    outcome = self._run.run_call(pool, self._pending(link))
                    if not self._launch["keep_s"] or not outcome.is_whole or self._must_end.is_set():
                        break
                    is_kept = self._keep(link, outcome)
                    launch = self._next_launch(self._launch["keep_s"]) if is_kept else None
                    if launch is None:
                        break
                    is_kept = False
                    link.close()
                    self._begin(launch)
                    link = self._link()
                    self._run.reporter.start()
            outcome = ended or outcome
        except Stale:
            raise
        except Exception as error:
            if is_kept:  # the attempt has ended, and only the pool did not close as it should
                _log.exception("the machines that waited did not end as they should")
            else:
                outcome = _of_start(error)
        self._cost_usd = pool.cost_usd
        if is_kept:
            self._give_back()
        else:
            self._run.report(link, outcome, keeps=False)

    def _fetch_code(self, link: HubLink) -> None:
        """Download the code, and make this process see it, and with it the nodes."""
        spec, code = self._launch["spec"], self._folder / "code"

        def download(archive: Path) -> None:
            until_heard(lambda: link.download("code", archive))

        if sha256 := self._launch.get("code"):
            name = f"{quote(self._launch['project'], safe='')[:100]}-{sha256}"
            place_code(code, self._folder.parent.parent / CODE, name, download)
        elif spec["code_path"]:  # a hub of the version before names no content
            unpack_code(code, download)
        (code / spec["code_folder"]).mkdir(parents=True, exist_ok=True)
        sys.path[:0] = [str(code / part) for part in spec["code_path"]]
        os.chdir(code / spec["code_folder"])

    def _pending(self, link: HubLink) -> PendingCompute[bytes]:
        """Return the call of the attempt."""
        spec = self._launch["spec"]
        env = {} if CHECKPOINT_DIR in spec["image"].get("env", {}) else checkpoint_folder(self._folder, self._launch)
        env |= {JOB: self._launch["job"], WRITER: f"{self._launch['job']}:{self._launch['attempt']}"}
        if spec["command"]:
            return self._run.pending_command(env)
        if spec.get("operation"):  # a hub of the version before sends none
            return self._run.pending_operation(env)
        call = self._folder / "call"
        until_heard(lambda: link.download("call", call))
        make = self._run.pending if spec.get("trial") is None else self._run.pending_trial
        return make(*split_call(call.read_bytes()), env)

    def _make_pool(self) -> ComputePool:
        """Make the pool of the machine set, for the nodes that the hub has given to this attempt."""
        machines, nodes, spec = self._launch["machines"], self._launch["nodes"], self._launch["spec"]
        description = dict(machines["provider"])
        if machines["kind"] == "fixed" and "hosts" in description:
            description["hosts"] = [description["hosts"][number] for number in nodes]
        options = {"engine": "direct", **spec["pool"]}  # a job is one call, whose nodes need no Ray between them
        image = dict(spec["image"])
        if description["type"] != "local":  # there, nodes have the environment of this process
            image["env"] = {**image.get("env", {}), JOB: self._launch["job"]}
        provider = provider_of(description)
        if not provider.shares_files:
            image["includes"] = ["."]  # the working folder as the client packed it, with its includes
        if numbers := self._launch["devices"]:
            restrict(machines, nodes, numbers, image)
        self._gpus.watch(own_gpus(self._launch))
        if spec["secrets"]:
            given = secrets_of(self._folder, self._launch["project"], spec["secrets"])
            image["env"] = {**image.get("env", {}), **given}
        if spec["command"]:
            options = {"cancel_grace_s": CANCEL_S + 5.0, **options}  # it must be able to end its processes
        if machines["kind"] != "fixed":
            asked = {name: spec[name] or None for name in ("accelerator", "vcpus", "memory_gib")}
            options |= {name: value for name, value in asked.items() if value is not None}
        return ComputePool(
            provider,
            nodes=len(nodes),
            image=Image(**image) if image else None,
            budget_usd=spec["budget_usd"],
            logs=self._write_line,
            on_event=self._hear,
            console=False,
            name=f"job-{self._launch['job'][:8]}",
            **options,
        )

    # The next attempt -------------------------------------------------------------------------------------------------

    def _keep(self, link: HubLink, outcome: AttemptOutcome) -> bool:
        """Tell the hub of the end, and that the machines wait. Return False if it does not answer: they must end."""
        try:
            self._run.report(link, outcome, keeps=True)
        except Unheard as error:
            _log.warning("the machines end before the hub hears of the job: %s", error)
            return False
        return True

    def _next_launch(self, keep_s: float) -> Mapping[str, Any] | None:
        """Wait for the next attempt. None: the time is over, or the hub wants the machines back.

        A hub that is away is asked again until the time is over.

        Raises:
            Stale: The hub has given this runner up.
        """
        deadline, cost_before = time.monotonic() + keep_s, self._pool_cost()
        link = self._link_as_runner()
        try:
            idle_before = self._idle_cost_usd
            # The hub ends the wait by its wall clock, which somebody may set back while the machines cost money.
            while not self._must_end.is_set() and time.monotonic() < deadline + _LATE_S:
                self._idle_cost_usd = idle_before + self._pool_cost() - cost_before
                try:
                    order = link.next_attempt(self._idle_cost_usd, NEXT_S)
                except HubUnreachable as error:
                    _log.warning("the hub does not answer: %s", error)
                    if time.monotonic() > deadline:
                        break
                    self._must_end.wait(_RETRY_S)
                    continue
                if order["launch"] is not None or order["is_over"]:
                    launch: Mapping[str, Any] | None = order["launch"]
                    return launch
        finally:
            link.close()
        return None

    def _begin(self, launch: Mapping[str, Any]) -> None:
        """Make the folder that of the next attempt: the launcher sends its output if this process is killed."""
        self._run.close()
        for feed in FEEDS:
            (self._folder / feed).unlink(missing_ok=True)
        write_private(self._folder / LAUNCH, launch)
        self._launch = launch
        self._gpus.begin()
        self._run = self._new_run()
        if self._must_end.is_set():
            self._run.abort()

    def _give_back(self) -> None:
        """Tell the hub that the machines that waited are gone."""
        link = self._link_as_runner()
        try:
            until_heard(lambda: link.give_back(self._idle_cost_usd), limit_s=GIVE_BACK_S)
        finally:
            link.close()

    # Within -----------------------------------------------------------------------------------------------------------

    def _new_run(self) -> AttemptRun:
        return AttemptRun(self._folder, self._launch, self._link, self._pool_cost, self._gpus.take)

    def _pool_cost(self) -> float:
        return self._cost_usd if self._pool is None else max(self._cost_usd, self._pool.cost_usd)

    def _write_line(self, line: LogLine) -> None:
        self._run.write_line(line)

    def _hear(self, event: Event) -> None:
        """Save when a machine is about to go. Tell the hub how a machine starts, and how busy its GPUs are."""
        if isinstance(event, PreemptionNotice):
            self._run.save_before_loss(event.node, event.notice)
        elif isinstance(event, NodeUsage):
            self._gpus.add(event)
        elif isinstance(event, PhaseStarted | PhaseOutput) and not self._run.reporter.is_running:
            text = event.text if isinstance(event, PhaseOutput) else event.detail
            self._run.reporter.note = f"node {event.node}, {event.phase}{': ' if text else ''}{text}"

    def _link(self) -> HubLink:
        return _link_of(self._launch)

    def _link_as_runner(self) -> HubLink:
        """Return a link as the attempt that started this process: the hub knows the runner by it."""
        return _link_of(self._first)


def _link_of(launch: Mapping[str, Any]) -> HubLink:
    address = Address(url=os.environ[URL], token=launch["token"] or None, project=launch["project"])
    return HubLink(address, launch["job"], launch["attempt"])


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


def _of_mistake(error: Exception) -> AttemptOutcome:
    return AttemptOutcome(end=AttemptEnd.FAILED, error=in_words(error), failure=encode_failure(error))


def _of_start(error: Exception) -> AttemptOutcome:
    """Return the outcome of a pool that did not open, or did not close."""
    if isinstance(error, NoCapacity):
        return AttemptOutcome(end=AttemptEnd.NO_CAPACITY, error=in_words(error))
    if isinstance(error, UsageError):
        return _of_mistake(error)
    _log.error("the pool failed", exc_info=error)
    return AttemptOutcome(end=AttemptEnd.START_FAILED, error=in_words(error))


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
