"""Draw the rules of the queue of jobs into docs/pictures: one line of time for each node, as the scheduler decides.

The decisions are those of `skyward.hub.schedule`, minute by minute. Nothing in a picture is placed by hand.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from skyward.hub.schedule import (
    AttemptState,
    HubJob,
    JobAttempt,
    JobQuota,
    JobsSnapshot,
    MachineSet,
    ProjectState,
    Shape,
    decide,
)
from skyward.hub.schedule.shares import charged

PICTURES = Path(__file__).parent.parent / "pictures"
NODES, MINUTE_S, SAVE_MIN, HALF_LIFE_S = 4, 60.0, 2, 7 * 86_400.0
MACHINES = MachineSet(name="lab", nodes=NODES)
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
COLOURS = {"research": ("#3f51b5", "#8c9eff"), "speech": ("#d9730d", "#ffb74d")}
"""Project -> colour on light and on dark ground."""
_WIDTH, _LEFT, _ROW, _TOP = 720, 64, 30, 34


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of a picture. Times are minutes."""

    project: str
    at: int
    takes: int
    nodes: int = 1
    is_preemptible: bool = False
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Nodes that a job held from one minute to another."""

    job: Job
    nodes: tuple[int, ...]
    start: int
    end: int
    is_saving: bool = False


def run(jobs: Iterable[Job], projects: Mapping[str, ProjectState], minutes: int) -> list[Bar]:
    """Let the scheduler place jobs, and return what they held."""
    left = {f"{number:03}": (job, job.takes) for number, job in enumerate(jobs)}
    used: dict[str, Mapping[str, float]] = {name: {} for name in projects}
    held: dict[str, JobAttempt] = {}
    bars: list[Bar] = []
    for minute in range(minutes):
        for name, attempt in list(held.items()):
            job, minutes_left = left[name]
            start = int(attempt.began_at / MINUTE_S)
            if attempt.state is AttemptState.PREEMPTING and attempt.ends_by <= minute * MINUTE_S:
                bars.append(Bar(job=job, nodes=attempt.nodes, start=minute - SAVE_MIN, end=minute, is_saving=True))
                bars.append(Bar(job=job, nodes=attempt.nodes, start=start, end=minute - SAVE_MIN))
                left[name] = job, minutes_left - (minute - SAVE_MIN - start)
                del held[name]
            elif attempt.state is AttemptState.RUNNING and minute - start >= minutes_left:
                bars.append(Bar(job=job, nodes=attempt.nodes, start=start, end=minute))
                del left[name], held[name]
        for name, attempt in held.items():
            if attempt.waits_for and attempt.waits_for.isdisjoint(held):
                held[name] = replace(attempt, state=AttemptState.RUNNING, waits_for=frozenset(), began_at=minute * 60.0)
        _decide(left, held, projects, used, minute)
        for attempt in held.values():
            owner = attempt.job.project
            used[owner] = charged(used[owner], "node", len(attempt.nodes), MINUTE_S, HALF_LIFE_S)
    for name, attempt in held.items():
        bars.append(Bar(job=left[name][0], nodes=attempt.nodes, start=int(attempt.began_at / MINUTE_S), end=minutes))
    return bars


def _decide(
    left: Mapping[str, tuple[Job, int]],
    held: dict[str, JobAttempt],
    projects: Mapping[str, ProjectState],
    used: Mapping[str, Mapping[str, float]],
    minute: int,
) -> None:
    waiting = [
        HubJob(
            id=name,
            project=job.project,
            order=int(name),
            shape=Shape(nodes=job.nodes),
            max_duration_s=minutes_left * MINUTE_S,
            is_preemptible=job.is_preemptible,
        )
        for name, (job, minutes_left) in left.items()
        if job.at <= minute and name not in held
    ]
    snapshot = JobsSnapshot(
        machines=(MACHINES,),
        projects=tuple(replace(state, used=used[name]) for name, state in projects.items()),
        waiting=tuple(waiting),
        attempts=tuple(held.values()),
    )
    now = minute * MINUTE_S
    by_id = {job.id: job for job in waiting}
    for placement in decide(snapshot, now).placements:
        for victim in placement.victims:
            ends_by = now + SAVE_MIN * MINUTE_S
            held[victim] = replace(held[victim], state=AttemptState.PREEMPTING, ends_by=ends_by)
        held[placement.job] = JobAttempt(
            job=by_id[placement.job],
            machines=MACHINES.name,
            nodes=placement.nodes,
            state=AttemptState.RESERVED if placement.victims else AttemptState.RUNNING,
            began_at=now,
            on_loan=placement.on_loan,
            waits_for=frozenset(placement.victims),
        )


def picture(bars: Iterable[Bar], minutes: int, alt: str) -> str:
    """Return an SVG that follows the reader's light or dark system."""
    scale = (_WIDTH - _LEFT - 30) / minutes
    height = _TOP + NODES * _ROW + 28
    parts = [f'<text class="t" x="8" y="{_TOP + n * _ROW + 19}">node {n}</text>' for n in range(NODES)]
    for place, name in enumerate(COLOURS):
        corner = _LEFT + place * 120
        parts.append(f'<rect class="{name}" x="{corner}" y="9" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="t" x="{corner + 18}" y="20">{name}</text>')
    for bar in bars:
        for node in bar.nodes:
            x, y = float(_LEFT + bar.start * scale), _TOP + node * _ROW
            width = (bar.end - bar.start) * scale - 2
            kind = f"{bar.job.project} saving" if bar.is_saving else bar.job.project
            parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 4}" rx="3"/>')
            if bar.job.name and not bar.is_saving and width > 40:
                parts.append(f'<text class="n" x="{x + 6:.1f}" y="{y + 18}">{html.escape(bar.job.name)}</text>')
    for minute in range(0, minutes + 1, 10):
        middle = _LEFT + minute * scale
        parts.append(f'<text class="t" x="{middle:.1f}" y="{height - 8}" text-anchor="middle">{minute} min</text>')
    light, dark = (
        "".join(f".{name}{{fill:{colours[place]}}}" for name, colours in COLOURS.items()) for place in (0, 1)
    )
    style = (
        f"text{{font:12px {SANS}}}.t{{fill:#656d76}}.n{{fill:#fff}}.saving{{opacity:.45}}{light}"
        f"@media (prefers-color-scheme:dark){{.t{{fill:#9198a1}}.n{{fill:#0d1117}}{dark}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{alt}">'
        f"<style>{style}</style>{''.join(parts)}</svg>\n"
    )


def weight() -> tuple[list[Bar], int, str]:
    """Two projects hand in the same jobs, and one has twice the weight."""
    jobs = [Job(project=project, at=0, takes=6) for _ in range(40) for project in COLOURS]
    projects = {name: ProjectState(name=name, weight=2.0 if name == "research" else 1.0) for name in COLOURS}
    return run(jobs, projects, 60), 60, "Of six jobs, research gets four and speech two"


def borrowed() -> tuple[list[Bar], int, str]:
    """A project borrows idle nodes, and gives them back when their owner comes."""
    jobs = [Job(project="speech", at=0, takes=40, is_preemptible=True, name=f"speech {n}") for n in range(4)]
    jobs += [Job(project="research", at=15, takes=20, name=f"research {n}") for n in range(2)]
    quota = JobQuota(devices={"node": 2})
    projects = {name: ProjectState(name=name, quota=quota) for name in COLOURS}
    return run(jobs, projects, 75), 75, "Two jobs of speech save and end at minute 15, and go on later"


def reserved() -> tuple[list[Bar], int, str]:
    """A gang of all nodes reserves its time, and short jobs pass it."""
    jobs = [Job(project="speech", at=0, takes=20, name="first"), Job(project="speech", at=0, takes=30, name="second")]
    jobs += [Job(project="research", at=1, takes=20, nodes=4, name="gang")]
    jobs += [Job(project="speech", at=2, takes=takes, name=f"{takes} min") for takes in (25, 40, 10)]
    projects = {name: ProjectState(name=name) for name in COLOURS}
    return run(jobs, projects, 100), 100, "The gang begins at minute 30; jobs that end before it begin earlier"


def main() -> None:
    for rule in (weight, borrowed, reserved):
        (PICTURES / f"hub-rule-{rule.__name__}.svg").write_text(picture(*rule()))


if __name__ == "__main__":
    main()
