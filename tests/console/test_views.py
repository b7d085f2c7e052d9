"""Views of the same events: a panel, plain lines, a line in a notebook."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from skyward import events
from skyward.console.activity import ActorWork, Counts, Progress, ProgressBoard, RunningTask, WorkTracker
from skyward.console.panel import panel_height, panel_lines, progress_line, status_line
from skyward.console.plain import PlainLines
from skyward.console.state import PoolState, closing_words
from skyward.console.style import Style
from skyward.console.words import columns

BARE = Style(has_colour=False)
COUNTS = Counts(slots=8, busy=3, queued=1200, ended=5000, failed=2)


def story() -> list[events.Event]:
    """Return the events of two rented nodes: one ready after 40 s, one whose packages cannot be installed."""
    return [
        events.PoolStarted(at=1000.0, pool="train-1", provider="aws", nodes=2),
        events.InstanceLaunched(
            at=1001.0, node=0, instance="i-a", instance_type="g5.xlarge", price_usd_per_hour=1.2, is_spot=True
        ),
        events.InstanceLaunched(
            at=1001.0, node=1, instance="i-b", instance_type="g5.xlarge", price_usd_per_hour=1.2, is_spot=True
        ),
        *(events.PhaseStarted(at=1001.0, node=n, phase="boot") for n in (0, 1)),
        *(events.PhaseEnded(at=1030.0 + n, node=n, phase="boot", seconds=29.0 + n) for n in (0, 1)),
        *(events.PhaseStarted(at=1031.0, node=n, phase="packages") for n in (0, 1)),
        events.PhaseOutput(at=1032.0, node=1, phase="packages", text="Resolving\x1b[2J torch"),
        events.PhaseEnded(at=1040.0, node=0, phase="packages", seconds=9.0),
        events.NodeReady(at=1040.0, node=0, address="10.0.0.4"),
    ]


def after(*more: events.Event) -> PoolState:
    pool = PoolState("train")
    for event in [*story(), *more]:
        pool.take(event)
    return pool


def shown(pool: PoolState, *, width: int = 100, height: int = 4, now: float = 1060.0, style: Style = BARE) -> list[str]:
    return panel_lines(pool, COUNTS, width=width, height=height, now=now, style=style)


def test_the_panel_shows_the_phase_and_time_of_each_node_and_the_cost() -> None:
    title, first, second, calls = shown(after())
    assert re.fullmatch(r"── train ── aws · 1 of 2 ready ─+ \$2.40/h · \$0.04 so far · 1:00 ──", title)
    assert columns(title) == 100
    assert first == "  ●  0  idle, g5.xlarge"
    assert second == "  ◐  1  packages 29 s  Resolving torch"
    assert calls == "        3 of 8 slots busy · 1,200 queued · 4,998 calls done · 2 failed"


def test_actors_have_a_line_of_their_own_with_the_busiest_first() -> None:
    model = ActorWork(name="model", node=1, state="alive", calls=1)
    actors = (ActorWork(name="tally", node=None, state="waiting"), model)
    counts = replace(COUNTS, actors=actors)
    assert panel_height(after(), counts) == 5
    rows = panel_lines(after(), counts, width=100, height=5, now=1060.0, style=BARE)
    assert rows[-2] == "        2 actors: model on node 1, 1 call · tally (waiting)"
    assert len(panel_lines(after(), counts, width=40, height=4, now=1060.0, style=BARE)) == 4
    rows = panel_lines(after(), replace(counts, actors=(model,)), width=20, height=5, now=1060.0, style=BARE)
    assert rows[-2] == "        actor model…"


def test_the_devices_of_nodes_are_shown() -> None:
    told = [
        events.PoolStarted(at=0.0, pool="lab", provider="ssh", nodes=2),
        *(events.NodeReady(at=1.0, node=node, devices="8x NVIDIA L4") for node in (0, 1)),
        events.PoolReady(at=1.0, pool="lab", seconds=1.0),
    ]
    pool = PoolState("lab")
    for event in told:
        pool.take(event)
    assert shown(pool)[1] == "  ●  0  idle, 8x NVIDIA L4"
    plain = PlainLines("lab", is_quiet=False)
    assert [line for event in told for line in plain.take(event)][
        -1
    ] == "lab: ready after 1.0 s: 2 nodes with 8x NVIDIA L4"


def test_the_coming_end_of_a_detached_pool_is_shown() -> None:
    plain = PlainLines("lab", is_quiet=True)
    (line,) = plain.take(events.DetachmentWarning(detached_for_s=3600.0, seconds_left=192.0, is_budget=True))
    assert line.endswith("the pool was 3 m 12 s from the end that its budget sets")
    (line,) = plain.take(events.DetachmentWarning(detached_for_s=3600.0, seconds_left=192.0))
    assert line.startswith("lab: no program was there for long, and the pool was 3 m 12 s from its end; pool.extend()")


def running(*names: str, node: int = 0, progress: str = "") -> tuple[RunningTask, ...]:
    return tuple(RunningTask(task=n, node=node, name=name, progress=progress) for n, name in enumerate(names))


def test_a_busy_node_shows_its_calls_and_their_times() -> None:
    tracker, pool = WorkTracker(), after()
    tracker.update(running("train"), 1048.0)
    work = tracker.update(running("train"), 1060.0)
    rows = panel_lines(pool, COUNTS, width=100, height=4, now=1060.0, style=BARE, work=work)
    assert rows[1] == "  ●  0  train 12 s"
    # With several slots, it shows how many of each. A call that has just begun has no time yet.
    work = WorkTracker().update(running("train", "train", "score", "other"), 1060.0)
    rows = panel_lines(pool, COUNTS, width=100, height=4, now=1060.0, style=BARE, work=work)
    assert rows[1] == "  ●  0  train ×2, score +1"
    # A call that has ended stays for a moment, so that short calls do not flicker. Then the node is idle.
    tracker.update(running("train"), 1061.0)
    assert 0 in tracker.update((), 1061.9)
    assert 0 not in tracker.update((), 1062.1)


@pytest.mark.parametrize("width", [40, 60, 79, 100, 140])
def test_a_progress_line_stays_in_the_row_of_its_node_beside_the_load(width: int) -> None:
    gpu = events.DeviceUsage(index=0, busy=0.98, memory_used_gib=22.0, memory_gib=24.0)
    pool = after(events.NodeUsage(node=0, cpu=0.5, cores=4, memory_used_gib=3.2, memory_gib=16.0, devices=(gpu,)))
    work = WorkTracker().update(running("train", progress="epochs:  62%|██████▏   | 38/60 [00:12<00:07]"), 1060.0)
    for style in (BARE, Style()):
        row = panel_lines(pool, COUNTS, width=width, height=4, now=1060.0, style=style, work=work)[1]
        bare = re.sub(r"\x1b\[[\d;]*m", "", row)
        assert bare.startswith("  ●  0  train ")
        assert columns(bare) <= width
        assert "epochs:  62%" in bare
        assert ("cpu  50%" in bare) is (width >= 100)
        assert ("gpu  98%" in bare) is (width >= 140)


def test_maps_and_groups_have_a_bar_a_rate_and_the_time_left() -> None:
    progress = Progress("simulate", 120)
    progress.began = 1000.0
    progress.add(90)
    line = progress_line(progress, 100, 1030.0, BARE)
    assert line == (" " * 8 + "simulate" + " " * 19 + "90 of 120  ━━━━━━━━━━━━━━━─────  75%  10 s left  3.0/s")
    assert progress_line(progress, 60, 1030.0, BARE) == (" " * 8 + "simulate" + " " * 11 + "90 of 120  ━━━━━━━━──  75%")
    for width in range(20, 120):
        assert columns(progress_line(progress, width, 1030.0, Style(has_colour=False))) <= width
    progress.add(30)
    progress.ended = 1040.0
    assert progress_line(progress, 100, 2000.0, BARE).endswith("120 of 120  ━━━━━━━━━━━━━━━━━━━━ 100%  in 40 s  3.0/s")
    failed = Progress("simulate", 120)
    failed.began, failed.ended = 1000.0, 1005.0
    assert progress_line(failed, 100, 2000.0, BARE).endswith("0 of 120  ────────────────────   0%  stopped after 5.0 s")
    endless = Progress("stream", None)
    endless.began = 1000.0
    endless.add(5)
    assert progress_line(endless, 80, 1100.0, BARE).split() == ["stream", "5", "done", "3.0/min"]


def test_the_board_shows_open_maps_or_the_last_that_ended() -> None:
    board = ProgressBoard()
    assert board.entries() == ()
    first, second = board.begin(Progress("first", 1)), board.begin(Progress("second", 2))
    assert board.entries() == (first, second)
    first.add(1)
    assert board.entries() == (second,)
    second.end()
    assert board.entries() == (second,)
    third = board.begin(Progress("third", None))
    assert board.entries() == (third,)


def test_nodes_on_one_machine_show_its_load_once() -> None:
    pool = PoolState("here")
    pool.take(events.PoolStarted(at=0.0, pool="x", provider="local", nodes=2))
    for node in (0, 1):
        pool.take(events.NodeReady(at=1.0, node=node))
        pool.take(events.NodeUsage(at=2.0 + node, node=node, cpu=0.5, cores=4, memory_used_gib=3, memory_gib=16))
    lines = shown(pool, now=3.0, width=120)
    assert [line for line in lines if "cpu" in line] == lines[-1:]
    assert re.search(r"2 failed +cpu  50% ━━━───  mem 3.0/16 GiB$", lines[-1])
    assert columns(lines[-1]) <= 120


def test_a_pool_that_closes_sums_up_its_calls_and_its_cost() -> None:
    pool = after(events.PoolClosed(at=1100.0, pool="train-1", seconds=100.0, calls=1204, failed=4))
    assert closing_words(pool, 1100.0) == (
        "closed after 1 m 40 s: 1,204 calls, 4 failed, cost $0.07 by the prices of its offers"
    )
    assert status_line(pool, 1100.0).endswith("closed · 1,204 calls, 4 failed")


def test_a_node_on_its_way_shows_its_finished_phases() -> None:
    pool = after(
        events.PhaseEnded(at=1042.0, node=1, phase="packages", seconds=11.0),
        events.PhaseStarted(at=1042.0, node=1, phase="agent"),
    )
    assert shown(pool, now=1044.0)[2] == "  ◐  1  agent 2 s  boot 30 s · packages 11 s"
    assert shown(pool, now=1044.0, width=34)[2] == "  ◐  1  agent 2 s  packages 11 s"
    pool.take(events.PhaseFailed(at=1045.0, node=1, phase="agent", seconds=3.0, reason="no memory"))
    assert shown(pool)[2] == "  ✗  1  agent failed after 3.0 s  no memory"


def test_the_load_of_a_node_is_shown_if_there_is_room() -> None:
    gpu = events.DeviceUsage(index=0, busy=0.98, memory_used_gib=22.0, memory_gib=24.0)
    pool = after(
        events.NodeUsage(node=0, cpu=0.5, cores=4, memory_used_gib=3.2, memory_gib=16.0, devices=(gpu,)),
    )
    wide = shown(pool, width=110)[1]
    assert "cpu  50% ━━━───  gpu  98% ━━━━━━  mem 3.2/16 GiB  gpu mem 22.0/24 GiB" in wide
    for width in range(40, 110):
        assert all(columns(line) <= width for line in shown(pool, width=width))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 119])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    wide = PoolState("日本" * 40)
    for event in story():
        wide.take(event)
    wide.take(events.PhaseFailed(node=1, phase="packages" * 9, seconds=3.0, reason="ではありません" * 30))
    assert all(columns(line) <= width for line in shown(wide, width=width))


def test_of_many_nodes_the_ones_that_need_attention_are_shown() -> None:
    pool = PoolState("train")
    pool.take(events.PoolStarted(at=0.0, pool="x", provider="aws", nodes=64))
    for node in range(60):
        pool.take(events.NodeReady(at=5.0, node=node))
    pool.take(events.PhaseFailed(at=6.0, node=61, phase="boot", seconds=6.0, reason="no answer"))
    lines = shown(pool, height=8, now=10.0)
    assert len(lines) == 8
    assert [line.split()[1] for line in lines[1:6]] == ["0", "60", "61", "62", "63"]
    assert lines[6].strip() == "and 59 more, 59 of them ready"
    assert shown(pool, height=3, now=10.0)[1].strip() == "64 nodes, 60 of them ready"


def test_losses_and_cut_links_are_shown() -> None:
    pool = after(events.LinkLost(at=1050.0, node=0, reason="silent for 10 s"))
    assert shown(pool)[1] == "  ◌  0  connection cut for 10 s  silent for 10 s"
    pool.take(events.LinkRestored(at=1055.0, node=0, seconds=5.0))
    assert shown(pool)[1].startswith("  ●  0  idle, g5.xlarge")
    pool.take(events.NodeLost(at=1056.0, node=0, reason="power"))
    assert shown(pool)[1] == "  ✗  0  lost, 4 s ago  power"


def test_cost_is_counted_from_launch_to_the_end_of_each_machine() -> None:
    pool = after(events.InstanceTerminated(at=1301.0, node=1, instance="i-b"))
    assert pool.price_usd_per_hour == pytest.approx(1.2)
    assert pool.spent_usd(1601.0) == pytest.approx(1.2 * 300 / 3600 + 1.2 * 600 / 3600)
    pool.take(events.CostUpdated(at=1700.0, price_usd_per_hour=3.6, spent_usd=2.0))
    assert pool.spent_usd(1800.0) == pytest.approx(2.1)


def test_plain_lines_report_each_phase_once_for_all_nodes() -> None:
    plain = PlainLines("train", is_quiet=False)
    end = [
        events.PhaseFailed(at=1050.0, node=1, phase="packages", seconds=19.0, reason="no torch\nfor this python"),
        events.PoolClosed(at=1060.0, pool="train-1", seconds=60.0, reason="BootstrapFailed: node 1"),
    ]
    lines = [line for event in [*story(), *end] for line in plain.take(event)]
    assert lines == [
        "train: starting 2 nodes on aws",
        "train: node 0: g5.xlarge (spot) i-a, $1.20 per hour",
        "train: node 1: g5.xlarge (spot) i-b, $1.20 per hour",
        "train: boot: 30 s (node 1, the slowest)",
        "train: node 1: packages failed after 19 s: no torch for this python",
        "train: did not start, closed after 1 m 00 s",
    ]


def test_growth_rest_and_lack_of_capacity_are_one_line_each() -> None:
    told = [
        events.PoolStarted(pool="x", provider="aws", nodes=2),
        events.PoolScaled(pool="x", before=2, nodes=6, reason="14 calls wait"),
        events.ScalingFailed(pool="x", nodes=3, wanted=6, reason="aws: no capacity"),
        events.PoolScaled(pool="x", before=3, nodes=2, reason="2 sufficed for the last 300 s", removed=(2,)),
        events.InstanceTerminated(node=2, instance="i-c"),
        events.PoolScaled(pool="x", before=2, nodes=0, reason="idle for 600 s", removed=(1, 0)),
        events.ScalingFailed(pool="x", nodes=0, wanted=2, reason="aws: no capacity"),
    ]
    plain = PlainLines("train", is_quiet=False)
    assert [line for event in told for line in plain.take(event)] == [
        "train: starting 2 nodes on aws",
        "train: grows, 2 -> 6 nodes: 14 calls wait",
        "train: wanted 6 nodes, continues with 3 nodes: aws: no capacity",
        "train: gives nodes back, 3 -> 2 nodes: 2 sufficed for the last 300 s",
        "train: rests without nodes, 2 -> 0, until the next call: idle for 600 s",
        "train: wanted 2 nodes, has no nodes: aws: no capacity",
    ]
    state = PoolState("train")
    for event in told:
        state.take(event)
    assert state.nodes == {}
    quiet = PlainLines("here", is_quiet=True)
    assert len([line for event in told for line in quiet.take(event)]) == 2


def test_a_quiet_pool_reports_only_failures() -> None:
    plain = PlainLines("here", is_quiet=True)
    told = [
        events.PoolStarted(pool="x", provider="local", nodes=1),
        events.PoolReady(pool="x", seconds=0.3),
        events.NodeLost(node=0, reason="it was killed"),
        events.NodeReplaced(node=0, seconds=0.5),
        events.PoolClosed(pool="x", seconds=9.0),
    ]
    assert [line for event in told for line in plain.take(event)] == [
        "here: node 0 was lost: it was killed; a replacement is on its way",
        "here: node 0 was replaced after 0.5 s",
    ]


def test_a_host_that_is_retried_is_reported_once_and_its_long_reason_not_twice() -> None:
    plain = PlainLines("lab", is_quiet=False)
    retry = events.PhaseOutput(node=0, phase="connect", text="ssh lab: refused; retrying")
    told = [
        events.PoolStarted(at=0.0, pool="x", provider="ssh", nodes=1),
        events.PhaseStarted(at=0.0, node=0, phase="connect"),
        retry,
        retry,
        events.PhaseFailed(at=30.0, node=0, phase="connect", seconds=30.0, reason="ssh lab: " + "why " * 200),
        events.PoolClosed(at=30.0, pool="x", seconds=30.0, reason="Unreachable: ssh lab: " + "why " * 200),
    ]
    lines = [line for event in told for line in plain.take(event)]
    assert lines[1] == "lab: node 0: ssh lab: refused; retrying"
    assert lines[2].startswith("lab: node 0: connect failed after 30 s: ssh lab: why why")
    assert lines[3:] == ["lab: did not start, closed after 30 s"]
    assert all(columns(line) < 260 for line in lines)


def test_a_notebook_shows_it_in_one_line() -> None:
    assert status_line(after(), 1060.0) == "train: aws, 2 nodes · 1 ready, packages · 1 m 00 s · $2.40/h · $0.04 so far"
    pool = after(events.NodeReady(at=1070.0, node=1), events.PoolReady(at=1070.0, pool="x", seconds=70.0))
    assert status_line(pool, 1090.0) == "train: aws, 2 nodes · ready after 1 m 10 s · $2.40/h · $0.06 so far"


def test_without_colours_only_colours_are_lost() -> None:
    coloured = shown(after(), style=Style())
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in coloured] == shown(after())
