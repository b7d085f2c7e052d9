"""Jobs: calls that are handed to the hub, wait their turn there, and outlive the program that submitted them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from ...accelerators import Accelerator
from ...calls.compute import as_compute, pending_of
from ...calls.pending import PendingCompute
from ...errors import UsageError
from ...values.image import Image
from .connection import HubConnection, path_of
from .job_code import image_fields, secret_names
from .job_handle import Job
from .job_request import driver_request, job_request, send_calls
from .reading import needed_address
from .settings import Address

T = TypeVar("T")


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
