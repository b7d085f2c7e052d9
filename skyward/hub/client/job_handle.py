"""A job of the hub as a program holds it: what it is, its value, its output, and orders to it."""

from __future__ import annotations

import asyncio
import io
import pickle
import time
from base64 import b64decode
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from ...core.by_value import loads
from ...errors import HubError, JobFailed, StreamRestarted, UsageError
from ...wire.failures import EncodedFailure, decode_failure
from ...wire.payloads import unpickle_whole
from ..model.items import take_items
from ..model.jobs import Feed
from .connection import HubConnection, path_of
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
        value: T = _unpacked(loads(self._blob("value")))
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
            except HubError as error:
                if not error.retryable or time.monotonic() - away_since > AWAY_S:
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
