"""Jobs: calls that are handed to the hub, wait their turn there, and outlive the program that submitted them."""

from __future__ import annotations

import asyncio
import io
import pickle
import time
from base64 import b64decode
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Literal, TypeVar

from ...accelerators import Accelerator
from ...calls.compute import PendingCompute, as_compute, pending_of
from ...errors import HubError, HubUnreachable, JobFailed, StreamRestarted, UsageError
from ...values.image import Image
from ...wire.failures import EncodedFailure, decode_failure
from ...wire.payloads import unpickle_whole
from ..model.items import take_items
from ..model.jobs import Feed
from .connection import HubConnection, path_of
from .job_code import image_fields, secret_names
from .job_request import driver_request, job_request, send_calls
from .reading import needed_address
from .settings import Address

T = TypeVar("T")

FINAL = frozenset({"completed", "failed", "cancelled", "timed_out"})
"""Statuses of a job that is over."""
AWAY_S = 300.0
"""Seconds for which a hub that does not answer is asked again, by calls that wait for a job."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.1, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAttemptInfo:
    """An attempt of a job. Times are milliseconds since 1970.

    Attributes:
        number: From 1.
        machines: Name of the machine set.
        nodes: Numbers of its nodes there.
        reserved_at: Time at which it got its machines.
        began_at: Time at which its pool was open; None before.
        ended_at: Its end; None while it holds machines.
        end: "completed", "failed", "start_failed", "no_capacity", "lost", "stopped" or "withdrawn"; empty before.
        error: Why, in words.
        cost_usd: Cost of its machines.
        output_bytes: Bytes of output.
        kept_until: Time until which its machines wait for the next job; None if they do not.
        idle_cost_usd: Cost of their waiting so far.
        pool: Name of its pool on the machine of its launcher.

    Example:
        from skyward import hub

        for attempt in hub.job(job_id).attempts:
            print(attempt.number, attempt.machines, attempt.end or "runs", attempt.error)
    """

    number: int
    machines: str
    nodes: Sequence[int]
    reserved_at: int
    began_at: int | None
    ended_at: int | None
    end: str
    error: str
    cost_usd: float
    output_bytes: int
    kept_until: int | None
    idle_cost_usd: float
    pool: str


class Job(Generic[T]):
    """A job of the hub: a future that any process can ask, today or next week.

    Each property asks the hub. Thread-safe. `await job` waits for its value.

    Attributes:
        id: Its id.
        name: Its name.

    Example:
        from skyward import hub

        job = hub.submit(train(config), nodes=2, on="all")
        print(job.status, job.why_waiting)
        for line in job.logs():
            print(line)
        values = job.result()

        for item in hub.submit(generate(10)):
            print(item)
    """

    def __init__(self, address: Address, body: Mapping[str, Any]) -> None:
        self.id = str(body["id"])
        self.name = str(body["name"])
        self._address = address

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.name}>"

    # State ------------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        """State: "queued", "reserved", "starting", "running", "preempting", "lost", or one of the final ones.

        Final are "completed", "failed", "cancelled" and "timed_out".
        """
        return str(self._body()["status"])

    @property
    def why_waiting(self) -> str:
        """Reason in words why it waits, or why it ended as it did. Empty if there is nothing to say."""
        return str(self._body()["why"])

    @property
    def attempts(self) -> list[JobAttemptInfo]:
        """Attempts so far, the first one first."""
        known = [field.name for field in fields(JobAttemptInfo)]
        return [JobAttemptInfo(**{name: attempt[name] for name in known}) for attempt in self._body()["attempts"]]

    @property
    def cost_usd(self) -> float:
        """Cost of all attempts so far."""
        return float(self._body()["cost_usd"])

    def done(self) -> bool:
        """Report whether the job is over."""
        return self.status in FINAL

    # Value ------------------------------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value. For `on="all"` it is the list of the nodes' values, for a generator that of its items.

        A hub that does not answer is asked again for 5 minutes.

        Args:
            timeout: Longest wait in seconds; None for no limit.

        Raises:
            TimeoutError: The job is not over yet.
            CancelledError: It was cancelled.
            JobFailed: It ended without an exception of its own, such as by its time limit.
            Exception: The exception of the function, with its remote traceback.
        """
        body = self._wait(timeout)
        error = self._error_of(body)
        if error is not None:
            raise error
        if body["spec"].get("is_stream"):
            return list(self.stream())  # type: ignore[return-value]  # T is that of the function
        value: T = _unpacked(pickle.loads(self._blob("value")))
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return the exception of the job; None if it has a value. See `result`.

        Raises:
            TimeoutError: The job is not over yet.
            CancelledError: It was cancelled.
        """
        return self._error_of(self._wait(timeout))

    def _error_of(self, body: Mapping[str, Any]) -> BaseException | None:
        if body["status"] == "completed":
            return None
        if body["status"] == "cancelled":
            raise CancelledError(f"job {self.id} was cancelled")
        if body["status"] == "failed" and "error" in body["results"]:
            failure: EncodedFailure = pickle.loads(self._blob("error"))
            where = f"job {self.id}, attempt {body['attempt_count']}"
            return decode_failure(failure, where=where, node=None, task=self.name)
        return JobFailed(
            f"job={self.id}: {body['status'].replace('_', ' ')}, because {body['why'] or 'of an unknown reason'}; read "
            f"`skyward job logs {self.id}`, then run `skyward job retry {self.id}`",
            url=self._address.url,
            job=self.id,
            state=body["status"],
        )

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.to_thread(self.result).__await__()

    def stream(self, start: int = 0) -> Iterator[Any]:
        """Yield the items of a generator, as they arrive while the job runs, and as they are kept after its end.

        Iterating over the job does the same. They are the items of its newest attempt: one that follows a preemption
        or a lost node runs the generator from its beginning.

        Args:
            start: Number of the first item, from 0.

        Raises:
            UsageError: The function of the job is no generator.
            StreamRestarted: Another attempt has begun after some items were read here.
            HubError: The items are no longer kept.
            HubUnreachable: The hub does not answer for 5 minutes.
            Exception: The exception of the function, after the items before it. Other ends are those of `result`.

        Example:
            from skyward import hub

            job = hub.job(job_id)
            for item in job.stream(start=100):
                print(item)
        """
        body: dict[str, Any] = _until_heard(self._body, None)
        if not body["spec"].get("is_stream"):
            raise UsageError(f"job={self.id}: its function is no generator; call result() for its value")
        attempt, count, buffer = max(1, body["attempt_count"]), 0, bytearray()
        for number, data in self._follow("items", (attempt, 0)):
            if number != attempt:
                self._check_unread(number, count, start)
                attempt, count, buffer = number, 0, bytearray()
            buffer += data
            for packed in take_items(buffer):
                count += 1
                if count > start:
                    yield unpickle_whole(packed)
        body = self._wait(None)
        error = self._error_of(body)
        if error is not None:
            raise error
        self._blob("value")  # it is kept for as long as the items
        if body["attempt_count"] != attempt:
            self._check_unread(body["attempt_count"], count, start)

    def _check_unread(self, attempt: int, count: int, start: int) -> None:
        """Raise StreamRestarted if items of an earlier attempt were read."""
        if count > start:
            raise StreamRestarted(
                f"job={self.id}: attempt {attempt} yields its items from the beginning, and {count} of the one before "
                f"were read; call stream() to begin again, or stream(start={count}) to go on",
                url=self._address.url,
                job=self.id,
                attempt=attempt,
                count=count,
            )

    def __iter__(self) -> Iterator[Any]:
        return self.stream()

    def logs(self, *, follow: bool = True, attempt: int | None = None, start: int = 0) -> Iterator[str]:
        """Yield the lines of output of all attempts, one after the other.

        Args:
            follow: Whether to wait for more until the job is over. False: only what is there now.
            attempt: Number of the first attempt to show.
            start: First byte of that attempt to show.

        Raises:
            HubUnreachable: The hub does not answer for 5 minutes.
        """
        rest = b""
        for _, data in self._follow("output", (attempt or 1, start), follow):
            lines, rest = _lines(rest + data)
            yield from lines
        yield from _lines(rest, is_last=True)[0]

    # Orders -----------------------------------------------------------------------------------------------------------

    def cancel(self) -> bool:
        """End the job for good. Return False if it is over already.

        A waiting job ends at once. A running one ends when its machines are gone; `result` waits for that.
        """
        try:
            self._order("cancel")
        except HubError as error:
            if error.status != 409:
                raise
            return False
        return True

    def save(self) -> None:
        """Tell the training in a running job to save a checkpoint and go on.

        Raises:
            HubError: The job does not run.
        """
        self._order("save")

    def retry(self) -> None:
        """Let a job that failed, was cancelled or took too long begin again. Raises HubError if it did not."""
        self._order("retry")

    def hold(self) -> None:
        """Keep a waiting job from beginning, until `release`. Raises HubError if it does not wait."""
        self._order("hold")

    def release(self) -> None:
        """Let a held job begin when its turn comes."""
        self._order("release")

    def delete(self) -> None:
        """Delete a job that is over, with output and value. Raises HubError if it is not over."""
        with HubConnection(self._address) as connection:
            connection.json("DELETE", self._path())

    # Within -----------------------------------------------------------------------------------------------------------

    def _path(self, *parts: str) -> str:
        return path_of("v1", "jobs", self.id, *parts)

    def _body(self) -> dict[str, Any]:
        with HubConnection(self._address) as connection:
            body: dict[str, Any] = connection.json("GET", self._path())
        return body

    def _order(self, order: str) -> None:
        with HubConnection(self._address) as connection:
            connection.json("POST", self._path(order), {})

    def _follow(self, feed: Feed, place: tuple[int, int], follow: bool = True) -> Iterator[tuple[int, bytes]]:
        """Yield bytes of a feed with the numbers of their attempts, from a place on: an attempt, and an offset."""
        path, away_since = self._path("logs" if feed == "output" else feed), time.monotonic()
        while True:
            try:
                with HubConnection(self._address) as connection:
                    for event in connection.events(path, query=_feed_query(place, follow)):
                        away_since = time.monotonic()
                        if event.kind == "end":
                            return
                        if event.kind == feed:
                            place = _place_of(event.id)
                            yield place[0], b64decode(event.body["data"])
            except HubUnreachable:
                if time.monotonic() - away_since > AWAY_S:
                    raise
            time.sleep(1.0)  # the connection broke off: the server ends, and another one comes

    def _blob(self, name: str) -> bytes:
        content = io.BytesIO()

        def download() -> None:
            content.seek(0)
            content.truncate()
            with HubConnection(self._address) as connection:
                connection.download(self._path("results", name), content)

        _until_heard(download, None)
        return content.getvalue()

    def _wait(self, timeout: float | None) -> dict[str, Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        pause_s = _FIRST_LOOK_S
        while True:
            body: dict[str, Any] = _until_heard(self._body, deadline)
            if body["status"] in FINAL:
                return body
            left_s = pause_s if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                why = f" ({body['why']})" if body["why"] else ""
                problem = f"job={self.id}: is {body['status']} after {timeout:g} s{why}"
                raise TimeoutError(f"{problem}; raise timeout, or ask again later")
            time.sleep(min(pause_s, left_s))
            pause_s = min(_LONGEST_LOOK_S, pause_s * 1.3)


class _Calls(list[PendingCompute[Any]]):
    """Calls that `map` submits together."""


def submit(  # noqa: PLR0913  # keyword-only options
    call: PendingCompute[Any],
    *,
    on: Literal["one", "all"] = "one",
    nodes: int = 1,
    accelerator: str | Accelerator | None = None,
    vcpus: int | None = None,
    memory_gib: float | None = None,
    region: str = "",
    labels: Sequence[str] = (),
    image: Image | None = None,
    project: str | None = None,
    name: str | None = None,
    type: Literal["training", "evaluation", "conversion", "other"] = "other",  # noqa: A002  # as in YAML
    priority: Literal["low", "medium", "high"] = "medium",
    max_duration_s: float = 86_400.0,
    checkpoint_interval_s: float | None = None,
    budget_usd: float | None = None,
    preemptible: bool = False,
    keep_s: float | None = None,
    after: Sequence[Job[Any] | str] = (),
    after_is: Literal["success", "any", "all"] = "success",
    max_wait_s: float | None = None,
    cron: str = "",
    retries: int | None = None,
    hold: bool = False,
    key: str | None = None,
    sweep: int | None = None,
    trials: Literal["calls", "jobs"] = "calls",
    notify: Sequence[Mapping[str, Any]] = (),
    notify_wait_s: float | None = None,
    **pool: Any,
) -> Job[Any]:
    """Hand a call to the hub. It runs when its machines are its project's to take, also if this program has ended.

    The function, its arguments, your modules and the image travel to the hub now.

    Args:
        call: The call, as operators take it. That of a generator function makes a stream; see `Job.stream`.
        on: "one" is `>>`: one node, one value. "all" is `@`: each node, and the list of their values.
        nodes: Nodes of the job, all at once.
        accelerator: Accelerator of each node, such as "A100". None: no matter which, and whole nodes.
        vcpus: Lowest number of virtual CPUs of a node.
        memory_gib: Lowest memory of a node, in GiB.
        region: Region of the machines.
        labels: Labels that the machine set must have.
        image: Environment of the nodes. `sky.Secret("NAME")` in it is a secret that the launcher has for the project.
        project: Project of the hub. None: the token's.
        name: Name of the job. None: that of the call.
        type: Kind of work, for lists.
        priority: Priority within the project. Only an admin may pass "high".
        max_duration_s: Seconds after which an attempt is told to save and end.
        checkpoint_interval_s: Seconds between two checkpoints. Its page and `notify` say if the newest is too old.
        budget_usd: Most that all attempts may cost.
        preemptible: Whether more urgent work may tell it to save and make way.
        keep_s: Seconds, at most 86400, for which the machines wait for your next job with the same code and image.
            None: those of the machine set.
        after: Jobs, or their ids, that it waits for.
        after_is: "success" begins it once all of them are completed, "any" once one is, "all" once all are over. If
            that cannot be any longer, it is cancelled.
        max_wait_s: Seconds after which it ends as "timed_out" if it does not run yet.
        cron: Cron expression in UTC, such as "0 3 * * mon-fri". The job is a schedule then: it never runs itself, and
            makes a job at each of these times, unless the one before is not over. `cancel` ends it, `hold` pauses it.
        retries: Retries after an exception of the function. None: the `retries` of the call.
        hold: Whether it waits until it is released.
        key: Text of yours. A second job with the same key is the first one, so a program may submit it again.
        sweep: Number of a sweep that this job runs. The call is its objective; see `hub.sweep`.
        trials: "calls": the trials of `sweep` are calls to the job's pool. "jobs": each is a job with these options,
            and this one holds no machines.
        notify: Receivers of its news, such as `{"url": "https://hooks.example.org/x", "secret": "LAB_HOOK"}` or
            `{"command": ["/usr/local/bin/tell", "ada"], "on": ["failed"]}`. The operator allows hosts and programs.
        notify_wait_s: Seconds of waiting after which they are told that it waits.
        pool: Further options of `sky.ComputePool`: concurrency, executor, preload, allocation and others.

    Raises:
        UsageError: An option is illegal, or a job cannot run such a call.
        ArgumentNotPicklable: The function or an argument cannot be sent.
        HubError: The hub refuses the job, or does not answer.

    Example:
        from skyward import hub

        job = hub.submit(train(config), nodes=4, on="all", accelerator="A100", max_duration_s=48 * 3600)
        print(job.id)
    """
    request = job_request(
        on=on,
        nodes=nodes,
        accelerator=accelerator,
        vcpus=vcpus or 0,
        memory_gib=memory_gib or 0.0,
        region=region,
        labels=list(labels),
        max_duration_s=max_duration_s,
        checkpoint_interval_s=checkpoint_interval_s,
        budget_usd=budget_usd,
        is_preemptible=preemptible,
        keep_s=keep_s,
        after=[str(getattr(other, "id", other)) for other in after],
        after_is=after_is,
        max_wait_s=max_wait_s,
        cron=cron,
        image=image_fields(image),
        sweep=sweep,
        notify=[dict(target) for target in notify],
        notify_wait_s=notify_wait_s,
        secrets=secret_names(image),
        pool=pool,
    )
    if trials == "jobs":
        request = driver_request(request)
    elif trials != "calls":
        raise UsageError(f"trials={trials!r}: unknown; use 'calls' or 'jobs'", field="trials", value=trials)
    body = {"name": name, "type": type, "priority": priority, "is_held": hold, "key": key, "retries": retries}
    calls = call if isinstance(call, _Calls) else _Calls([pending_of(call)])
    address = job_address(project)
    made = [Job[Any](address, row) for row in send_calls(address, calls, request, body, image)]
    return made if isinstance(call, _Calls) else made[0]


def map(function: Callable[..., T], items: Iterable[Any], **options: Any) -> list[Job[T]]:  # noqa: A001
    """Submit one job for each item, with the options of `submit`. Your modules travel once.

    Args:
        function: Function of one argument.
        items: Its arguments.
        options: Options of `submit`, but `key`.

    Example:
        from skyward import hub

        jobs = hub.map(evaluate, ["a.pt", "b.pt"], accelerator="A100")
        scores = [job.result() for job in jobs]
    """
    compute_function = as_compute(function)
    calls = _Calls(compute_function(item) for item in items)
    return submit(calls, **options) if calls else []  # type: ignore[return-value, arg-type]


def job(job_id: str, *, project: str | None = None) -> Job[Any]:
    """Return a job by its id, in any process, as long as the hub keeps it.

    Args:
        job_id: Id of the job.
        project: Project of the hub. None: the token's.

    Raises:
        HubError: The project has no such job, or the hub does not answer.

    Example:
        from skyward import hub

        print(hub.job(job_id).result())
    """
    address = job_address(project)
    return Job(address, job_row(job_id, project=project))


def jobs(status: str | Sequence[str] | None = None, *, project: str | None = None, limit: int = 100) -> list[Job[Any]]:
    """Return jobs of a project, the newest first.

    Args:
        status: State, or states, that they have; see `Job.status`. None: any.
        project: Project of the hub. None: the token's.
        limit: Greatest number.

    Raises:
        HubError: The hub does not answer, or knows no such state.

    Example:
        from skyward import hub

        for job in hub.jobs("queued"):
            print(job, job.why_waiting)
    """
    address = job_address(project)
    wanted = [status] if isinstance(status, str) else list(status or ())
    return [Job(address, row) for row in job_rows(wanted, project=project, limit=limit)]


def job_row(job_id: str, *, project: str | None = None) -> dict[str, Any]:
    """Return a job with its attempts, as the API shows it. Raises HubError if the project has none of that id."""
    with HubConnection(job_address(project)) as connection:
        return dict(connection.json("GET", path_of("v1", "jobs", job_id)))


def job_history(job_id: str, *, project: str | None = None) -> dict[str, Any]:
    """Return what happened to a job, as the API shows it. Raises HubError if the project has none of that id."""
    with HubConnection(job_address(project)) as connection:
        return dict(connection.json("GET", path_of("v1", "jobs", job_id, "history")))


def job_rows(
    status: Sequence[str] = (), *, project: str | None = None, limit: int = 100, **chosen: object
) -> list[dict[str, Any]]:
    """Return jobs without their attempts, as the API shows them, the newest first. `chosen` is as in `GET /v1/jobs`."""
    query = {"status": list(status), "limit": limit, **chosen}
    with HubConnection(job_address(project)) as connection:
        return list(connection.json("GET", "/v1/jobs", query=query)["jobs"])


def job_address(project: str | None) -> Address:
    """Return the hub's address. Raises HubUnreachable if none is named."""
    address = needed_address("jobs")
    return address if project is None else replace(address, project=project)


# Reading --------------------------------------------------------------------------------------------------------------


def _unpacked(packed: Any) -> Any:
    """Unpack a value: one piece of bytes for each node or rank, in the lists that the pool made of them."""
    return unpickle_whole(packed) if isinstance(packed, bytes) else [_unpacked(item) for item in packed]


def _until_heard(request: Callable[[], Any], deadline: float | None) -> Any:
    """Repeat a request while the hub is away, but not beyond the deadline and not for longer than `AWAY_S`."""
    began_at = time.monotonic()
    while True:
        try:
            return request()
        except HubError as error:
            now = time.monotonic()
            if not error.retryable or now - began_at > AWAY_S or (deadline is not None and now > deadline):
                raise
            time.sleep(0.5)


def _feed_query(place: tuple[int, int], follow: bool) -> dict[str, Any]:
    return {"attempt": place[0], "start": place[1], "follow": "true" if follow else "false"}


def _place_of(event_id: str) -> tuple[int, int]:
    number, _, offset = event_id.partition(":")
    return int(number), int(offset)


def _lines(data: bytes, *, is_last: bool = False) -> tuple[list[str], bytes]:
    """Return the whole lines of output, and the rest."""
    *lines, rest = data.split(b"\n")
    if is_last and rest:
        lines, rest = [*lines, rest], b""
    return [line.decode(errors="replace") for line in lines], rest
