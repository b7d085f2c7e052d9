"""The picture of a run: how long training stood still, and pages that are well formed whatever the names."""

from __future__ import annotations

import json
import re
import threading
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.training.evaluation import Timeline
from skyward.training.evaluation.spans import rows_of

TIMES = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda each: (each[0] / 4, (each[0] + each[1]) / 4))


class Page(HTMLParser):
    """Parser that refuses tags that are left open or closed twice."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []
        for svg in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL):
            ElementTree.fromstring(svg)  # as XML, which forgives nothing

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Handle a tag without content."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"] and self.open[-1:] != ["script"]:
            self.text += data


def overlapped() -> Timeline:
    """Record two intervals of training with a copy between them, a wait in the second, two evaluations."""
    timeline = Timeline()
    timeline.add("training", "steps 0 to 10", 100.0, 104.0)
    timeline.add("snapshot", "step 10", 104.0, 104.5, step=10)
    timeline.add("transfer", "step 10", 104.5, 105.0)
    timeline.add("training", "steps 10 to 20", 104.5, 110.5)
    timeline.add("training", "wait", 107.5, 108.5)
    timeline.add("node 1", "step 10", 105.0, 109.0, step=10, eval_loss=0.25)
    timeline.add("node <2>", "step 20", 110.0, 112.5, step=20, status="failed", error='it "raised" <this> & that')
    return timeline


def test_the_summary_says_how_long_training_stood_still() -> None:
    found = overlapped().summary()
    assert (found.wall_s, found.snapshot_s, found.waited_s, found.stood_still_s) == (12.5, 0.5, 1.0, 1.5)
    assert (found.snapshots, found.evaluations, found.evaluation_s) == (1, 2, 6.5)
    assert found.hidden_s == 3.0 + 0.5  # except for the wait, and the time after training
    assert found.busy_s == {"node 1": 4.0, "node <2>": 2.5}


@settings(max_examples=60, deadline=None)
@given(
    training=st.lists(TIMES, max_size=6),
    waits=st.lists(TIMES, max_size=4),
    copies=st.lists(TIMES, max_size=4),
    work=st.lists(TIMES, max_size=6),
)
def test_the_hidden_time_agrees_with_a_count_of_instants(
    training: list[tuple[float, float]],
    waits: list[tuple[float, float]],
    copies: list[tuple[float, float]],
    work: list[tuple[float, float]],
) -> None:
    timeline = Timeline()
    for name, track, spans in (("steps", "training", training), ("wait", "training", waits), ("", "snapshot", copies)):
        for start, end in spans:
            timeline.add(track, name, start, end)
    for start, end in work:
        timeline.add("worker", "evaluation", start, end)

    def covers(spans: list[tuple[float, float]], at: float) -> int:
        return sum(start <= at < end for start, end in spans)

    instants = [at / 4 + 0.125 for at in range(60)]
    trains = [at for at in instants if covers(training, at) and not covers(waits, at) and not covers(copies, at)]
    found = timeline.summary()
    assert found.hidden_s == pytest.approx(sum(covers(work, at) for at in trains) / 4)
    assert found.waited_s == pytest.approx(sum(bool(covers(waits, at)) for at in instants) / 4)


def test_rows_have_no_overlapping_spans() -> None:
    timeline = Timeline()
    for start in range(10):
        timeline.add("worker", str(start), start, start + 2.5)
    rows = rows_of(timeline.tracks()["worker"])
    assert len(rows) == 3
    assert all(one.end_s <= next_.start_s for row in rows for one, next_ in pairwise(row))


def test_a_chrome_trace_has_every_span_in_microseconds(tmp_path: Path) -> None:
    trace = json.loads(overlapped().chrome_trace(tmp_path / "deep" / "trace.json").read_text())
    spans = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    names = {each["tid"]: each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "thread_name"}
    (evaluated,) = (each for each in spans if names[each["tid"]] == "node 1")
    assert (evaluated["ts"], evaluated["dur"]) == (5e6, 4e6)
    assert evaluated["args"] == {"step": 10, "eval_loss": 0.25}
    assert len(spans) == 7
    assert list(dict.fromkeys(names.values())) == ["training", "snapshot", "transfer", "node 1", "node <2>"]
    assert trace["otherData"]["began_s"] == 100.0


def test_the_page_is_complete_and_loads_nothing(tmp_path: Path) -> None:
    html = overlapped().html(tmp_path / "timeline.html", title="A <run>").read_text()
    page = Page(html)
    assert page.loads == []
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "A <run>" in page.text
    assert "Training stood still for 1.5 s of 12.5 s (12.0%); 54% of 6.5 s of evaluation ran while it trained." in html
    assert 'error: it "raised" <this> & that' in page.text
    assert [html.count(f'<rect class="k-{kind}"') for kind in ("train", "wait", "snapshot", "ok", "failed")] == [
        *(2, 1, 1, 1, 1)
    ]


def test_an_idle_worker_is_a_warning_unless_it_is_on_this_machine(tmp_path: Path) -> None:
    timeline = Timeline()
    for at in range(10):
        timeline.add("node 1", f"step {at}", at * 10.0, at * 10.0 + 9)
    timeline.add("node 2", "step 3", 30.0, 34.0)
    timeline.add("subprocess", "step 4", 40.0, 41.0)
    html = timeline.html(tmp_path / "timeline.html").read_text()
    assert "node 2 was idle 96% of the time, with 1 evaluation. Use fewer workers, or evaluate more often." in html
    assert html.count('class="warning"') == html.count('class="lane-name idle"') == 1
    assert "91% busy" in html


def test_bars_and_lanes_have_labels(tmp_path: Path) -> None:
    html = overlapped().html(tmp_path / "timeline.html").read_text()
    assert re.findall(r'<text class="bar"[^>]*>([^<]*)<', html)[:2] == ["steps 0 to 10", "steps 10 to 20"]
    assert ">weights copied<" in html


def test_an_empty_timeline_has_a_page_and_a_trace(tmp_path: Path) -> None:
    assert "Nothing has been recorded." in Page(Timeline().html(tmp_path / "none.html").read_text()).text
    assert Timeline().summary().wall_s == 0
    assert json.loads(Timeline().chrome_trace(tmp_path / "none.json").read_text())["traceEvents"]


def test_a_page_of_spans_without_length_and_of_strange_values_is_complete(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.add("worker", "at once", 5.0, 5.0, loss=float("nan"), far=float("inf"), what={"a": object()}, none=None)
    timeline.add("worker", "the clock was set back", 5.0, 4.0, text="x" * 1000)
    page = Page(timeline.html(tmp_path / "timeline.html").read_text())
    assert "loss: nan" in page.text
    assert "x" * 301 not in page.text
    json.loads(timeline.chrome_trace(tmp_path / "trace.json").read_text())


def test_only_the_latest_spans_are_kept_and_the_page_says_so(tmp_path: Path) -> None:
    timeline = Timeline(spans_per_track=3)
    for at in range(10):
        timeline.add("training", f"step {at}", at, at + 1)
    for at in range(300):
        timeline.add(f"worker {at}", "evaluation", at, at + 1)
    assert [each.name for each in timeline.tracks()["training"]] == ["step 7", "step 8", "step 9"]
    assert len(timeline.tracks()) == 129
    assert timeline.dropped == 7 + 300 - 127 - 3
    assert "older spans are no longer kept" in timeline.html(tmp_path / "timeline.html").read_text()


def test_a_block_that_raises_is_recorded_too() -> None:
    now = iter([1.0, 3.0])
    timeline = Timeline(clock=lambda: next(now))
    with pytest.raises(ZeroDivisionError), timeline.span("snapshot", "step 1", step=1):
        _ = 1 // 0
    (span,) = timeline.tracks()["snapshot"]
    assert (span.start_s, span.end_s) == (1.0, 3.0)
    assert span.args["error"].startswith("ZeroDivisionError")


def test_threads_may_add_at_once() -> None:
    timeline = Timeline()

    def work(name: str) -> None:
        for at in range(500):
            timeline.add(name, "evaluation", at, at + 1)

    threads = [threading.Thread(target=work, args=(f"worker {at % 2}",)) for at in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert {name: len(spans) for name, spans in timeline.tracks().items()} == {"worker 0": 1000, "worker 1": 1000}
