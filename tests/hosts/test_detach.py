"""Detached pools on a host: they go on without their client, and another one takes what they have done."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.bootstrap.environments import own_wheel, repacked
from skyward.cli import main
from skyward.errors import HeadLost, PoolClosed, RefLost, StateLost, TaskTimeout, UsageError
from skyward.state import detached
from skyward.values.machine import LogLine
from skyward.wire.frames import PROTOCOL_VERSION
from tests.hosts.bed import ROOT
from tests.hosts.faults import EPSILON_S, Place, client_processes, kill_head, nothing_runs_on, pids
from tests.hosts.host import Host
from tests.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]

PROGRAM = """
import sys, time
import skyward as sky

host, config, index, for_s = sys.argv[1:]

@sky.compute
def count():
    for number in range(100):
        print("item", number, flush=True)
        yield number

@sky.compute
def wait(path, value):
    import os, time
    while not os.path.exists(path):
        time.sleep(0.01)
    print("went on", value, flush=True)
    return value

@sky.compute(name="fails")
def fails():
    raise LookupError("of the call")

pool = sky.ComputePool(
    sky.SSH(hosts=[host], config_file=config), name="train", detached_for_s=float(for_s),
    concurrency=4, image=sky.Image(pip_index_url=index), logs=lambda line: None,
)
pool.start()
read, unread = wait("/", 1) > pool, wait("/", 2) > pool
assert read.result() == 1
failed, open_call = fails() > pool, wait("/root/go", 3) > pool
numbers = count() >> pool
taken = [next(numbers) for _ in range(3)]
while not (unread.done() and failed.done() and open_call.running()):
    time.sleep(0.01)
pool.calls()  # the answer comes when the head knows what was read
print("ready", flush=True)
try:
    print("value", open_call.result(), flush=True)
    print("goes on:", unread.result(), wait("/", 5) >> pool, flush=True)
    taken += [next(numbers) for _ in range(47)]
    print("each once:", taken == list(range(50)), flush=True)
    pool.detach()
except sky.errors.PoolClosed as error:
    print("closed:", error, flush=True)
    pool.close()
print("left", flush=True)
"""


ELSEWHERE = """
import skyward as sky

try:
    with sky.ComputePool.attach(file="/root/train.pool", logs=False) as pool:
        (call,) = pool.calls()
        print(pool.future(call).result(60), sky.compute(abs)(-7) >> pool)
        raise ZeroDivisionError  # an error closes the pool, too
except (sky.errors.UsageError, ZeroDivisionError) as error:
    print(error)
"""
"""Program on another host, with an older version of skyward."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """Program that has opened a detached pool."""

    process: subprocess.Popen[str]
    place: Place

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def client_of(place: Callable[[int], Place], runtime: Path, state: None) -> Iterator[Callable[..., Client]]:
    """Return a function that starts a program with a detached pool on one host, and waits until its calls run."""
    here, clients = place(1), list[subprocess.Popen[str]]()
    script = runtime / "client.py"
    script.write_text(PROGRAM)

    def start(for_s: float = 600.0) -> Client:
        process = subprocess.Popen(
            [sys.executable, script, here.hosts[0].name, here.bed.ssh_config, here.index.simple, str(for_s)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        clients.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return Client(process=process, place=here)

    try:
        yield start
    finally:
        for process in clients:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for pool in detached.detached_pools():
            if not pool.has_ended:
                main(["down", pool.pool, "--yes"])
        here.hosts[0].run("rm", "-f", "/root/go", "/root/ran", "/root/failed")
        for pid in [pid for found in client_processes(runtime).values() for pid in found]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    nothing_runs_on(here.hosts)
    here.hosts[0].run("sh", "-c", "rm -f /tmp/skyward-0/*.ended")  # last words stay, and others look for what is left


def test_calls_of_a_killed_client_are_taken_once_by_the_next_and_by_an_older_one_on_another_host(
    client_of: Callable[..., Client],
    place: Callable[[int], Place],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = client_of()
    host = client.place.hosts[0]
    client.kill()
    host.write("/root/go", "")
    lines: list[LogLine] = []
    pool = sky.ComputePool.attach("train", logs=lines.append)
    calls = pool.calls()
    assert sorted(call.name for call in calls) == ["count", "fails", "wait", "wait"]
    by_name = {call.name: call for call in calls}
    values = [pool.future(call).result(60) for call in calls if call.name == "wait"]
    assert values == [2, 3]
    with pytest.raises(LookupError, match="of the call"):
        pool.future(by_name["fails"]).result(60)
    assert list(pool.future(by_name["count"]).result(60)) == list(range(3, 100))
    assert sky.compute(abs)(-5) >> pool == 5, "new calls work"
    until(lambda: not pool.calls())
    with pytest.raises(UsageError, match="its value was taken"):
        pool.future(by_name["fails"])
    many = [sky.compute(abs)(n) > pool for n in range(2000)]
    until(lambda: all(future.done() for future in many))
    assert main(["ps", "train"]) == 0
    assert "and 1500 more\n" in capsys.readouterr().out
    assert [future.result() for future in many] == list(range(2000))
    unread: list[sky.Future[Any]] = [sky.compute(abs)(-6) > pool, sky.compute(timeout_s=0.5)(time.sleep)(60) > pool]
    until(lambda: all(future.done() for future in unread))
    pool.detach()
    pool = sky.ComputePool.attach("train")
    (late,) = [call for call in pool.calls() if call.name == "sleep"]
    with pytest.raises(TaskTimeout):
        pool.future(late).result(60)
    until(lambda: [call.name for call in pool.calls()] == ["abs"])
    pool.detach()
    texts = [line.text for line in lines]
    assert "went on 3" in texts
    shown = [int(text.split()[1]) for text in texts if text.startswith("item")]
    assert shown == list(range(shown[0], 100))
    assert main(["ps", "train", "--export", str(tmp_path / "train.pool")]) == 0
    elsewhere, bed, home = place(2).hosts[1], client.place.bed, "/root/.ssh"
    elsewhere.write("/root/train.pool", (tmp_path / "train.pool").read_text(), mode=0o600)
    elsewhere.write(f"{home}/key", bed.key_file.read_text(), mode=0o600)
    elsewhere.write(f"{home}/known_hosts", bed.known_hosts.read_text())
    config = bed.ssh_config.read_text().replace(str(bed.key_file), f"{home}/key")
    elsewhere.write(f"{home}/config", config.replace(str(bed.known_hosts), f"{home}/known_hosts"))
    try:
        refused, told = (_told_by_an_older_version(elsewhere, versions) for versions in (2, 1))
    finally:
        files = [f"{home}/{name}" for name in ("key", "known_hosts", "config")]
        elsewhere.run("rm", "-rf", "/root/train.pool", "/root/older", *files)
    advice = rf"which does not fit 0\.0\.8 of this program; install skyward=={re.escape(sky.__version__)} here\n"
    assert re.fullmatch(rf"pool='train-\w+': its head runs skyward {re.escape(sky.__version__)}, {advice}", refused)
    assert told == "6 7\n\n"
    nothing_runs_on([*client.place.hosts, elsewhere])
    with pytest.raises(UsageError, match="ended on .* because its program closed it"):
        sky.ComputePool.attach("train")


def test_one_client_has_the_pool_until_another_takes_it_over(
    client_of: Callable[..., Client], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    client = client_of()
    host = client.place.hosts[0]
    with pytest.raises(UsageError, match=rf"process {client.process.pid} \(client.py\) .* has it .*take_over=True"):
        sky.ComputePool.attach("train")
    assert main(["ps", "train"]) == 0
    shown = capsys.readouterr().out
    assert "running" in shown
    assert f"its client is process {client.process.pid}" in shown
    with pytest.raises(UsageError, match="a detached pool of that name was opened .* ago"):
        sky.ComputePool(client.place.ssh(), name="train", detached_for_s=60, image=client.place.image).start()

    pool = sky.ComputePool.attach("train", take_over=True, logs=False)
    assert client.process.stdout is not None
    assert "another client has taken it over, process" in client.process.stdout.readline()
    assert client.process.stdout.readline() == "left\n"
    client.process.wait(60)
    assert pids(host, "head"), "the program that lost the pool ended nothing of it"
    calls = {call.name: call for call in pool.calls() if call.state == "running"}
    assert calls.keys() == {"count", "wait"}
    pool.future(calls["count"]).result().close()
    future = pool.future(calls["wait"])
    assert (calls["wait"].id, calls["wait"].node) == (future.call_id, 0)
    assert 0 < time.time() - calls["wait"].since < 600
    pool.extend(1000.0)
    pool.detach()
    with pytest.raises(PoolClosed, match="this program has left it"):
        future.result(60)

    file = tmp_path / "train.pool"
    assert main(["ps", "train", "--export", str(file)]) == 0
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
        there = sky.ComputePool.attach(file=file, logs=False)
        assert {call.name for call in there.calls()} >= {"wait"}
        there.detach()

    capsys.readouterr()
    assert main(["ps", "train", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert asdict(calls["wait"]) in told["calls"]
    assert told["left_s"] > 1000.0
    assert main(["ls", "--local"]) == 0
    assert "detached" in capsys.readouterr().out
    assert main(["gc", "--local"]) == 0
    assert pids(host, "head"), "gc leaves detached pools alone"
    capsys.readouterr()
    host.write("/root/go", "")
    assert main(["attach", "train"]) == 0  # ends with the last call
    assert "went on 3" in capsys.readouterr().out
    assert main(["down", "train", "--yes"]) == 0
    nothing_runs_on(client.place.hosts)
    capsys.readouterr()
    assert main(["ps", "train"]) == 1
    assert "because of `skyward down`" in capsys.readouterr().err


def _told_by_an_older_version(host: Host, versions: int) -> str:
    """Install a version on a host that is older by this number, run the program there, and return what it prints."""
    for wheel in (own_wheel(), repacked("cloudpickle"), repacked("xxhash")):
        assert wheel is not None
        with zipfile.ZipFile(io.BytesIO(wheel.content)) as archive:
            archive.extractall(host.path("/root/older"))
    frames = host.path("/root/older/skyward/wire/frames.py")
    protocol = f"PROTOCOL_VERSION = {PROTOCOL_VERSION - versions}\n"
    text, count = re.subn(r"^PROTOCOL_VERSION = .*\n", protocol, frames.read_text(), flags=re.MULTILINE)
    assert count == 1
    frames.write_text(text)
    host.write("/root/older/skyward/_version.py", f'__version__ = "0.0.{10 - versions}"\n')
    folders = [f"XDG_{kind}_HOME=/root/older/{kind}" for kind in ("STATE", "CACHE")]
    # Without the compiled modules of the other version, which may have the same times.
    return host.run("env", "PYTHONPATH=/root/older", *folders, "python3", "-B", "-c", ELSEWHERE).stdout


def test_calls_outlive_a_head_that_is_killed(client_of: Callable[..., Client]) -> None:
    client = client_of()
    host = client.place.hosts[0]
    kill_head(host)
    host.write("/root/go", "")
    assert client.process.stdout is not None
    assert client.process.stdout.readline() == "value 3\n"
    assert client.process.stdout.readline() == "goes on: 2 5\n"
    assert client.process.stdout.readline() == "each once: True\n"
    assert client.process.stdout.readline() == "left\n"
    client.process.wait(60)
    kill_head(host)  # the second one goes on from the journal of the first
    pool = sky.ComputePool.attach("train", logs=False)
    calls = {(call.name, call.state): call for call in pool.calls()}
    assert calls.keys() == {("fails", "failed"), ("count", "running")}, "each value is taken once"
    host.run("rm", "/root/go")
    with pytest.raises(LookupError, match="of the call"):
        pool.future(calls["fails", "failed"]).result(60)
    numbers = pool.future(calls["count", "running"]).result(60)
    assert [next(numbers) for _ in range(10)] == list(range(50, 60))

    @sky.compute(timeout_s=100)  # such calls wait in the head, not on the node
    def run(data: bytes, number: int) -> bytes:
        import os
        import time

        with open("/root/ran", "a") as ledger:
            ledger.write(f"{number} ")
        done = sky.counter("done")
        if number == 0:
            done.increment()
        elif number == 1:  # the program has it
            with contextlib.suppress(StateLost):
                sky.lock("held").acquire()
        while number < 3 and not os.path.exists("/root/go"):
            time.sleep(0.01)
        if number == 0:
            with contextlib.suppress(StateLost):
                done.increment()
            sky.counter("done again").increment()
        return data + bytes([number])

    kept = sky.compute(bytes)(1_000_000).keep() >> pool

    @sky.compute(retries=1, retry_on=LookupError, retry_delay_s=3.0)
    def fail() -> None:
        with open("/root/failed", "a") as ledger:
            ledger.write("x")
        raise LookupError("of each run")

    data = os.urandom(3_000_000)
    held = pool.lock("held")
    held.acquire()
    ledger, runs = host.path("/root/ran"), host.path("/root/failed")
    failed = fail() > pool
    until(lambda: runs.exists() and runs.read_text().startswith("x"))  # before all slots are taken
    futures = [run.with_options(retries=int(number == 2))(data, number) > pool for number in range(8)]
    waiting = pool.queue("numbers")
    waiting.put(0)
    assert waiting.get() == 0, "so it is as new when the head is killed"
    until(lambda: int(pool.counter("done")) == 1)
    until(lambda: ledger.exists() and sorted(ledger.read_text().split()) == ["0", "1", "2"])
    kill_head(host)  # the client goes on by itself, and the calls that run do
    host.write("/root/go", "")
    with pool:
        assert [future.result(60) for future in futures] == [data + bytes([number]) for number in range(8)]
        assert list(numbers) == list(range(60, 100))
        with pytest.raises(LookupError, match="of each run"):
            failed.result(60)
        assert runs.read_text() == "xx", "the retry was counted before the head was killed, and ran once"
        for refused in (held.release, pool.counter("done").increment):
            with pytest.raises(StateLost, match=r": was lost with the head of the pool; use another name"):
                refused()
        assert int(pool.counter("done again")) == 1
        waiting.put(1)
        assert waiting.get() == 1
        for use in (kept.get, lambda: sky.compute(len)(kept) >> pool):
            with pytest.raises(RefLost, match=r"the head of the pool was killed, .*; make the value again"):
                use()
        assert pool.map(abs, range(-100, 0)) == list(range(100, 0, -1))
    assert sorted(ledger.read_text().split()) == [str(number) for number in range(8)], "nothing ran twice"


def test_calls_of_a_program_know_that_the_head_is_lost_with_its_machine(
    place: Callable[[int], Place], state: None, capsys: pytest.CaptureFixture[str]
) -> None:
    here = place(1)
    (host,) = here.hosts
    pool = sky.ComputePool(here.ssh(), name="train", detached_for_s=600.0, image=here.image, logs=False).start()
    waiting = sky.compute(time.sleep).with_options(retries=3)(600) > pool
    until(waiting.running)
    (call,) = pool.calls()
    host.power_loss(is_silent=False)
    host.start().wait_ssh()
    with pytest.raises(
        HeadLost, match=r"head of the pool: is gone \(.*, and a detached pool ends with it; open the pool"
    ):
        waiting.result(60)
    for use in (lambda: pool.future(call), pool.calls, lambda: sky.compute(abs)(-1) >> pool, pool.detach):
        with pytest.raises(HeadLost):
            use()
    pool.close()
    assert main(["ps", "train"]) == 1
    assert "because its head was lost (" in capsys.readouterr().err
    nothing_runs_on([host])


def test_detach_is_refused_until_the_head_has_all_calls(place: Callable[[int], Place], state: None) -> None:
    here, go = place(1), f"/run/go-{time.monotonic_ns()}"
    (host,) = here.hosts

    @sky.compute
    def wait(path: str, data: bytes) -> int:
        while not os.path.exists(path):
            time.sleep(0.01)
        return len(data)

    with sky.ComputePool(here.ssh(), name="train", detached_for_s=600.0, image=here.image, logs=False) as pool:
        assert sky.compute(abs)(-1) >> pool == 1
        (head,) = pids(host, "head")
        with stopped(head.outside_pid):
            waiting = wait(go, os.urandom(3_000_000)) > pool
            with pytest.raises(UsageError, match=r"because its head does not have all calls after 1.0 s; call it"):
                pool._life.detach(limit_s=1.0)  # private: users wait for longer
        pool.detach()
    with pytest.raises(PoolClosed):
        waiting.result(60)
    with sky.ComputePool.attach("train", logs=False) as pool:
        (call,) = pool.calls()
        host.write(go, "")
        assert pool.future(call).result(60) == 3_000_000
    nothing_runs_on([host])
    host.run("rm", go)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_full_disks_refuse_new_calls_and_lose_none(place: Callable[[int], Place], state: None) -> None:
    """The journal of the head, the spool of the agent and the values that stay find no room."""
    here, size, go = place(1), 20_000_000, f"/run/go-{time.monotonic_ns()}"
    (host,) = here.hosts

    @sky.compute
    def wait(path: str, size: int) -> bytes:
        while not os.path.exists(path):
            time.sleep(0.01)
        return b"x" * size

    options: dict[str, Any] = {"image": here.image, "nodes": 1, "concurrency": 4, "logs": False}
    with sky.ComputePool(here.ssh(), name="full", detached_for_s=600.0, **options) as pool:
        kept = sky.compute(bytes)(size).keep() >> pool
        small, large, keeps = wait(go, 10) > pool, wait(go, size) > pool, wait(go, size).keep() > pool
        later = wait(f"{go}-2", 20) > pool
        until(lambda: all(future.running() for future in (small, large, keeps, later)))
        with host.disk_full("/tmp"), host.disk_full("/dev/shm"), host.disk_full("/"):
            with pytest.raises(UsageError, match=r"journal .* cannot be written .* free disk space"):
                sky.compute(len)(bytes(200_000)) >> pool
            host.write(go, "")
            assert [len(small.result(60)), len(large.result(60))] == [10, size]
            assert [len(ref.get()) for ref in (keeps.result(60), kept)] == [size, size]
            kill_head(host)
            host.write(f"{go}-2", "")
            assert len(later.result(60)) == 20
        assert sky.compute(len)(b"more") >> pool == 4
        assert pool.calls() == []
    nothing_runs_on([host])
    host.run("sh", "-c", f"rm -f {go}* /tmp/skyward-0/*.ended")


def test_a_pool_that_nobody_attaches_to_ends_by_itself(client_of: Callable[..., Client]) -> None:
    client = client_of(for_s=2.0)
    client.kill()
    nothing_runs_on(client.place.hosts, 2.0 + EPSILON_S)
    with pytest.raises(UsageError, match=r"ended on .*, because no client came for 2\.0 s; open"):
        sky.ComputePool.attach("train")
