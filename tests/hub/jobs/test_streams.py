"""Jobs whose functions are generators: their items arrive while they run, each once, and are kept."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from skyward import hub
from skyward.cli import main
from skyward.errors import StreamRestarted, UsageError
from skyward.hub.model.items import take_items
from tests.hub.jobs.calls import OwnError, add, count_up, print_json
from tests.hub.jobs.hub_process import HubProcess
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("hub_process")


def open_gate(gate: Path, count: int) -> None:
    """Let the generator yield its first items."""
    gate.write_bytes(bytes(count))


def test_items_arrive_while_the_job_runs_and_are_there_for_any_process_after_its_end(tmp_path: Path) -> None:
    open_gate(tmp_path / "gate", 2)
    submitted = hub.submit(count_up(str(tmp_path / "gate"), 4))
    stream = iter(submitted)
    assert [next(stream), next(stream), submitted.status] == [(1, 0), (1, 1), "running"]
    open_gate(tmp_path / "gate", 4)
    assert list(stream) == [(1, 2), (1, 3)]
    job = hub.job(submitted.id)
    assert job.result() == list(job) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert (list(job.stream(start=3)), list(job.stream(start=9))) == ([(1, 3)], [])
    job.delete()


def test_error_of_the_function_comes_after_the_items_before_it(tmp_path: Path) -> None:
    open_gate(tmp_path / "gate", 2)
    job = hub.submit(count_up(str(tmp_path / "gate"), 2, fails=True))
    items = []
    with pytest.raises(OwnError, match="after its items"):
        for item in job:
            items.append(item)
    assert items == [(1, 0), (1, 1)]
    with pytest.raises(OwnError):
        job.result()


def test_reader_goes_on_while_the_server_is_killed_and_replaced(hub_process: HubProcess, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    open_gate(gate, 2)
    job = hub.submit(count_up(str(gate), 8))
    stream = job.stream()
    assert [next(stream), next(stream)] == [(1, 0), (1, 1)]
    hub_process.kill()
    open_gate(gate, 6)
    (spooled,) = (hub_process.data / "launcher" / "attempts").glob(f"{job.id}-1/items")
    until(lambda: len(list(take_items(bytearray(spooled.read_bytes())))) == 6, 90)
    hub_process.start()
    open_gate(gate, 8)
    assert list(stream) == [(1, number) for number in range(2, 8)]
    assert job.result(100) == [(1, number) for number in range(8)]
    hub_process.until_clean()


class Away(BaseHTTPRequestHandler):
    """A proxy before a hub that is just away."""

    was_asked = threading.Event()

    def do_GET(self) -> None:
        self.send_error(503)
        self.close_connection = True
        self.was_asked.set()

    def log_message(self, *_: object) -> None:
        pass


def test_readers_wait_for_a_hub_that_is_away_behind_a_proxy(
    hub_process: HubProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    job = hub.submit(print_json())
    job.result(100)
    hub_process.kill()
    with ThreadPoolExecutor(1) as readers, ThreadingHTTPServer(("127.0.0.1", hub_process.port), Away) as proxy:
        threading.Thread(target=proxy.serve_forever).start()
        lines = readers.submit(lambda: list(job.logs()))
        assert Away.was_asked.wait(60)
        proxy.shutdown()
        proxy.server_close()
        hub_process.start()
        assert lines.result(100) == ["{", '    "loss": 0.5', "}"]
    capsys.readouterr()
    assert main(["job", "logs", job.id]) == 0
    assert capsys.readouterr().out == '{\n    "loss": 0.5\n}\n'
    hub_process.until_clean()


def test_reader_in_the_middle_is_told_that_a_new_attempt_begins_again(hub_process: HubProcess, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    open_gate(gate, 2)
    job = hub.submit(count_up(str(gate), 3))
    with ThreadPoolExecutor(1) as thread:
        unread = thread.submit(lambda: list(job.stream(start=2)))
        stream = iter(job)
        assert [next(stream), next(stream)] == [(1, 0), (1, 1)]
        (runner,) = hub_process.runner_pids()
        os.kill(runner, signal.SIGTERM)  # its machine shuts down
        with pytest.raises(StreamRestarted, match="attempt 2 yields its items from the beginning, and 2 of") as caught:
            next(stream)
        assert (caught.value.job, caught.value.attempt, caught.value.count) == (job.id, 2, 2)
        open_gate(gate, 3)
        assert unread.result(100) == [(2, 2)]  # a reader that had no item yet is not told
    assert list(job.stream(start=caught.value.count)) == [(2, 2)]
    assert job.result(100) == [(2, 0), (2, 1), (2, 2)]
    hub_process.until_clean()


def test_streams_that_no_job_can_have_are_refused_in_words() -> None:
    with pytest.raises(UsageError, match="on='all': count_up would make a stream on each node"):
        hub.submit(count_up("gate", 1), on="all")
    with pytest.raises(UsageError, match="call=count_up: yields items, and an objective has one value"):
        hub.submit(count_up("gate", 1), sweep=1)
    job = hub.submit(add(1, 2), hold=True)
    with pytest.raises(UsageError, match="its function is no generator; call result"):
        next(iter(job))
    job.cancel()
