"""`ls`, `down`, `logs`, `ssh`, `offers`, `plan` and `gc`, on pools of other processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.cli import main
from skyward.state import live
from skyward.state.journal import Owner
from skyward.state.live import LiveNode, LivePool
from skyward.state.outputs import read_output
from tests.waiting import until

PROGRAM = """
import time
import skyward as sky

@sky.compute
def say(text):
    print(text)

@sky.compute
def hang():
    time.sleep(600)

with sky.ComputePool(sky.Local(), nodes=2, name="train") as pool:
    say("first\\nsecond") >> pool
    print("open", flush=True)
    hang() >> pool
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user without any records yet."""
    (tmp_path / "project").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "skyward"


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    """Run a program of this user that has an open pool and is in a call."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as started:
        assert started.stdout is not None
        while started.stdout.readline() not in ("open\n", ""):
            pass
        # A value waits only a moment for the output before it.
        until(lambda: len(list(read_output(live.find("train").pool))) == 2)
        yield started
        if started.poll() is None:
            started.kill()


def test_the_end_of_a_pool_is_reported_before_its_program_shows_the_error(program: subprocess.Popen[str]) -> None:
    assert main(["down", "train", "--yes"]) == 0
    _, said = program.communicate(timeout=60)
    first, *rest = said.splitlines()
    assert first.startswith("skyward: train: closed after"), said
    assert rest[0] == "Traceback (most recent call last):", said
    assert said.count("closed after") == 1


def test_ls_shows_the_pool_of_another_process(
    program: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["POOL", "PROVIDER", "STATE", "NODES", "AGE", "PER", "HOUR", "SO", "FAR", "PROGRAM"]
    assert row.startswith("train-")
    assert row.split()[1:4] == ["local", "open", "2/2"]
    assert row.endswith(f"-c ({program.pid})")
    assert main(["ls", "--json"]) == 0
    (pool,) = json.loads(capsys.readouterr().out)["pools"]
    assert (pool["label"], pool["state"], pool["pid"], pool["instances"]) == ("train", "open", program.pid, [])


def test_ls_forgets_a_dead_pool_that_rented_nothing(
    program: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    program.kill()
    program.wait()
    assert main(["ls"]) == 0
    assert capsys.readouterr().out == "no pool is open (no provider was checked)\n"
    assert list((state / "live").iterdir()) == []


def test_down_ends_a_pool_and_its_program_reports_it(
    program: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = live.find("train").nodes
    assert main(["down", "train", "--yes"]) == 0
    assert capsys.readouterr().out.endswith(": its program closed it\n")
    assert live.live_pools() == []
    assert not any(os.path.exists(node.socket_path) for node in nodes)
    assert program.wait(60) == 1
    assert program.stderr is not None
    assert "PoolClosed: the pool was ended by `skyward down train`" in program.stderr.read()


def test_down_asks_for_confirmation(
    program: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["down", "train"]) == 1  # there is nobody to ask
    assert "give --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert main(["down", "train"]) == 1
    assert live.find("train").is_alive
    assert main(["down", "--all", "--yes"]) == 0
    assert live.live_pools() == []


def test_an_empty_name_means_no_pool(capsys: pytest.CaptureFixture[str]) -> None:
    """`skyward down "$POOL"` with a variable that is not set must not end all pools without a name."""
    nameless = LivePool(pool="pool-0123abcd", label="", provider="local", wanted=1, is_rented=False)
    live.announce(nameless)
    for command in (["down", "", "--yes"], ["ssh", ""], ["logs", ""]):
        assert main(command) == 1
        assert "pool '': no " in capsys.readouterr().err
    assert live.live_pools() == [nameless]


def test_down_of_an_ended_pool_is_no_error_and_a_typo_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down", "train-0123abcd", "--yes"]) == 0
    assert "no record of it is left on this machine" in capsys.readouterr().out
    assert main(["down", "trian", "--yes"]) == 1
    assert "pool 'trian': no such pool on this machine; open one first" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["down"])
    assert stopped.value.code == 2
    assert main(["down", "--all"]) == 0


def test_logs_shows_the_output_of_calls_of_open_and_closed_pools(
    program: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs", "train"]) == 0
    assert capsys.readouterr().out.splitlines() == ["[node 0] first", "[node 0] second"]
    assert main(["logs", "train", "-n", "1", "--time"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(time.strftime("%Y-"))
    assert shown.endswith(" [node 0] second\n")
    program.kill()
    program.wait()
    assert main(["logs", "train"]) == 0
    assert capsys.readouterr().out.splitlines() == ["[node 0] first", "[node 0] second"]
    assert main(["logs", "other"]) == 1
    assert "pool 'other': no output is kept here; use one of train-" in capsys.readouterr().err


def test_logs_follows_until_the_pool_is_closed(program: subprocess.Popen[str]) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    argv = [sys.executable, "-m", "skyward", "logs", "-f", "train"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "[node 0] first\n"
        program.kill()
        program.wait()
        assert reader.stdout.read() == "[node 0] second\n"
        assert reader.wait(60) == 0


def announced(*nodes: LiveNode, provider: str = "ssh") -> None:
    owner = Owner.this_process()
    live.announce(
        LivePool(
            pool="lab-0123abcd",
            label="lab",
            provider=provider,
            wanted=2,
            is_rented=False,
            owner=owner,
            program="train.py",
            began=time.time(),
            nodes=nodes,
        )
    )


def skyward(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, "-m", "skyward", *arguments], capture_output=True, text=True, timeout=60, env=env, check=False
    )


def test_ssh_becomes_the_command_that_made_the_node(state: Path) -> None:
    shell = (sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(3)")
    announced(LiveNode(node=0), LiveNode(node=1, terminal=shell))
    done = skyward("ssh", "lab", "1")
    assert (done.stdout, done.returncode) == ("[]\n", 3)
    assert skyward("ssh", "lab", "1", "--", "nvidia-smi", "-q", "a b").stdout == "[\"nvidia-smi -q 'a b'\"]\n"
    assert skyward("ssh", "lab", "1", "--", "echo $HOME | wc").stdout == "['echo $HOME | wc']\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("lab",), 1, "node 0 of pool 'lab' has no login"),
        (("lab", "7"), 1, "node=7: pool 'lab' has no such node; choose one of: 0"),
        (("other",), 1, "pool 'other': no open pool of that name on this machine; use one of lab"),
        (("lab", "one"), 2, "NODE is a number"),
    ],
)
def test_ssh_gives_the_reason_if_it_cannot_connect(
    arguments: tuple[str, ...], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    announced(LiveNode(node=0))
    try:
        got: object = main(["ssh", *arguments])
    except SystemExit as stopped:
        got = stopped.code
    assert got == status
    assert message in capsys.readouterr().err


def test_offers_and_plans_of_named_pools_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Path("skyward.toml").write_text('[pools.small]\nprovider = "local"\nnodes = 2\n')
    assert main(["offers", "--pool", "small"]) == 0
    assert re.search(r"this machine +\d+ +\d+(\.\d)? ", capsys.readouterr().out)
    assert main(["offers", "--provider", "local", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["vcpus"] == os.cpu_count()
    assert main(["plan", "small"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2 x this machine, provider local\n")
    assert shown.count("NodeConfig {") == 2
    assert os.environ["PATH"] not in shown
    assert main(["plan", "small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["forecast"]["nodes"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["offers", "--provider", "mars"],
            "provider='mars': unknown provider; use one of aws, local, ray_cluster, ssh",
        ),
        (["offers", "--provider", "local", "--region", "x"], "region='x': provider 'local' has no regions"),
        (["offers", "--provider", "local", "--count", "2"], "--count=2: needs an accelerator"),
        (["offers", "--provider", "local", "--vcpus", "100000"], "vcpus=100000"),
        (["plan", "nothing"], "pool 'nothing': not found in"),
    ],
)
def test_a_mistake_is_reported_without_a_traceback(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_gc_dry_run_removes_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp(prefix="s-", dir="/tmp"))  # short, or another one is taken
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    left = folder / f"skyward-{os.getuid()}" / "pool-1-0"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    assert main(["gc", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would remove {left}\n"
    assert left.exists()
    assert main(["gc"]) == 0
    assert not left.exists()
    assert main(["gc", "--local"]) == 0
    shutil.rmtree(folder)
    assert capsys.readouterr().out.endswith("nothing to clean up on this machine (no provider was checked)\n")


def test_the_command_starts_quickly_and_imports_no_provider() -> None:
    code = "import sys; from skyward.cli import build_parser; build_parser(); print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env, check=True)
    assert not {"skyward.pool.pool", "skyward.providers", "boto3", "cloudpickle"} & set(done.stdout.split())


def test_every_subcommand_has_examples_and_names_its_call_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ls", "ps", "attach", "down", "logs", "ssh", "offers", "plan", "gc"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        shown = capsys.readouterr().out
        assert f"skyward {name}" in shown
        assert "examples:" in shown
        assert "from Python: " in shown


@pytest.mark.parametrize("command", [["ls"], ["gc"], ["gc", "--dry-run"]])
def test_ls_claims_that_nothing_is_rented_only_after_a_look(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("skyward.toml").write_text('[providers.east]\ntype = "aws"\nregoin = "us-east-1"\n')
    assert main(command) == 1
    said = capsys.readouterr()
    assert "nothing is rented" not in said.out
    assert "[providers.east] regoin: no such key; did you mean 'region'?" in said.err


def test_ls_shows_the_bounds_of_an_elastic_pool_and_that_one_rests() -> None:
    from skyward.cli.pools import describe
    from skyward.pool.fleet import FleetPool

    fields: dict[str, Any] = {"label": "", "provider": "aws", "price_usd_per_hour": 0.0, "spent_usd": 0.0}
    pools = [
        FleetPool(pool="a", state="open", nodes=3, wanted=8, least=2, age_s=1.0, pid=1, program="x", **fields),
        FleetPool(pool="b", state="open", nodes=0, wanted=2, least=2, age_s=1.0, pid=1, program="x", **fields),
    ]
    _, *rows = [line.split() for line in describe(pools) if not set(line) <= set("-─ ")]
    assert [row[:4] for row in rows[-2:]] == [["a", "aws", "open", "3/2-8"], ["b", "aws", "resting", "0/2"]]
