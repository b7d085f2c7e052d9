"""The live view on a real terminal: calm, complete, and gone without a trace however the program ends."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.console.on_a_terminal import Program
from tests.waiting import until

RULE = "── demo ──"

OPEN = """
import os, signal, sys, time
import skyward as sky

@sky.compute
def say(text):
    print(text)
    return text

def wait_for_ever():
    print("waiting")
    sys.stdin.readline()

with sky.ComputePool(sky.Local(), nodes=2, console=True, name="demo") as pool:
"""


def program(body: str, **how: object) -> Program:
    code = OPEN + "\n".join(f"    {line}" for line in body.strip().splitlines()) + "\nprint('after')\n"
    return Program(code, **how)  # type: ignore[arg-type]


def assert_given_back(one: Program) -> None:
    assert one.screen.region == (1, one.screen.rows)
    assert not any(RULE in line or "slots busy" in line for line in one.screen.lines)


def test_nodes_stay_at_the_bottom_while_output_scrolls_above_them_complete() -> None:
    body = """
for number in range(60):
    print(f"mine {number} " + "x" * 60)
    if number % 3 == 0:
        say(f"theirs {number}") >> pool
    if number % 20 == 0:
        os.system(f"echo a shell {number}")
        os.write(1, b"without Python\\n")
        time.sleep(0.4)
"""
    with program(body) as one:
        one.until_seen("after")
        assert one.wait() == 0
        assert_given_back(one)
        seen = one.screen.all_lines
        expected = []
        for number in range(60):
            expected.append(f"mine {number} " + "x" * 60)
            if number % 3 == 0:
                expected.append(f"theirs {number}")
            if number % 20 == 0:
                expected += [f"a shell {number}", "without Python"]
        printed = [re.sub(r"^\[node \d\] ", "", line) for line in seen]
        assert [line for line in printed if line in set(expected)] == expected
        shown = [frame for frame in one.frames if any(RULE in line for line in frame)]
        assert shown
        for frame in shown:  # never elsewhere, never half of it
            assert RULE in frame[-4], "\n".join(frame)
            assert sum(RULE in line for line in frame) == 1
            assert any(state in frame[-1] for state in ("slots busy", "waiting for", "closing"))
            assert frame[-3].strip()


def test_it_shows_the_calls_of_each_node_and_the_load_of_the_machine() -> None:
    body = """
@sky.compute
def train():
    time.sleep(300)

future = train() > pool.node(1)
wait_for_ever()
future.cancel()
"""
    load = re.compile(r"1 of 2 slots busy .* cpu +\d+% [━─]+ +mem [\d.]+/\d+ GiB")
    with program(body) as one:
        one.until(lambda screen: any(re.search(r"● +1 +train \d+ s", line) for line in screen.lines))
        one.until(lambda screen: load.search(screen.lines[-1]))
        assert re.search(r"● +0 +idle$", one.screen.lines[-3])
        one.type(b"\n")
        assert one.wait() == 0


BARS = """
from tqdm import tqdm

@sky.compute
def train():
    for _ in tqdm(range(40), desc="epochs"):
        time.sleep(0.1)
    print("trained")

def simulate(seed):
    time.sleep(0.05)
    if seed == 50:
        raise ValueError("unlucky")

train() >> pool
try:
    pool.map(simulate, range(100))
except ValueError as error:
    print("it was", error)
time.sleep(0.3)
"""


@pytest.mark.parametrize(("columns", "env"), [(100, {}), (60, {}), (100, {"NO_COLOR": "1"})])
def test_bars_of_tasks_and_maps_stay_in_place_and_leave_their_last_state(columns: int, env: dict[str, str]) -> None:
    with program(BARS, columns=columns, env=env) as one:
        one.until_seen("after")
        assert one.wait() == 0
        assert_given_back(one)
        assert env == {} or not re.search(rb"\x1b\[[1-9][\d;]*m", one.output)
        lines = one.screen.all_lines
        # One line is left of the bar in the task, its last. The others were in the row of its node.
        assert len([line for line in lines if "epochs:" in line]) == 1
        assert any(re.search(r"epochs: 100%.*40/40", line) for line in lines)
        in_place = {line for frame in one.frames for line in frame if re.search(r"● +\d +train .*epochs: +\d+%", line)}
        assert len(in_place) >= 4
        bars = {line for frame in one.frames for line in frame if re.search(r"simulate +\d+ of 100 +[━─]+ +\d+%", line)}
        assert len(bars) >= 2
        assert columns < 72 or any(re.search(r"[\d.]+ s left  [\d.]+/s", line) for line in bars)
        assert all(len(line) < columns for line in in_place | bars)
        assert "it was unlucky" in lines
        assert any(re.search(r"demo: closed after [\d.]+ s: \d+ calls?, \d+ failed", line) for line in lines)


def test_without_a_live_view_a_bar_of_a_task_is_a_line_a_second() -> None:
    with program(BARS.partition("try:")[0], env={"TERM": "dumb"}) as one:
        assert one.wait() == 0
        assert b"\x1b" not in one.output
        lines = one.screen.all_lines
        (seconds,) = (float(s) for line in lines for s in re.findall(r"demo: closed after ([\d.]+) s: 1 call$", line))
        assert 2 <= len([line for line in lines if "epochs:" in line]) <= seconds + 4


def test_a_prompt_and_typed_text_stay_complete() -> None:
    with program("name = input('your name? ')\nprint('hello', name)") as one:
        one.until_seen("slots busy")
        one.until_seen("your name?")
        one.type(b"Ada\n")
        one.until_seen("hello Ada")
        assert one.wait() == 0
        assert "your name? Ada" in one.screen.all_lines


def test_it_redraws_only_changes_at_most_eight_times_a_second() -> None:
    """Count frames and bytes over four seconds, or more on a busy machine."""
    with program("time.sleep(4)") as one:
        one.until_seen("slots busy")
        began, begin, frames = time.monotonic(), len(one.output), len(one.frames)
        one.until_seen("after")
        one.wait()
        seconds = max(4.0, time.monotonic() - began)
        assert len(one.frames) - frames < (seconds + 0.5) * 8
        assert len(one.output) - begin < seconds * 1500


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("raise ValueError('as it goes')", 1),
        ("sys.exit(3)", 3),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(9)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    ],
)
def test_the_terminal_is_restored_however_the_program_ends(end: str, status: int) -> None:
    with program(f"print('first')\nsys.stdin.readline()\n{end}") as one:
        one.until_seen("slots busy")
        one.type(b"\n")
        assert one.wait() == status
        assert_given_back(one)
        assert "first" in one.screen.all_lines


def test_an_unread_terminal_blocks_no_call_and_no_close(tmp_path: Path) -> None:
    body = f"""
@sky.compute
def shout():
    for number in range(3000):
        print(number, "x" * 100)

folder = {str(tmp_path)!r}
shout() >> pool
open(os.path.join(folder, "called"), "w").close()
for _ in range(5):
    shout() >> pool
pool.close()
open(os.path.join(folder, "closed"), "w").close()
"""
    with program(body) as one:
        until((tmp_path / "closed").exists)  # and nothing is read meanwhile
        assert one.wait() == 0
        assert_given_back(one)
        assert "after" in one.screen.all_lines


@pytest.mark.parametrize("env", [{}, {"CI": "true"}], ids=["live", "plain"])
@pytest.mark.parametrize("how", ["live", "killed", "interrupted"])
def test_tasks_cannot_control_the_terminal(env: dict[str, str], how: str) -> None:
    body = r"""
@sky.compute
def attack(how):
    evil = "[2J [H [?25l [?1049h [1;5r [!p ]0;title\a ]52;c;eA==\a c 7 (0".replace(" ", "\x1b")
    print("first \x1b" + evil + "\x9b2J\b\b\b \x1b[32mgreen\x1b[0m last", flush=True)
    print("\x1b[?25l\x1b[31m", end="", flush=True)  # and it ends like that
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60 if how == "interrupted" else 0)

attack(HOW) >> pool
""".replace("HOW)", f"{how!r})")
    with program(body, env=env) as one:
        one.until_seen("first")
        if how == "interrupted":
            one.type(b"\x03")
        assert (one.wait() == 0) is (how == "live")
        assert "[node 0] first  green last" in [
            re.sub(r"\[node \d\]", "[node 0]", line) for line in one.screen.all_lines
        ]
        ours = rb"\x1b(?:\[[\d;]*[mHAKJr]|[78D])"
        assert not re.search(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]", re.sub(ours, b"", one.output))
        for sequence in (b"\x1b[2J", b"\x1b[H", b"\x1b[1;5r", b"\x1b[?"):
            assert sequence not in one.output
        assert_given_back(one)


def test_ctrl_c_restores_the_terminal_before_the_traceback() -> None:
    with program("wait_for_ever()") as one:
        one.until_seen("slots busy")
        one.until_seen("waiting")
        one.type(b"\x03")
        assert one.wait() in (1, -signal.SIGINT)
        assert_given_back(one)
        lines = one.screen.all_lines
        assert "KeyboardInterrupt" in lines
        assert "waiting" in lines


def test_another_size_is_followed() -> None:
    with program("wait_for_ever()", rows=24, columns=100) as one:
        one.until_seen("slots busy")
        for rows, columns in ((40, 120), (14, 60)):
            one.resize(rows, columns)
            one.until(lambda screen: RULE in screen.lines[-4] and screen.region == (1, screen.rows - 4))
            assert sum(RULE in line for line in one.screen.lines) == 1
            assert all(len(line) < columns for line in one.screen.lines[-4:])
        one.resize(8, 60)  # too small to give lines away
        one.until(lambda screen: screen.region == (1, 8))
        one.type(b"\n")
        assert one.wait() == 0
        assert_given_back(one)


def test_no_color_is_respected() -> None:
    with program("wait_for_ever()", env={"NO_COLOR": "1"}) as one:
        one.until_seen(RULE)
        one.type(b"\n")
        assert one.wait() == 0
        assert not re.search(rb"\x1b\[[1-9][\d;]*m", one.output)


def test_a_terminal_without_unicode_gets_none() -> None:
    with program("wait_for_ever()", env={"PYTHONIOENCODING": "ascii"}) as one:
        one.until_seen("-- demo -- local | 2 of 2 ready")
        one.type(b"\n")
        assert one.wait() == 0
        assert one.output.isascii()


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"CI": "true"}], ids=["dumb", "of a CI job"])
def test_a_terminal_that_is_better_with_lines_gets_lines(env: dict[str, str]) -> None:
    with program("say('x') >> pool", env=env) as one:
        assert one.wait() == 0
        assert not re.search(rb"\x1b(?!\[[\d;]*m)", one.output), "more than colours"
        assert env != {"TERM": "dumb"} or b"\x1b" not in one.output
        assert "skyward: demo: starting 2 nodes on local" in one.screen.all_lines
        assert any(line.startswith("skyward: demo: ready after ") for line in one.screen.all_lines)


def test_a_short_pool_shows_nothing() -> None:
    code = """
import time
import skyward as sky
began = time.monotonic()
with sky.ComputePool(sky.Local()):
    pass
print(time.monotonic() - began)
"""
    for _ in range(5):
        with Program(code) as one:
            assert one.wait() == 0
        if b"\x1b" not in one.output:
            assert re.fullmatch(rb"[\d.]+\r\n", one.output)
            return
        assert float(one.output.split()[-1]) > 1.5, "a pool that took less has shown something"
    pytest.skip("this machine is too busy: a pool takes seconds")


def test_two_pools_stand_one_below_the_other() -> None:
    body = """
with sky.ComputePool(sky.Local(), console=True, name="other") as other:
    wait_for_ever()
time.sleep(0.5)
"""
    with program(body) as one:
        one.until(lambda screen: RULE in screen.lines[-7] and "── other ──" in screen.lines[-3])
        one.type(b"\n")
        one.until(lambda screen: RULE in screen.lines[-4] and not any("other ──" in line for line in screen.lines))
        assert one.wait() == 0
        assert_given_back(one)
