"""The spool of a run: what was written survives, and nobody writes into another's lines."""

from __future__ import annotations

import fcntl
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyward import hub
from skyward.errors import UsageError
from skyward.hub.client.records import checked_lines, line_of, line_of_metrics
from skyward.hub.client.spool import SpoolLog, SpoolWriter, logs_in, store_bytes, store_file
from tests.waiting import until


def records_in(folder: Path) -> list[list[Any]]:
    found = []
    for path in logs_in(folder):
        log = SpoolLog(path)
        while (batch := log.read(1 << 20)) is not None:
            found += [json.loads(record) for record in batch.records]
            log.number, log.offset = batch.last, batch.end
        log.close()
    return found


def test_a_new_file_of_records_is_never_seen_without_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def lock(descriptor: int, operation: int, real: Callable[[int, int], None] = fcntl.flock) -> None:
        seen.append(len(logs_in(tmp_path)))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock)
    writer = SpoolWriter(tmp_path)
    assert seen == [0]
    (path,) = logs_in(tmp_path)
    log = SpoolLog(path)
    assert not log.try_lock()
    writer.close()
    assert log.try_lock()
    log.close()


def test_a_record_is_a_line_with_a_checksum() -> None:
    line = line_of_metrics(3, 1000, {"loss": 0.5, "bad": math.nan, "low": -math.inf})
    assert [json.loads(text or b"") for text, _ in checked_lines(line)] == [
        ["m", 3, 1000, {"loss": 0.5, "bad": "NaN", "low": "-Infinity"}]
    ]
    assert [text for text, _ in checked_lines(line.replace(b"0.5", b"0.6"))] == [None]
    assert list(checked_lines(line[:-1])) == []


def test_scalars_of_numpy_and_torch_are_numbers_and_texts_are_not() -> None:
    import numpy as np
    import torch

    line = line_of_metrics(0, 0, {"a": np.float32(0.5), "b": torch.tensor(2), "c": np.int64(3), "d": True})
    ((text, _),) = checked_lines(line)
    assert json.loads(text or b"")[3] == {"a": 0.5, "b": 2.0, "c": 3.0, "d": 1.0}
    bad: tuple[Any, ...] = ("text", None, [1], torch.ones(2))
    for value in bad:
        with pytest.raises(TypeError, match="is not a number"):
            line_of_metrics(0, 0, {"a": value})


def test_a_torn_last_record_and_a_damaged_one_cost_nothing_else(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path)
    for number in range(10):
        writer.append(line_of(["m", number, 0, {}]))
    writer.close()
    data = writer.path.read_bytes()
    damaged = data.replace(b'["m",4,', b'["m",5,')
    for cut in range(1, len(data) // 10):
        writer.path.write_bytes(damaged[:-cut])
        assert [record[1] for record in records_in(tmp_path)] == [0, 1, 2, 3, 5, 6, 7, 8]


def test_rows_of_metrics_are_records_of_their_own_and_all_of_them_are_legal_or_none_is_logged(spool: Path) -> None:
    run = hub.start_run()
    run.log_metric_rows([(step, 10 + step, {"loss": step / 2, "acc": float("nan")}) for step in range(3)])
    run.log_metric_rows([])
    wrong_rows: list[dict[str, Any]] = [{"loss": "text"}, {"../loss": 1.0}]
    for wrong in wrong_rows:
        with pytest.raises(UsageError):
            run.log_metric_rows([(3, 13, {"loss": 1.0}), (4, 14, wrong)])
    records = [record for record in records_in(run.folder) if record[0] == "m"]
    assert records == [["m", step, 10 + step, {"loss": step / 2, "acc": "NaN"}] for step in range(3)]
    run.end()


def test_kill_9_keeps_everything_that_was_written(spool: Path) -> None:
    command = [sys.executable, "-m", "tests.hub.client.writer"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ)
    assert process.stdout is not None
    run_id = process.stdout.readline().decode().strip()
    for _ in range(2000):
        process.stdout.readline()
    process.kill()
    told = process.stdout.read().split(b"\n")[:-1]
    process.wait()
    process.stdout.close()
    steps = [record[1] for record in records_in(spool / run_id) if record[0] == "m"]
    assert steps == list(range(len(steps)))
    assert len(steps) >= 2000 + len(told)
    # Its lock went with it, so another process may send the rest.
    log = SpoolLog(logs_in(spool / run_id)[0])
    assert log.try_lock()
    log.close()


def test_threads_forks_and_other_processes_of_a_run_write_whole_records(spool: Path) -> None:
    run = hub.start_run()
    other = [sys.executable, "-m", "tests.hub.client.writer", run.id]
    process = subprocess.Popen(other, stdout=subprocess.PIPE, env=os.environ)
    assert process.stdout is not None
    process.stdout.readline()

    def log(name: str) -> None:
        for step in range(500):
            run.log_metrics({name: float(step)}, step=step)

    threads = [threading.Thread(target=log, args=(f"thread{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    children = []
    for number in range(3):
        pid = os.fork()
        if pid == 0:
            log(f"child{number}")
            run.end()  # ends nothing: the run is its parent's
            os._exit(0)
        children.append(pid)
    for thread in threads:
        thread.join()
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    while process.stdout.readline() != b"500\n":
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    run.end()

    records = records_in(spool / run.id)
    for name in (*(f"thread{number}" for number in range(4)), *(f"child{number}" for number in range(3))):
        assert [record[1] for record in records if record[0] == "m" and name in record[3]] == list(range(500))
    assert [record[1] for record in records if record[0] == "m" and "loss" in record[3]][:501] == list(range(501))
    assert sorted(record[1] for record in records if record[0] == "s") == ["completed", "running"]
    assert len(logs_in(spool / run.id)) == 5


@pytest.mark.parametrize("lines", [1, 20])
def test_a_full_disk_holds_records_in_memory_until_there_is_space(tmp_path: Path, lines: int) -> None:
    writer = SpoolWriter(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        for first in range(0, 100, lines):
            numbers = range(first, first + lines)
            writer.append(b"".join(line_of(["m", number, 0, {"loss": 0.5}]) for number in numbers))
        assert 50 < writer.held < 100
        assert writer.path.read_bytes().endswith(b"\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    writer.append(line_of(["m", 100, 0, {}]))
    assert writer.held == 0
    writer.close()
    assert [record[1] for record in records_in(tmp_path)] == list(range(101))


def test_a_reader_goes_on_where_it_was_acknowledged_and_can_go_back(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path)
    for number in range(1, 11):
        writer.append(line_of(["m", number, 0, {}]))
    log = SpoolLog(writer.path)
    batch = log.read(60)
    assert batch is not None
    log.acknowledge(batch.last, batch.end)
    log.close()
    again = SpoolLog(writer.path)
    assert again.unsent == 10 - batch.last
    following = again.read(1 << 20)
    assert following is not None
    assert following.first == batch.last + 1
    assert json.loads(following.records[0])[1] == batch.last + 1
    again.rewind(1)
    behind = again.read(1 << 20, records=1)
    assert behind is not None
    assert json.loads(behind.records[0])[1] == behind.first == 2
    assert not again.try_lock()
    again.close()
    writer.close()


def test_a_record_longer_than_a_batch_is_read_whole(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path)
    writer.append(line_of(["t", {"long": "x" * 3_000_000}]))
    log = SpoolLog(writer.path)
    batch = log.read(1 << 10)
    assert batch is not None
    assert len(batch.records[0]) > 3_000_000
    log.close()
    writer.close()


def test_artifacts_are_stored_by_content(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 3_000_000)
    digest, size = store_file(tmp_path / "run", source)
    assert store_bytes(tmp_path / "run", b"x" * 3_000_000) == (digest, size)
    assert [path.name for path in (tmp_path / "run" / "files").iterdir()] == [digest]


def test_without_a_hub_a_run_is_a_folder(spool: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    (notes / "deep").mkdir(parents=True)
    (notes / "a.txt").write_text("a")
    (notes / "deep" / "b.txt").write_text("b")
    with hub.start_run(run_name="offline", experiment="digits", tags={"team": "vision"}) as run:
        run.log_params({"lr": 0.1, "layers": [2, 3]})
        run.log_metrics({"loss": 0.5}, step=1)
        run.log_artifact("notes", notes)
        run.log_table("samples", [{"q": "2+2", "a": 4}, {"q": "3+3"}])
        run.delete_tag("team")
        child = run.fork(1)
        child.end("cancelled")
    first, *rest = records_in(run.folder)
    assert first[0] == "run"
    assert {key: first[1][key] for key in ("experiment", "name", "parent")} == {
        "experiment": "digits",
        "name": "offline",
        "parent": None,
    }
    assert first[1]["tags"]["team"] == "vision"
    assert [record[0] for record in rest] == ["p", "m", "a", "a", "a", "dt", "s"]
    assert rest[0] == ["p", {"lr": "0.1", "layers": "[2, 3]"}]
    assert [record[1] for record in rest[2:5]] == ["notes/a.txt", "notes/deep/b.txt", "samples.json"]
    table = json.loads((run.folder / "files" / rest[4][3]).read_bytes())
    assert table == {"columns": ["q", "a"], "data": [["2+2", 4], ["3+3", None]]}
    assert rest[-1][1] == "completed"
    of_child = records_in(spool / child.id)
    assert of_child[0][1]["parent"] == run.id
    assert of_child[0][1]["tags"]["skyward.fork.step"] == "1"
    assert of_child[1] == ["p", {"lr": "0.1", "layers": "[2, 3]"}]
    assert (run.state, child.state) == ("completed", "cancelled")


def test_a_block_that_raises_fails_the_run_with_the_exception() -> None:
    with pytest.raises(ZeroDivisionError), hub.start_run() as run:
        _ = 1 / 0
    state, _, error = records_in(run.folder)[-1][1:]
    assert (state, error) == ("failed", "ZeroDivisionError: division by zero")
    with pytest.raises(UsageError, match="has ended; resume it"):
        run.log_metrics({"a": 1.0})


PROGRAM = """
from skyward import hub
hub.start_run(run_name="forgotten")
hub.log_metric("loss", 0.5)
{end}
"""


@pytest.mark.parametrize(
    ("end", "state"), [("", "completed"), ("raise OSError('no disk')", "failed"), ("exit(3)", "completed")]
)
def test_a_run_that_nobody_ended_ends_with_its_program(spool: Path, end: str, state: str) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], env=os.environ, capture_output=True, check=False)
    (folder,) = spool.iterdir()
    record = records_in(folder)[-1]
    assert record[:2] == ["s", state]
    assert record[3] == ("OSError: no disk" if state == "failed" else None)


def test_functions_of_the_module_log_to_the_current_run_in_mlflows_order(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"weights")
    hub.set_experiment("digits")
    hub.log_metric("loss", 0.5, 3)
    hub.log_metrics({"accuracy": 0.9}, step=3)
    hub.log_param("lr", 0.1)
    hub.log_params({"batch": 2})
    hub.set_tag("note", "first")
    hub.set_tags({"team": "vision"})
    hub.log_artifact(path, "models")
    hub.log_text("all is well", "notes.txt")
    hub.log_table({"q": ["2+2"], "a": [4]}, "samples.json")
    run = hub.active_run()
    assert run is not None
    inner = hub.start_run(run_name="inner")
    assert hub.active_run() is inner
    hub.end_run("KILLED")
    assert (inner.state, hub.active_run()) == ("cancelled", run)
    hub.end_run()
    records = records_in(run.folder)
    assert records[0][1]["experiment"] == "digits"
    assert [record[0] for record in records[1:]] == ["m", "m", "p", "p", "t", "t", "a", "a", "a", "s"]
    assert [record[1] for record in records if record[0] == "a"] == ["models/model.bin", "notes.txt", "samples.json"]


BAD: list[tuple[str, Any]] = [
    ("is not a text", lambda: hub.log_metric("", 1.0)),
    ("is not a text", lambda: hub.log_metric(3, 1.0)),  # type: ignore[arg-type]
    ("is not a plain path", lambda: hub.log_param("../up", 1.0)),
    ("is not a plain path", lambda: hub.log_text("text", "/etc/passwd")),
    ("not a dict; .* vars", lambda: hub.log_params(["lr"])),  # type: ignore[arg-type]
    ("more than 250", lambda: hub.set_tag("k" * 251, 1.0)),
    ("is not a number", lambda: hub.log_metric("loss", "high")),  # type: ignore[arg-type]
    ("is not the id", lambda: hub.start_run(resume="../../etc")),
    ("is not an end", lambda: hub.start_run().end("lost")),
    ("is not the address", lambda: hub.connect("ftp://somewhere")),
    ("has a user in it", lambda: hub.connect("http://user:secret@somewhere")),
    ("columns differ", lambda: hub.log_table({"a": [1], "b": []}, "t.json")),
    ("is not a table", lambda: hub.log_table(3, "t.json")),
]


@pytest.mark.parametrize(("says", "act"), BAD)
def test_bad_arguments_are_named(says: str, act: Any) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        act()
    assert "secret" not in str(refused.value)


def test_a_parameter_does_not_change() -> None:
    hub.log_param("lr", 1)
    hub.log_param("lr", 1)
    with pytest.raises(UsageError, match="has '1' already"):
        hub.log_param("lr", 2)


def test_the_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_HUB_URL", "skyward://hub.example")
    monkeypatch.setenv("SKYWARD_HUB_TOKEN", "sky_1_secret")
    monkeypatch.setenv("SKYWARD_HUB_PROJECT", "vision")
    address = hub.connect()
    assert address is not None
    assert (address.url, address.token, address.project) == ("http://hub.example:8057", "sky_1_secret", "vision")
    assert "sky_1_secret" not in repr(address)
    secure = hub.connect("skyward+https://[::1]/base/")
    assert secure is not None
    assert secure.url == "https://[::1]:8057/base"


def test_importing_the_client_imports_no_extra() -> None:
    code = "import sys; from skyward import hub; hub.start_run().end(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"numpy", "torch", "sqlalchemy", "msgspec", "starlette", "pandas", "mlflow", "xxhash"}


def test_the_end_of_a_thread_of_a_forked_child_does_not_hold_up_the_parent() -> None:
    run = hub.start_run()
    pid = os.fork()
    if pid == 0:
        run.log_metrics({"child": 1.0})
        os._exit(0)
    os.waitpid(pid, 0)
    until(lambda: any(record[0] == "m" for record in records_in(run.folder)))
    run.end()
