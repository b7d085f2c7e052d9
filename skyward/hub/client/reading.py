"""Runs as the hub has them: searches, histories and downloads."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from ...errors import HubError, HubUnreachable
from ..model.points import History
from .connection import HubConnection, path_of
from .fluent import current_address
from .settings import URL, Address

_PAGE = 1000
PACKED = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A run as the hub has it. Its parameters, tags and latest metrics are here; the rest is read on request.

    Attributes:
        id: id of the run.
        name: its name.
        experiment: name of its experiment.
        status: "queued", "running", "completed", "failed", "cancelled" or "lost".
        user: name of the user.
        started_at: start, in milliseconds since 1970.
        ended_at: end, in milliseconds since 1970; None if it has not ended.
        error: description of its failure, or None.
        params: parameters.
        tags: tags.
        metrics: latest value of each metric.

    Example:
        from skyward import hub

        best = hub.runs("params.lr = '0.01'", order_by=["metrics.loss ASC"])[0]
        print(best.name, best.metrics["loss"])
    """

    id: str
    name: str
    experiment: str
    status: str
    user: str
    started_at: int
    ended_at: int | None
    error: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    _address: Address = field(repr=False)

    def history(
        self, key: str, *, start: int | None = None, end: int | None = None, at_most: int | None = None
    ) -> History:
        """Return the points of a metric as columns.

        Args:
            key: name of the metric.
            start: first step; None: the run's first.
            end: last step; None: the run's last.
            at_most: number of points to thin the history to; its extremes are kept. None: all points.

        Raises:
            HubError: the hub does not answer, or refuses.
        """
        query = {"key": key, "start": start, "end": end, "at_most": at_most}
        with HubConnection(self._address) as connection:
            data = connection.get(path_of("v1", "runs", self.id, "points"), query=query, accept=PACKED)
        return unpacked(key, data)

    def artifacts(self, prefix: str | None = None) -> list[str]:
        """Return the keys of the run's files, or of those below a folder.

        Raises:
            HubError: the hub does not answer, or refuses.
        """
        with HubConnection(self._address) as connection:
            return sorted(_files(connection, self.id, prefix))

    def download(self, path: str, to: str | os.PathLike[str] | None = None) -> Path:
        """Download an artifact, or all artifacts below a folder.

        Args:
            path: key of the artifact or folder.
            to: folder to write to; None: the working folder.

        Returns:
            Path of the file or folder.

        Raises:
            HubError: there is no such artifact, or the hub does not answer.
            OSError: a file cannot be written.
        """
        target = Path(to or ".")
        root = path.rstrip("/")
        with HubConnection(self._address) as connection:
            below = [key for key in _files(connection, self.id, root) if key != root]
            for key in below or [root]:
                _save(connection, self.id, key, target / Path(root).name / key[len(root) :].lstrip("/"))
        return target / Path(root).name


class RunList(Sequence[LoggedRun]):
    """Runs of a search, in its order.

    Example:
        from skyward import hub

        frame = hub.runs("metrics.loss < 0.1").to_pandas()
    """

    def __init__(self, runs: Sequence[LoggedRun]) -> None:
        self._runs = list(runs)

    @overload
    def __getitem__(self, index: int) -> LoggedRun: ...
    @overload
    def __getitem__(self, index: slice) -> RunList: ...
    def __getitem__(self, index: int | slice) -> LoggedRun | RunList:
        return RunList(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"<RunList of {len(self)} runs>"

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row for each run, and columns `params.<key>`, `metrics.<key>` and `tags.<key>`.

        Raises:
            MissingDependency: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            from ...errors import MissingDependency

            raise MissingDependency(
                "to_pandas: requires pandas, which is not installed here; pip install pandas", name="pandas"
            ) from error
        frame = pandas.DataFrame([_row(run) for run in self])
        for name in ("started_at", "ended_at"):
            if name in frame:
                frame[name] = pandas.to_datetime(frame[name], unit="ms", utc=True)
        return frame


def runs(
    filter: str | None = None,  # noqa: A002  (the name that MLflow's users and the API know)
    order_by: Sequence[str] | str = (),
    *,
    experiment: str | None = None,
    limit: int | None = None,
) -> RunList:
    """Search runs on the hub.

    Args:
        filter: condition in MLflow's grammar, such as `metrics.loss < 0.1 AND params.model = 'tiny'`.
        order_by: columns such as `metrics.loss ASC`; the newest runs come first without it.
        experiment: name of an experiment; None: all experiments of the project.
        limit: largest number of runs; None: all.

    Raises:
        HubUnreachable: no hub is named, or it does not answer.
        HubError: the hub refuses the filter, or does not know the experiment.

    Example:
        from skyward import hub

        for run in hub.runs("metrics.loss < 0.1", order_by=["metrics.loss ASC"], limit=10):
            print(run.name, run.metrics["loss"])
    """
    address = needed_address("runs")
    with HubConnection(address) as connection:
        experiment_id = None if experiment is None else experiment_named(connection, experiment)["id"]
        query = {
            "filter": filter or None,
            "order_by": [order_by] if isinstance(order_by, str) else list(order_by),
            "experiment_id": experiment_id,
        }
        found = [run_of(row, address) for row in pages(connection, path_of("v1", "runs"), "runs", query, limit)]
    return RunList(found)


def run(run_id: str) -> LoggedRun:
    """Return a run of the hub by its id.

    Raises:
        HubUnreachable: no hub is named, or it does not answer.
        HubError: there is no such run.

    Example:
        from skyward import hub

        print(hub.run("0af7651916cd43dd8448eb211c80319c").history("loss").values[-1])
    """
    address = needed_address("run")
    with HubConnection(address) as connection:
        return run_of(connection.json("GET", path_of("v1", "runs", run_id)), address)


def experiments() -> list[dict[str, Any]]:
    """Return the project's experiments, as dicts with `id`, `name`, `created_at` and `tags`.

    Raises:
        HubUnreachable: no hub is named, or it does not answer.

    Example:
        from skyward import hub

        print([experiment["name"] for experiment in hub.experiments()])
    """
    with HubConnection(needed_address("experiments")) as connection:
        return list(pages(connection, path_of("v1", "experiments"), "experiments", {}, None))


def needed_address(what: str) -> Address:
    """Return this process's hub.

    Raises:
        HubUnreachable: none is named.
    """
    address = current_address()
    if address is None:
        raise HubUnreachable(f"{what}: needs a hub, and none is named; call hub.connect(url), or set {URL}")
    return address


def pages(
    connection: HubConnection, path: str, plural: str, query: Mapping[str, Any], limit: int | None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a list of the hub, page by page."""
    token: str | None = None
    left = sys.maxsize if limit is None else limit
    while left > 0:
        answer = connection.json("GET", path, query={**query, "limit": min(_PAGE, left), "page_token": token})
        rows = answer.get(plural) or []
        yield from rows[:left]
        left -= len(rows)
        token = answer.get("next_page_token")
        if not token or not rows:
            return


def experiment_named(connection: HubConnection, name: str) -> dict[str, Any]:
    """Return an experiment by its name.

    Raises:
        HubError: there is none.
    """
    for row in pages(connection, path_of("v1", "experiments"), "experiments", {}, None):
        if row["name"] == name:
            return row
    raise HubError(
        f"experiment={name!r}: there is none of this name; see `skyward experiment list`",
        url=connection.address.url,
        status=404,
        code="missing",
        field="experiment",
    )


def run_of(row: Mapping[str, Any], address: Address) -> LoggedRun:
    """Return a run from its JSON."""
    return LoggedRun(
        id=row["id"],
        name=row.get("name") or "",
        experiment=row.get("experiment") or "",
        status=row["status"],
        user=row.get("user_id") or "",
        started_at=row.get("start_time") or 0,
        ended_at=row.get("end_time"),
        error=row.get("error"),
        params=row.get("params") or {},
        tags=row.get("tags") or {},
        metrics={metric["key"]: float(metric["value"]) for metric in row.get("metrics") or ()},
        _address=address,
    )


def unpacked(key: str, data: bytes) -> History:
    """Return a history from its packed form: a count, steps, timestamps and values, 8 bytes each, little-endian."""
    count = int.from_bytes(data[:8], "little", signed=True)
    if len(data) != 8 + 24 * count:
        raise HubError(f"key={key!r}: the hub sent {len(data)} bytes for {count} points; check that it is a hub")
    steps, timestamps, values = array("q"), array("q"), array("d")
    steps.frombytes(data[8 : 8 + 8 * count])
    timestamps.frombytes(data[8 + 8 * count : 8 + 16 * count])
    values.frombytes(data[8 + 16 * count :])
    if sys.byteorder == "big":
        for column in (steps, timestamps):
            column.byteswap()
        values.byteswap()
    return History(key, steps, timestamps, values)


def _files(connection: HubConnection, run_id: str, prefix: str | None) -> Iterator[str]:
    """Yield the keys of all files below a folder. The hub lists one level at a time."""
    path = path_of("v1", "runs", run_id, "artifacts")
    for row in pages(connection, path, "artifacts", {"prefix": prefix or None}, None):
        key = row.get("path") or row["key"]
        if row.get("is_directory"):
            yield from _files(connection, run_id, key)
        else:
            yield key


def _save(connection: HubConnection, run_id: str, key: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            connection.download(path_of("v1", "runs", run_id, "artifacts", key), file)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _row(run: LoggedRun) -> dict[str, Any]:
    return {
        "run_id": run.id,
        "name": run.name,
        "experiment": run.experiment,
        "status": run.status,
        "user": run.user,
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        **{f"metrics.{key}": value for key, value in run.metrics.items()},
        **{f"params.{key}": value for key, value in run.params.items()},
        **{f"tags.{key}": value for key, value in run.tags.items()},
    }
