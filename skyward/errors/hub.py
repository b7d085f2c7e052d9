"""Errors of a hub's client."""

from __future__ import annotations

from .base import SkywardError


class HubError(SkywardError):
    """A hub did not answer, or refused a request.

    Logging never raises it: records wait in the run's folder until the hub has them. It comes from calls that need an
    answer at once, such as reading runs.

    Attributes:
        url: Address of the hub; empty if none is named.
        status: HTTP status of the answer; None if there was none.
        code: The hub's word for a refusal, such as "missing"; may be empty.
        field: Name of the refused field; may be empty.

    Example:
        try:
            runs = hub.runs("metrics.loss < 0.1")
        except sky.errors.HubError as error:
            print(error.status, error)
    """

    url: str = ""
    status: int | None = None
    code: str = ""
    field: str = ""


class JobFailed(HubError):
    """A job of a hub ended without a value and without an exception of its function.

    Its message has the reason: its time or its budget is over, or its pool did not open. `Job.logs` has its output.

    Attributes:
        job: Id of the job.
        state: "failed" or "timed_out".

    Example:
        try:
            value = hub.job("1f0c").result()
        except sky.errors.JobFailed as error:
            print(error.job, error.state)
    """

    job: str = ""
    state: str = ""


class StreamRestarted(HubError):
    """A new attempt of a job yields its items from the beginning, and some of the one before were read already.

    `hub.job(error.job).stream()` has the items of the new attempt. Begin there again, or go on behind those that were
    read, if the function yields the same items each time.

    Attributes:
        job: Id of the job.
        attempt: Number of the new attempt.
        count: Items of the attempt before that had been read, with those before `start`.

    Example:
        try:
            for item in hub.job("1f0c"):
                print(item)
        except sky.errors.StreamRestarted as error:
            for item in hub.job(error.job).stream(start=error.count):
                print(item)
    """

    job: str = ""
    attempt: int = 0
    count: int = 0


class HubUnreachable(HubError):
    """A hub did not answer, or no hub is named.

    Check that it runs (`skyward hub status`), and that `SKYWARD_HUB_URL` names it.

    Example:
        try:
            runs = hub.runs()
        except sky.errors.HubUnreachable as error:
            print(f"{error.url} does not answer")
    """
