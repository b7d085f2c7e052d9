"""Diagnosis of a gang that is stuck, from the stacks of its ranks."""

from __future__ import annotations

import pytest

from skyward.engine.hangs import Hang, RankStack, read_stack

SITE = "/env/lib/python3.11/site-packages"
OURS = f"""\
  File "{SITE}/skyward/integrations/base.py", line 97 in run
  File "{SITE}/skyward/node/slot/execute.py", line 140 in _run_call
  File "{SITE}/skyward/node/slot/zygote.py", line 200 in become_slot
"""
ALL_REDUCE = f"""\
  File "{SITE}/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{SITE}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/ada/train.py", line 10 in step
  File "/home/ada/train.py", line 20 in train
"""
BACKWARD = f"""\
  File "{SITE}/torch/autograd/graph.py", line 865 in _engine_run_backward
  File "{SITE}/torch/autograd/__init__.py", line 347 in backward
  File "{SITE}/torch/_tensor.py", line 648 in backward
  File "/home/ada/train.py", line 12 in step
"""
LOADER = f"""\
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "{SITE}/torch/utils/data/dataloader.py", line 1400 in _get_data
  File "/home/ada/train.py", line 8 in train
"""
MEETING = f"""\
  File "{SITE}/torch/distributed/distributed_c10d.py", line 5000 in barrier
  File "{SITE}/skyward/integrations/torch.py", line 210 in _open_group
  File "/usr/lib/python3.11/contextlib.py", line 137 in __enter__
  File "{SITE}/skyward/integrations/base.py", line 90 in _session
"""
LOAD = f"""\
  File "{SITE}/torch/serialization.py", line 500 in _open_zipfile_reader
  File "{SITE}/torch/serialization.py", line 1500 in load
  File "/home/ada/train.py", line 5 in train
"""
SLEEP = '  File "/home/ada/train.py", line 15 in load\n  File "/home/ada/train.py", line 19 in train\n'


def stack(rank: int, frames: str, state: str = "S (sleeping)") -> RankStack:
    return read_stack(rank, rank // 2, f"Stack (most recent call first):\n{frames}{OURS}", state)


@pytest.mark.parametrize(
    ("frames", "collective"),
    [
        (ALL_REDUCE, "all_reduce"),
        (BACKWARD, "backward"),
        (LOADER, ""),
        (LOAD, ""),
        (SLEEP, ""),
        (MEETING, ""),
        ("", ""),
    ],
)
def test_a_collective_is_told_apart_from_other_waits(frames: str, collective: str) -> None:
    assert stack(0, frames).waits_in == collective


def test_a_wait_in_the_users_own_line_counts(tmp_path: object) -> None:
    path = f"{tmp_path}/train.py"
    with open(path, "w") as file:
        file.write("work = dist.all_reduce(x, async_op=True)\nwork.wait()\nprint(x)\n")
    for line, collective in ((1, ""), (2, "wait"), (3, "")):
        assert stack(0, f'  File "{path}", line {line} in train\n').waits_in == collective


def test_the_rank_outside_the_collective_is_named_with_its_line() -> None:
    hang = Hang(first=stack(0, ALL_REDUCE), waited_s=30.4, asked={0, 1, 2, 3})
    for rank, frames in enumerate((ALL_REDUCE, ALL_REDUCE, SLEEP, ALL_REDUCE)):
        hang.add(stack(rank, frames))
    error = hang.error("train")
    assert (error.ranks, error.waiting, error.waited_s) == ((2,), (0, 1, 3), 30.4)
    assert "rank 2 (node 1) is in no collective, but at train.py:15 in load" in str(error)
    assert "rank 0 (node 0) in all_reduce at train.py:10 in step" in str(error)
    assert "for 30 s" in str(error)
    assert len(error.__notes__) == 4
    assert error.__notes__[0].splitlines() == [
        "Rank 2 (node 1) is in no collective; its process: S (sleeping)",
        '  File "/home/ada/train.py", line 19, in train',
        '  File "/home/ada/train.py", line 15, in load',
    ]


def test_the_line_is_the_users_even_if_a_trainer_waits() -> None:
    frames = ALL_REDUCE.replace("/home/ada/train.py", f"{SITE}/trainer/loop.py", 1)
    found = stack(0, frames)
    assert (found.waits_in, found.place) == ("all_reduce", "train.py:20 in train")


def test_mismatched_collectives_blame_no_single_rank() -> None:
    hang = Hang(first=stack(0, ALL_REDUCE), waited_s=5, asked={0, 1})
    hang.add(stack(0, ALL_REDUCE))
    hang.add(stack(1, BACKWARD))
    error = hang.error("train")
    assert error.ranks == ()
    assert "not in the same one" in str(error)
    assert "rank 1 (node 0) in backward at train.py:12 in step" in str(error)


def test_a_rank_that_has_returned_or_does_not_answer_is_named() -> None:
    hang = Hang(first=stack(0, ALL_REDUCE), waited_s=5, asked={0, 2, 3}, ended=(1,))
    hang.add(stack(0, ALL_REDUCE))
    hang.add(read_stack(3, 1, "", "T (stopped)"))
    error = hang.error("train")
    assert error.ranks == (1, 2, 3)
    assert "rank 1 has returned" in str(error)
    assert "rank 2 does not answer" in str(error)
    assert "its process: T (stopped)" in str(error)


def test_a_rank_that_moved_on_meanwhile_is_no_hang() -> None:
    hang = Hang(first=stack(0, ALL_REDUCE), waited_s=5, asked={0, 1})
    hang.add(stack(1, SLEEP))
    assert hang.is_real()
    hang.add(stack(0, SLEEP))
    assert not hang.is_real()


def test_the_main_thread_is_found_among_many() -> None:
    text = (
        'Thread 0x1 (most recent call first):\n  File "/env/tqdm/_monitor.py", line 60 in run\n\n'
        f"Current thread 0x2 (most recent call first):\n{ALL_REDUCE}{OURS}"
    )
    found = read_stack(0, 0, text, "S (sleeping)")
    assert found.waits_in == "all_reduce"
    assert "another thread:\n  File" in found.text()
    assert "skyward" not in found.text()


def test_a_users_project_in_a_folder_named_like_a_framework_is_the_users() -> None:
    text = SLEEP.replace("/home/ada/", "/home/ada/jax/")
    found = read_stack(0, 0, f"Stack (most recent call first):\n{text}{OURS}", "S (sleeping)")
    assert found.waits_in == ""
    assert found.place == "train.py:15 in load"
