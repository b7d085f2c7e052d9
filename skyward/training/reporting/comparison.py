"""Page that lays several runs over each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from .charts import Series, in_words
from .curves import TITLES, Chart, best_step, compared_curves
from .document import asset, document, legend, table
from .page import BYTES, Charts, as_text, duration, last_value, seconds_of, section, state_of
from .records import Points, RunRecord


def comparison_of(runs: Sequence[tuple[str, RunRecord]]) -> str:
    """Return the document that compares runs, each with its label. Every text from a run is escaped."""
    charts = Charts()
    title = ", ".join(label for label, _ in runs)
    problems = [f"{label}: {problem}" for label, run in runs for problem in run.problems]
    body = [
        f"<h1>{escape(title)}</h1>",
        legend((f"c{colour}", label) for colour, (label, _) in enumerate(runs)),
        *(f'<p class="problem">{escape(problem)}</p>' for problem in problems),
        section("Runs", _results(runs)),
        section("Curves", charts.cards(compared_curves(runs))),
        section("Memory", charts.cards(_memory(runs))),
        section("Differences", _differences(runs)),
    ]
    style, script = (asset("skyward.training.reporting", name) for name in ("page.css", "page.js"))
    return document(title, body, style=style, script=script, data=charts.data)


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell the folders apart; `logs` is left out as a last part."""
    paths = [path.parent if path.name == "logs" else path for path in (folder.resolve() for folder in folders)]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{path.name} ({number})" for number, path in enumerate(paths, 1)]


def _results(runs: Sequence[tuple[str, RunRecord]]) -> str:
    """Return a table with a row per run; the best evaluation loss of all is marked."""
    heads = ("run", "state", "steps", "last loss", "best eval_loss", "at step", "time")
    rows, losses = [], []
    for label, run in runs:
        points = run.evaluations.get("eval_loss", {})
        best = best_step("eval_loss", points)
        loss = None if best is None else points[best]
        losses.append(loss)
        seconds, last = seconds_of(run), last_value(run.metrics.get("loss", {}))
        rows.append(
            [
                label,
                state_of(run),
                in_words(run.last_step),
                "" if last is None else in_words(last),
                "" if loss is None else in_words(loss),
                "" if best is None else in_words(best),
                "" if seconds is None else duration(seconds),
            ]
        )
    known = [loss for loss in losses if loss is not None]
    marked = {(at, 4) for at, loss in enumerate(losses) if len(known) > 1 and loss == min(known)}
    return table(heads, rows, best=marked)


def _memory(runs: Sequence[tuple[str, RunRecord]]) -> Iterable[Chart]:
    for name in sorted(BYTES):
        series = [
            Series(name=label, points=_greatest(run.per_rank[name]), colour=colour)
            for colour, (label, run) in enumerate(runs)
            if name in run.per_rank
        ]
        yield TITLES[name].replace("by rank", "largest of all ranks"), series, "bytes"


def _greatest(ranks: Sequence[Points]) -> Points:
    greatest: Points = {}
    for points in ranks:
        for step, value in points.items():
            known = greatest.get(step)
            greatest[step] = value if known is None or (value is not None and value > known) else known
    return greatest


def _differences(runs: Sequence[tuple[str, RunRecord]]) -> str:
    """Return a table of the facts that are not the same in all runs, and how many are the same."""
    facts = [_facts(run) for _, run in runs]
    names = list(dict.fromkeys(name for each in facts for name in each))
    differing = [name for name in names if len({each.get(name) for each in facts}) > 1]
    if not names:
        return ""
    rows = [[name, *(each.get(name, "") for each in facts)] for name in differing]
    same = len(names) - len(differing)
    note = f"{same} {'fact is' if same == 1 else 'facts are'} the same in all runs."
    shown = table(("", *(label for label, _ in runs)), rows) if rows else ""
    return f'{shown}<p class="soft">{note}</p>'


def _facts(run: RunRecord) -> Mapping[str, str]:
    info = {name: value for values in run.info.values() for name, value in values.items()}
    return {**{str(name): as_text(value) for name, value in run.facts.items()}, **info}
