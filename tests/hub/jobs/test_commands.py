"""Commands as jobs, from end to end: started without a shell on each node, stopped by SIGTERM, asked for their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from skyward import hub
from skyward.cli import main
from skyward.errors import CommandFailed, HubError, JobFailed, UsageError
from tests.hub.jobs.hub_process import HubProcess
from tests.waiting import until, until_text

pytestmark = pytest.mark.usefixtures("hub_process")

SHOW = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
shown = {name: os.environ[name] for name in names}
print(json.dumps({**shown, "args": sys.argv[1:], "strategy": os.environ.get("SKYWARD_STRATEGY")}), flush=True)
"""

WAIT = """
import os, signal, sys, time
def save(*_):
    print("saving", flush=True)
    open(sys.argv[1] + ".saved", "w").close()
    sys.exit(3)
signal.signal(signal.SIGTERM, save)
open(f"{sys.argv[1]}.{os.environ['RANK']}", "w").write(str(os.getpid()))
while not os.path.exists(sys.argv[1] + ".go"):
    time.sleep(0.05)
"""

SAVE = """
import os, signal, subprocess, sys, time
if os.path.exists(sys.argv[1]):
    sys.exit(print("goes on", flush=True))
worker = subprocess.Popen(["sleep", "600"])
def save(*_):
    print("saving", flush=True)
    time.sleep(0.5)
    with open(sys.argv[1], "w") as file:
        file.write("worker lived" if worker.poll() is None else "worker died")
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1] + ".pid")
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with programs, whose modules travel."""
    (tmp_path / "show_job.py").write_text(SHOW)
    (tmp_path / "wait_job.py").write_text(WAIT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines_of(job: hub.Job[Any]) -> list[dict[str, Any]]:
    """Return the lines of `show_job.py`, by rank. Those of several nodes begin with the node."""
    lines = [json.loads(line[line.index("{") :]) for line in job.logs()]
    return sorted(lines, key=lambda line: int(line["RANK"]))


def test_command_runs_on_each_node_without_a_shell_and_with_torchruns_variables(folder: Path) -> None:
    file = folder / "job.yaml"
    file.write_text(
        "name: show\ncommand: [python, show_job.py, $HOME, 'a b; touch canary', '*']\n"
        "distributed: {num_nodes: 2, strategy: ddp}\nschedule: {max_duration: 10m}\n"
    )
    job = hub.submit_command(file)
    assert job.result(100) == [0, 0]
    lines = lines_of(job)
    assert [(line["RANK"], line["NODE_RANK"], line["LOCAL_RANK"]) for line in lines] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
    ]
    assert {line["WORLD_SIZE"] for line in lines} == {"2"}
    assert len({(line["MASTER_ADDR"], line["MASTER_PORT"]) for line in lines}) == 1
    assert lines[0]["args"] == ["$HOME", "a b; touch canary", "*"]
    assert lines[0]["strategy"] == "ddp"
    assert not list(folder.rglob("canary"))


def test_processes_of_a_node_have_ranks_of_their_own(folder: Path, hub_process: HubProcess) -> None:
    job = hub.submit_command({"command": ["python", "show_job.py"], "distributed": {"gpus_per_node": 2}})
    until(lambda: "no machines of this hub can run it" in job.why_waiting)  # it has no two devices
    job.cancel()
    with hub_process.client() as client:  # as any program submits one, without code
        spec = {"command": [sys.executable, str(folder / "show_job.py")], "ranks_per_node": 2, "devices": None}
        body = {"name": "two", "spec": spec}
        twice = hub.job(client.post("/v1/jobs", json=body).raise_for_status().json()["id"])
    assert twice.result(100) == 0
    assert [(line["RANK"], line["LOCAL_RANK"], line["LOCAL_WORLD_SIZE"]) for line in lines_of(twice)] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]


def test_status_of_a_command_is_the_exception_of_its_job() -> None:
    script = "import sys; print('before'); print('why', file=sys.stderr); sys.exit(7)"
    failed = hub.submit_command({"command": ["python", "-c", script]})
    missing = hub.submit_command({"command": ["no-such-program"]})
    killed = hub.submit_command({"command": ["sh", "-c", "kill -9 $$"]})
    error = failed.exception(100)
    assert isinstance(error, CommandFailed)
    assert (error.exit_code, failed.status) == (7, "failed")
    assert "command='python': ended with status 7; read its output" in str(error)
    assert sorted(failed.logs()) == ["before", "why"]
    for job, status, text in ((missing, 127, "cannot be started: No such file"), (killed, -9, "ended by SIGKILL")):
        error = job.exception(100)
        assert isinstance(error, CommandFailed)
        assert error.exit_code == status
        assert text in str(error)


def test_command_that_makes_way_gets_sigterm_and_begins_again(folder: Path, hub_process: HubProcess) -> None:
    first = folder / "first"
    # It takes every node, so the second one needs its place.
    nodes = os.cpu_count() or 1
    victim = hub.submit_command(
        {
            "command": ["python", "wait_job.py", str(first)],
            "distributed": {"num_nodes": nodes},
            "schedule": {"preemptible": True},
            "priority": "low",
        }
    )
    until(lambda: all(Path(f"{first}.{rank}").exists() for rank in range(nodes)), 90)
    with pytest.raises(HubError, match="runs a command, which saves when it gets SIGTERM"):
        victim.save()
    urgent = hub.submit_command({"command": ["python", "show_job.py"], "distributed": {"num_nodes": nodes}})
    assert urgent.result(100) == [0] * nodes
    assert Path(f"{first}.saved").exists()
    until(lambda: len(victim.attempts) == 2, 60)
    assert victim.attempts[0].end == "stopped"
    Path(f"{first}.go").touch()
    assert victim.result(100) == [0] * nodes
    assert "saving" in "\n".join(victim.logs(follow=False))
    hub_process.until_clean()


def test_cancel_and_time_limit_end_the_processes_of_a_command(folder: Path, hub_process: HubProcess) -> None:
    # A child in a session of its own must not survive.
    script = "setsid sh -c 'echo $$ > child; sleep 600' & echo $$ > parent; trap '' TERM; sleep 600 & wait; sleep 600"
    stubborn = hub.submit_command({"command": ["sh", "-c", f"cd {folder}; {script}"]})
    late = hub.submit_command({"command": ["sleep", "600"], "schedule": {"max_duration": "1s"}})
    pids = [int(until_text(folder / name, 90)) for name in ("child", "parent")]
    stubborn.cancel()
    with pytest.raises(CancelledError):
        stubborn.result(60)
    with pytest.raises(JobFailed, match="max_duration_s: its time is over"):
        late.result(100)
    hub_process.until_clean()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_program_in_a_shell_saves_with_its_worker_when_the_job_is_told_to_end(
    folder: Path, hub_process: HubProcess
) -> None:
    (folder / "save_job.py").write_text(SAVE)
    nodes = os.cpu_count() or 1
    all_nodes = {"distributed": {"num_nodes": nodes}}
    piped = ["sh", "-c", f"python save_job.py {folder}/victim.$RANK 2>&1 | tee log; :"]
    low = {"priority": "low", "schedule": {"preemptible": True}}
    victim = hub.submit_command({"command": piped, **all_nodes, **low})
    until(lambda: all((folder / f"victim.{rank}.pid").exists() for rank in range(nodes)), 90)
    assert hub.submit_command({"command": ["true"], **all_nodes}).result(100) == [0] * nodes
    assert victim.result(100) == [0] * nodes
    lines = "\n".join(victim.logs())
    assert [lines.count(word) for word in ("saving", "saved", "goes on")] == [nodes] * 3
    cancelled = hub.submit_command({"command": ["sh", "-c", f"python save_job.py {folder}/cancelled.0; :"]})
    pid = int(until_text(folder / "cancelled.0.pid", 90))
    cancelled.cancel()
    hub_process.until_clean()
    ends = ["cancelled.0", *(f"victim.{rank}" for rank in range(nodes))]
    assert [(folder / end).read_text() for end in ends] == ["worker lived"] * (nodes + 1)
    assert not Path(f"/proc/{pid}").exists()


def test_command_imports_modules_of_each_folder_that_was_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, name in (("lib", "helper"), ("own", "beside"), ("project", "above")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text("")
    (tmp_path / "project" / "scripts").mkdir()
    (tmp_path / "project" / "scripts" / "train.py").write_text("import helper, above, beside\nprint('imported')")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    env = {"PYTHONPATH": str(tmp_path / "own")}
    job = hub.submit_command({"command": ["python", "scripts/train.py"], "env": env})
    assert job.exception(100) is None
    assert list(job.logs()) == ["imported"]


def test_files_of_a_job_have_the_mask_of_the_user_and_its_folder_is_private() -> None:
    own = subprocess.run(["sh", "-c", "umask"], capture_output=True, text=True, check=True).stdout.strip()
    job = hub.submit_command({"command": ["sh", "-c", "umask; stat -c %a ../.."]})
    assert job.result(100) == 0
    assert list(job.logs()) == [own, "700"]


def test_files_that_a_command_names_are_there(folder: Path) -> None:
    (folder / "text-tasks").mkdir()
    (folder / "text-tasks" / "glue.py").write_text("NAME = 'glue'")
    program = "import sys; from glue import NAME; print(NAME, open(sys.argv[1].partition('=')[2]).read())"
    (folder / "text-tasks" / "run.py").write_text(program)
    (folder / "small.json").write_text("{}")
    (folder / "train.sh").write_text("echo $1")
    plain = hub.submit_command({"command": ["python", "./text-tasks/run.py", "--config=small.json"]})
    shell = hub.submit_command({"command": ["sh", "-c", "sh train.sh first && cat 'small.json'"]})
    assert (plain.exception(100), shell.exception(100)) == (None, None)
    assert [list(job.logs()) for job in (plain, shell)] == [["glue {}"], ["first", "{}"]]


def test_last_line_names_the_files_that_end_with_the_working_folder(folder: Path) -> None:
    write = "mkdir out; head -c 2000000 /dev/zero > out/model.pt; touch a b c .hidden; echo here > kept.py; exit 3"
    failed = hub.submit_command({"command": ["sh", "-c", write]})
    keep = "touch $SKYWARD_CHECKPOINT_DIR/model.pt; python -c 'import show_job'"
    quiet = hub.submit_command({"command": ["sh", "-c", keep]})
    assert isinstance(failed.exception(100), CommandFailed)
    (line,) = failed.logs()
    assert line == (
        "[skyward] 5 files (2 MB) in the working folder end with this attempt: out/model.pt, kept.py, a, ...; "
        "write files that should stay to the folder in SKYWARD_CHECKPOINT_DIR"
    )
    assert quiet.exception(100) is None
    assert [line for line in quiet.logs() if "[skyward]" in line] == []


def test_secret_reaches_the_command_and_nothing_else(hub_process: HubProcess) -> None:
    command = ["python", "-c", "import os; print('token', os.environ['API_TOKEN'], len(os.environ['API_TOKEN']))"]
    absent = hub.submit_command({"command": command, "secrets": ["API_TOKEN"]})
    error = absent.exception(100)
    assert isinstance(error, UsageError)
    assert "secrets=API_TOKEN: this machine has none for project default" in str(error)
    place = hub_process.data / "launcher" / "secrets" / "default"
    place.mkdir(parents=True)
    (place / "API_TOKEN").write_text("very-secret-value\n")
    (place / "API_TOKEN").chmod(0o644)
    open_to_all = hub.submit_command({"command": command, "secrets": ["API_TOKEN"]})
    assert "others may read its file" in str(open_to_all.exception(100))
    (place / "API_TOKEN").chmod(0o600)
    job = hub.submit_command({"command": command, "secrets": ["API_TOKEN"]})
    assert job.result(100) == 0
    assert list(job.logs()) == ["token *** 17"]
    with hub_process.client() as client:
        assert "very-secret" not in client.get(f"/v1/jobs/{job.id}").text
    database = b"".join(path.read_bytes() for path in hub_process.data.glob("hub.db*"))
    assert b"very-secret" not in database


def test_command_line_submits_files_and_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text("command: [python, -c, 'print(1)']\n")
    submit = ("job", "submit", "--max-duration", "5m")
    assert main((*submit, "job.yaml")) == 0
    assert main((*submit, "--name", "second", "--hold", "--", "python", "-c", "print(2)", "--nodes")) == 0
    first, second = map(hub.job, capsys.readouterr().out.split())
    assert (first.result(100), list(first.logs())) == (0, ["1"])
    assert (second.name, second.status) == ("second", "queued")
    second.release()
    assert second.result(100) == 0
    (folder / "wrong.yml").write_text("command: [a]\nresorces: {}\n")
    assert main((*submit, "wrong.yml")) == 1
    assert "resorces: unknown field; did you mean resources?" in capsys.readouterr().err
