"""Gangs with a rank that hangs or fails: real process groups between real processes."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import skyward as sky
from skyward.errors import GangHung, ResultNotPicklable, SlotLost, TaskExited, TaskTimeout, UsageError
from skyward.pool.pool import ComputePool
from skyward.testing import Faults
from tests.few_modules import lean_frameworks
from tests.waiting import until, until_text


class Lines(list[sky.LogLine]):
    """Output lines in order. `text` holds the output of the calls and the reports about them."""

    @property
    def text(self) -> str:
        return "".join(f"{line.text}\n" for line in self)


@pytest.fixture(scope="module")
def lines() -> Lines:
    return Lines()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that keeps the output of ranks."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def pool(lines: Lines, files: Path) -> Iterator[ComputePool]:
    """Open one pool for the whole file, so that its nodes import torch once."""
    keep = sky.LogFiles(files, echo=False)

    def sink(line: sky.LogLine) -> None:
        lines.append(line)
        keep(line)

    with lean_frameworks(), sky.ComputePool(sky.Local(), nodes=2, logs=sink) as pool:
        gang(dist.barrier)() @ pool  # torch is imported: from here on seconds can be counted
        yield pool
    keep.close()


def gang(function: Callable[..., Any], **options: Any) -> sky.ComputeFunction[..., Any]:
    made: sky.ComputeFunction[..., Any] = sky.compute(sky.integrations.torch(function)).with_options(**options)
    return made


# Hangs ------------------------------------------------------------------------------------------------------------


def hang_of(
    pool: ComputePool, train: Callable[[], Any], is_found: Callable[[GangHung], bool], limit_s: float = 1
) -> GangHung:
    """Return the error of a gang that hangs.

    On a busy machine a rank may be late for its hang. Then the limit is too short, and a longer one is tried.
    """
    with pytest.raises(GangHung) as raised:
        gang(train, hang_timeout_s=limit_s)() @ pool
    if is_found(raised.value) or limit_s >= 16:
        return raised.value
    return hang_of(pool, train, is_found, 4 * limit_s)


def sleeps() -> None:
    time.sleep(600)


def loops() -> None:
    while True:
        sum(range(1000))


def waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def holds_the_gil() -> None:
    pow(3, 10**9)  # one call in C: it lasts for minutes, and lets no other thread run


@pytest.mark.parametrize("way", [sleeps, loops, waits_for_a_lock, holds_the_gil], ids=lambda way: way.__name__)
def test_a_missing_rank_is_named_with_the_stacks_of_all(pool: ComputePool, way: Callable[[], None]) -> None:
    def train() -> None:
        if dist.get_rank() == 1:
            way()
        dist.all_reduce(torch.ones(1))

    begin = time.monotonic()
    error = hang_of(pool, train, lambda error: f"in {way.__name__}" in error.stacks.get(1, ""))
    assert time.monotonic() - begin < 60
    assert "rank 1 (node 1) is in no collective" in str(error)
    assert (error.ranks, error.waiting) == ((1,), (0,))
    assert 1 <= error.waited_s < 60
    assert "rank 0 (node 0) in all_reduce" in str(error)
    assert f"in {way.__name__}" in error.stacks[1]
    assert "in all_reduce" in error.stacks[0]
    assert all(stack in "\n".join(error.__notes__) for stack in error.stacks.values())


def test_a_stopped_rank_is_named_without_a_stack(pool: ComputePool) -> None:
    def train() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))

    error = hang_of(pool, train, lambda error: "its process: T (stopped)" in str(error))
    assert "its process: T (stopped)" in str(error)
    assert error.ranks == (1,)
    assert "no stack available" in error.stacks[1]


def test_collectives_that_do_not_match_are_named(pool: ComputePool) -> None:
    def train() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        else:
            dist.recv(torch.ones(1), src=0)

    error = hang_of(pool, train, lambda error: error.ranks == ())
    assert error.ranks == ()
    assert "not in the same one" in str(error)
    assert "in all_reduce at" in str(error)
    assert "in recv at" in str(error)


def test_a_hang_in_the_gradients_of_ddp_is_found(pool: ComputePool) -> None:
    def train() -> None:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        for step in range(3):
            if step == 2 and dist.get_rank() == 1:
                sleeps()
            model(torch.ones(4, 2)).sum().backward()

    error = hang_of(pool, train, lambda error: "in backward at" in str(error))
    assert error.ranks == (1,)
    assert "in backward at" in str(error)


def test_a_slow_healthy_gang_is_left_alone(pool: ComputePool) -> None:
    """One rank waits for the other in every step.

    All steps together take longer than the limit, and so does computing.
    """

    def train(limit_s: float) -> float:
        total = torch.zeros(1)
        for step in range(8):
            if step % 2 == dist.get_rank():
                time.sleep(0.225 * limit_s)  # the other waits for this one, then this one for the other
            part = torch.ones(1)
            dist.all_reduce(part)
            total += part
        deadline = time.monotonic() + 1.5 * limit_s
        while time.monotonic() < deadline:  # both compute
            torch.ones(200, 200) @ torch.ones(200, 200)
        return total.item()

    try:
        assert gang(train, hang_timeout_s=2)(2.0) @ pool == [16.0, 16.0]
    except GangHung:  # one rank did not run for two seconds: the machine is busy
        assert gang(train, hang_timeout_s=12)(12.0) @ pool == [16.0, 16.0]


def test_without_a_limit_the_stacks_are_logged_once_and_the_gang_continues(
    pool: ComputePool, lines: Lines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(go: Path) -> float:
        total = torch.ones(1)
        if dist.get_rank() == 1:
            until(go.exists)
        dist.all_reduce(total)
        return total.item()

    monkeypatch.setattr("skyward.engine.gangs.REPORT_AFTER_S", 0.5)
    lines.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        trained = threads.submit(lambda: gang(train)(tmp_path / "go") @ pool)
        until(lambda: "skyward: The call keeps waiting" in lines.text or trained.done())
        (tmp_path / "go").touch()
        assert trained.result(60) == [2.0, 2.0]
    assert lines.text.count("skyward: 'train': hangs, because rank 1 (node 1) is in no collective") == 1
    assert "skyward: The call keeps waiting; set hang_timeout_s= to stop such a call." in lines.text
    assert {line.rank for line in lines} == {1}


def test_sleeping_ranks_are_not_taken_for_waiting_ones(pool: ComputePool) -> None:
    def idle() -> int:
        time.sleep(2.5)
        return 1

    assert gang(idle, hang_timeout_s=0.5)() @ pool == [1, 1]


# Failures ---------------------------------------------------------------------------------------------------------


def raises() -> None:
    raise ConnectionError("the disk is full")


def exits() -> None:
    os._exit(3)


def asks_to_exit() -> None:
    sys.exit(4)


def kills_itself() -> None:  # as the kernel does when memory runs out
    os.kill(os.getpid(), signal.SIGKILL)


def crashes() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def gives_up() -> None:
    os.abort()


@pytest.mark.parametrize(
    ("way", "kind", "said", "fields"),
    [
        (raises, ConnectionError, "the disk is full", {}),
        (exits, SlotLost, "exited with code 3", {"exit_code": 3, "signal": None, "node": 1}),
        (asks_to_exit, TaskExited, "sys.exit.4.", {"code": 4, "node": 1}),
        (kills_itself, SlotLost, r"\(SIGKILL\).*out-of-memory killer", {"signal": signal.SIGKILL, "node": 1}),
        (crashes, SlotLost, r"\(SIGSEGV\)", {"signal": signal.SIGSEGV, "node": 1}),
        (gives_up, SlotLost, r"\(SIGABRT\)", {"signal": signal.SIGABRT, "node": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_failure_names_the_rank_its_node_and_the_reason(
    pool: ComputePool, way: Callable[[], None], kind: type[Exception], said: str, fields: dict[str, Any]
) -> None:
    def train() -> None:
        print(f"rank {dist.get_rank()} was here", flush=True)  # its last words
        dist.barrier()
        if dist.get_rank() == 1:
            way()
        dist.all_reduce(torch.ones(1))

    begin = time.monotonic()
    with pytest.raises(kind, match=said) as raised:
        gang(train)() @ pool
    assert time.monotonic() - begin < 60
    assert {name: getattr(raised.value, name) for name in fields} == fields
    whole = "\n".join([str(raised.value), *raised.value.__notes__])
    assert "node 1" in whole
    assert "Rank 1 of 2 failed first" in whole
    assert "Last output of the task:\nrank 1 was here" in whole
    assert "rank 0 was here" not in whole


# Output -----------------------------------------------------------------------------------------------------------


def test_output_shows_its_rank_and_is_kept_for_each(pool: ComputePool, lines: Lines, files: Path) -> None:
    @sky.compute(name="speak up", max_restarts=1)
    @sky.integrations.torch(processes_per_node=2)
    def speak() -> None:
        info = sky.instance_info()
        assert info is not None
        print(f"rank {info.rank} on node {info.node}, start {info.restart_count}", flush=True)
        os.system("echo a subprocess >&2")
        dist.barrier()
        if info.restart_count == 0:
            raise ValueError

    lines.clear()
    speak() @ pool
    told = {(line.node, line.rank, line.stream, line.text) for line in lines if line.restart_count == 1}
    assert told == {(r // 2, r, "stdout", f"rank {r} on node {r // 2}, start 1") for r in range(4)} | {
        (r // 2, r, "stderr", "a subprocess") for r in range(4)
    }
    (call,) = {line.call for line in lines}
    folder = files / f"speak_up-{call}"
    assert len(list(folder.iterdir())) == 8
    for rank in range(4):
        first = (folder / f"rank-{rank}.log").read_text().splitlines()
        again = (folder / f"rank-{rank}.restart-1.log").read_text().splitlines()
        assert f"rank {rank} on node {rank // 2}, start 0" in first
        assert sorted(again) == ["a subprocess", f"rank {rank} on node {rank // 2}, start 1"]


# Starting again ---------------------------------------------------------------------------------------------------


def train_with_checkpoints(folder: Path, epochs: int, dies_in: int) -> tuple[int, list[int], float]:
    """Train a regression under DDP and save after each epoch.

    Rank 1 kills itself in epoch `dies_in` of the first start.

    Returns the number of the start, the epochs that this start trained, and the last loss.
    """
    info = sky.instance_info()
    assert info is not None
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == str(info.restart_count)
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(8, 2)
    y = x.sum(1, keepdim=True)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = 0
    if (folder / "checkpoint").exists():
        state = torch.load(folder / "checkpoint")
        first = state["epoch"] + 1
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    loss = torch.tensor(float("nan"))
    for epoch in range(first, epochs):
        if (epoch, info.restart_count, info.rank) == (dies_in, 0, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        mine_x, mine_y = sky.shard(x, y)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(mine_x), mine_y)
        loss.backward()
        optimizer.step()
        if sky.is_head:
            state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / "new")
            os.replace(folder / "new", folder / "checkpoint")
        dist.barrier()
    dist.all_reduce(loss)
    return info.restart_count, list(range(first, epochs)), loss.item() / 2


def test_a_training_whose_rank_was_killed_resumes_from_its_checkpoint(
    pool: ComputePool, lines: Lines, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    train = sky.compute(max_restarts=2)(sky.integrations.torch(seed=1)(train_with_checkpoints))
    undisturbed = train(whole, 5, -1) @ pool
    resumed = train(broken, 5, 2) @ pool
    assert [run[:2] for run in undisturbed] == [(0, [0, 1, 2, 3, 4])] * 2
    assert [run[:2] for run in resumed] == [(1, [2, 3, 4])] * 2
    assert resumed[0][2] == undisturbed[0][2]  # as if nothing had happened
    assert "is restarted after rank 1: SlotLost" in lines.text


def test_an_exhausted_budget_raises_the_cause_and_lists_every_start(pool: ComputePool) -> None:
    def fail() -> None:
        info = sky.instance_info()
        assert info is not None
        if dist.get_rank() == 1:
            raise ValueError(f"start {info.restart_count}")
        dist.barrier()

    with pytest.raises(ValueError, match="start 2") as raised:
        gang(fail, max_restarts=2)() @ pool
    (told,) = (note for note in raised.value.__notes__ if "was started" in note)
    assert told.splitlines() == [
        "The gang was started 3 times:",
        "  1: rank 1: ValueError: start 0",
        "  2: rank 1: ValueError: start 1",
        "  3: this error",
    ]


def test_a_gang_that_hung_is_started_again(pool: ComputePool) -> None:
    def train() -> int:
        info = sky.instance_info()
        assert info is not None
        if dist.get_rank() == info.restart_count == 0:
            sleeps()
        dist.barrier()
        return info.restart_count

    try:
        assert gang(train, max_restarts=1, hang_timeout_s=1)() @ pool == [1, 1]
    except GangHung:  # a rank of the second start came a second late: the machine is busy
        assert gang(train, max_restarts=1, hang_timeout_s=12)() @ pool == [1, 1]


def test_a_failure_that_would_repeat_starts_no_gang(pool: ComputePool, tmp_path: Path) -> None:
    def count(folder: Path, way: str) -> Any:
        info = sky.instance_info()
        assert info is not None
        (folder / f"{way}-{info.restart_count}-{info.rank}").touch()
        if way == "timeout":
            sleeps()
        return threading.Lock()

    with pytest.raises(TaskTimeout):
        gang(count, max_restarts=3, timeout_s=0.5)(tmp_path, "timeout") @ pool
    with pytest.raises(ResultNotPicklable):
        gang(count, max_restarts=3)(tmp_path, "result") @ pool
    assert not [path.name for path in tmp_path.iterdir() if "-0-" not in path.name]


def test_retries_are_only_for_losses(pool: ComputePool, tmp_path: Path) -> None:
    def fail() -> None:
        (tmp_path / str(os.getpid())).touch()
        dist.barrier()
        raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        gang(fail, retries=3)() @ pool
    assert len(list(tmp_path.iterdir())) == 2


def test_a_lost_node_is_replaced_and_the_gang_started_again(pool: ComputePool, tmp_path: Path) -> None:
    def train() -> int:
        info = sky.instance_info()
        assert info is not None
        if info.restart_count == 0:
            (tmp_path / f"rank-{info.rank}").touch()
            sleeps()
        dist.barrier()
        return info.restart_count

    faults = Faults(pool)
    future = concurrent.futures.ThreadPoolExecutor(1).submit(lambda: gang(train, max_restarts=1)() @ pool)
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    faults.kill_node(1)
    assert future.result(60) == [1, 1]
    faults.wait_until_whole()


@pytest.mark.parametrize("options", [{"max_restarts": 1}, {"hang_timeout_s": 5.0}])
def test_a_plain_call_has_no_ranks_to_start_again(pool: ComputePool, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(options))}=.*: 'abs' uses no integration"):
        sky.compute(abs)(-1).with_options(**options) >> pool
    with pytest.raises(UsageError, match=f"{next(iter(options))}=.*: 'abs' uses no integration"):
        pool.map(sky.compute(**options)(abs), [-1])


@pytest.mark.parametrize(
    "options", [{"max_restarts": -1}, {"max_restarts": 1.0}, {"max_restarts": True}, {"hang_timeout_s": 0}]
)
def test_an_option_out_of_its_range_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        sky.compute(**options)


# Processes started by ranks ---------------------------------------------------------------------------------------


_kept: Any = None


def leave_processes(folder: Path) -> None:
    """Start processes as a training does, and the ones that are hardest to end. Each is a file with its process id."""

    def stay(name: str) -> None:
        (folder / f"{name}-{os.getpid()}").touch()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    def begin(_: int) -> None:
        (folder / f"worker-{os.getpid()}").touch()

    loader = torch.utils.data.DataLoader(range(8), num_workers=1, worker_init_fn=begin, persistent_workers=True)  # type: ignore[arg-type,var-annotated]
    global _kept
    _kept = iter(loader)
    next(_kept)
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (folder / f"session-{sleeper.pid}").touch()
    child = os.fork()
    if child == 0:  # a daemon: its parent ends at once, and it leads a session of its own
        os.setsid()
        if os.fork() == 0:
            if os.fork() == 0:
                stay("grandchild")
            stay("daemon")
        os._exit(0)
    os.waitpid(child, 0)
    until(lambda: len(list(folder.iterdir())) == 4)


@pytest.mark.parametrize("end", ["returns", "raises", "dies", "is killed", "is cancelled"])
def test_every_process_that_a_rank_started_ends_with_it(pool: ComputePool, tmp_path: Path, end: str) -> None:
    def train() -> None:
        leave_processes(tmp_path)
        (tmp_path / "all").write_text(str(os.getpid()))
        if end == "raises":
            raise ValueError
        if end == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if end in ("is killed", "is cancelled"):
            sleeps()

    future = gang(train)() > pool
    rank = int(until_text(tmp_path / "all"))
    (tmp_path / "all").unlink()
    if end == "is killed":
        os.kill(rank, signal.SIGKILL)
    if end == "is cancelled":
        future.cancel()
    else:
        future.exception(60)
    pids = [path.name.rpartition("-")[2] for path in tmp_path.iterdir()]
    assert len(pids) == 4
    until(lambda: not any(is_alive(pid) for pid in pids))


def is_alive(pid: str) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
        return False


# Exit handlers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_exit_handlers_of_a_rank_run(pool: ComputePool, lines: Lines, tmp_path: Path, end: str) -> None:
    def train() -> None:
        global _kept
        name = f"{end}-{dist.get_rank()}"
        _kept = tempfile.TemporaryDirectory(dir=tmp_path, prefix="scratch-")
        atexit.register((tmp_path / name).touch)
        atexit.register(print, f"handler of {name}")
        if end == "raises":
            raise ValueError

    names = [f"{end}-{rank}" for rank in range(2)]
    try:
        gang(train)() @ pool
    except ValueError:  # one is enough to stop the other rank
        until(lambda: any((tmp_path / name).exists() for name in names))
    else:
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        until(lambda: all(f"handler of {name}" in lines.text for name in names))


def test_an_exit_handler_that_hangs_has_the_time_limit_of_its_call(pool: ComputePool) -> None:
    def train() -> None:
        atexit.register(sleeps)

    with pytest.raises(TaskTimeout):
        gang(train, timeout_s=3)() @ pool


def test_a_failed_rank_ends_although_its_exit_handler_hangs(pool: ComputePool, tmp_path: Path) -> None:
    def train() -> None:
        (tmp_path / str(os.getpid())).touch()
        atexit.register(holds_the_gil)
        raise ValueError("no data")

    begin = time.monotonic()
    with pytest.raises(ValueError, match="no data"):
        gang(train)() >> pool
    assert time.monotonic() - begin < 60
    (rank,) = tmp_path.iterdir()
    until(lambda: not is_alive(rank.name))


# Leftovers in the processes of ranks ------------------------------------------------------------------------------


def test_nothing_of_a_call_is_left_for_the_next(pool: ComputePool, tmp_path: Path) -> None:
    """The leftovers would be in the process, or in modules that the ranks' common parent has imported."""

    def state() -> dict[str, Any]:
        return {
            "environment": {k: v for k, v in os.environ.items() if k != "MASTER_PORT"},
            "folder": os.getcwd(),
            "path": list(sys.path),
            "module": getattr(torch, "left_by_a_call", None),
            "dtype": str(torch.get_default_dtype()),
            "signal": str(signal.getsignal(signal.SIGUSR1)),
            "threads": [thread.name for thread in threading.enumerate()],
            "backend": dist.get_backend(),
            "once": sky.once("key", os.getpid) == os.getpid(),
            "mask": os.umask(0o022),
        }

    def spoil() -> int:
        os.environ["LEFT_BY_A_CALL"] = "1"
        del os.environ["RANK"]
        os.chdir(tmp_path)
        sys.path.insert(0, str(tmp_path))
        torch.left_by_a_call = 1  # type: ignore[attr-defined]
        torch.set_default_dtype(torch.float64)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        threading.Thread(target=sleeps, daemon=True).start()
        dist.new_group([0])
        os.umask(0o077)
        return os.getpid()

    before = gang(state)() @ pool
    used = gang(spoil)() @ pool
    assert gang(state)() @ pool == before
    assert before[0]["module"] is None
    new = gang(os.getpid)() @ pool
    assert not set(used) & set(new)
    assert not {f"{pid}" for pid in used} & set(os.listdir("/proc"))
