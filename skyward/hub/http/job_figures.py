"""Prometheus metrics of jobs and devices. They come from the database, so each server of a hub tells the same.

`org` is the project. A sum over several servers would count twice: take the maximum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ..model.product import METRIC_PREFIX
from ..model.usage import BOUNDS_S, ENDLESS, NEVER, JobCounts

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class JobFigures(Collector):
    """Metrics of one look at the database."""

    def __init__(self, counts: JobCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Family]:
        """Yield the metrics."""
        counts = self._counts
        yield self._ended()
        hours = CounterMetricFamily(
            f"{METRIC_PREFIX}gpu_hours", "Device-hours of attempts that are over", labels=["gpu_type", "org"]
        )
        for (kind, project), seconds in sorted(counts.uses.items()):
            hours.add_metric([kind, project], seconds / 3600)
        yield hours
        yield self._durations()
        gauges = (
            ("jobs_running", "Jobs that hold machines", ["type", "org"], counts.running),
            ("queue_depth", "Jobs that wait", ["org", "priority"], counts.waiting),
            ("gpus_allocated", "Devices that jobs hold", ["gpu_type"], counts.allocated),
            ("gpus_available", "Devices that no job holds", ["gpu_type"], counts.available),
        )
        for name, text, labels, values in gauges:
            gauge = GaugeMetricFamily(f"{METRIC_PREFIX}{name}", text, labels=labels)
            for key, value in sorted(values.items()):
                gauge.add_metric([key] if isinstance(key, str) else list(key), value)
            yield gauge

    def _ended(self) -> CounterMetricFamily:
        jobs = CounterMetricFamily(f"{METRIC_PREFIX}jobs", "Jobs that ended", labels=["type", "status", "org"])
        sums: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        for ended in self._counts.ended:
            sums[ended.type, ended.state, ended.project] += ended.jobs
        for labels, count in sorted(sums.items()):
            jobs.add_metric(list(labels), count)
        return jobs

    def _durations(self) -> HistogramMetricFamily:
        family = HistogramMetricFamily(
            f"{METRIC_PREFIX}job_duration_seconds", "Time from the first run of a job to its end", labels=["type"]
        )
        began = [ended for ended in self._counts.ended if ended.bound_s != NEVER]
        for kind in sorted({ended.type for ended in began}):
            below, buckets = 0, []
            for bound in (*BOUNDS_S, ENDLESS):
                below += sum(ended.jobs for ended in began if (ended.type, ended.bound_s) == (kind, bound))
                buckets.append(("+Inf" if bound == ENDLESS else str(float(bound)), below))
            seconds = sum(ended.seconds for ended in began if ended.type == kind)
            family.add_metric([kind], buckets, seconds)
        return family
