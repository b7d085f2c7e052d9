"""Prometheus metrics of the server, on a port of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from ..model.product import METRIC_PREFIX
from ..model.refusal import Refusal
from ..model.usage import JobCounts
from .job_figures import JobFigures
from .routing import Route

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Figures:
    """Counts and durations of requests, by route. A path that no route has counts as `unknown`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            f"{METRIC_PREFIX}api_request_duration_seconds",
            "Time from the first byte of a request to the last of its answer",
            ["endpoint"],
            registry=self._registry,
            buckets=_BUCKETS,
        )
        self._requests = Counter(
            f"{METRIC_PREFIX}api_requests", "Answered requests", ["endpoint", "status"], registry=self._registry
        )
        # Looking a child up costs more than counting on it.
        self._children: dict[tuple[str, int], tuple[Histogram, Counter]] = {}

    def observe(self, route: Route | None, status: int, seconds: float) -> None:
        """Count one request."""
        name = f"{route.method} {route.path}" if route is not None else "unknown"
        key = (name, status)
        children = self._children.get(key)
        if children is None:
            children = self._seconds.labels(name), self._requests.labels(name, str(status))
            self._children[key] = children
        children[0].observe(seconds)
        children[1].inc()

    def text(self, counts: JobCounts | None = None) -> bytes:
        """Return all metrics in Prometheus' text format, with those of jobs if they are known."""
        requests = generate_latest(self._registry)
        if counts is None:
            return requests
        registry = CollectorRegistry()
        registry.register(JobFigures(counts))
        return requests + generate_latest(registry)


def metrics_app(
    figures: Figures, path: str, count_jobs: Callable[[], Awaitable[JobCounts]]
) -> Callable[[MutableMapping[str, Any], Any, Callable[[MutableMapping[str, Any]], Awaitable[None]]], Awaitable[None]]:
    """Return the ASGI application of the port for metrics."""

    async def answer(
        scope: MutableMapping[str, Any], _receive: Any, send: Callable[[MutableMapping[str, Any]], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            return
        is_found = scope["path"] == path
        body = b"not found\n"
        if is_found:
            try:
                body = figures.text(await count_jobs())
            except Refusal:  # the database is away; the requests of this server are known still
                body = figures.text()
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200 if is_found else 404, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return answer
