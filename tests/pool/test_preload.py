"""Modules that a node imports once for all its slots."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.errors import UsageError

QUIET_MODULE = "xml.dom.minidom"
"""Of the standard library, and nothing of ours imports it."""


@sky.compute
def has(module: str) -> tuple[bool, int]:
    return module in sys.modules, os.getppid()


def in_both_slots(pool: sky.ComputePool, module: str) -> set[tuple[bool, int]]:
    return {has(module) >> pool for _ in range(4)}


def test_slots_have_the_modules_that_the_node_imported() -> None:
    with sky.ComputePool(sky.Local(), concurrency=2, preload=[QUIET_MODULE]) as pool:
        found = in_both_slots(pool, QUIET_MODULE)
    assert len(found) == 1  # forked from one process
    assert found.pop()[0]


def test_without_preload_they_do_not() -> None:
    with sky.ComputePool(sky.Local(), concurrency=2) as pool:
        assert {there for there, _ in in_both_slots(pool, QUIET_MODULE)} == {False}


def test_a_module_that_fails_to_import_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken_on_import.py").write_text("raise LookupError('not today')\n")
    image = sky.Image(includes=[str(tmp_path)])
    with sky.ComputePool(sky.Local(), image=image, preload=["broken_on_import", "absent", QUIET_MODULE]) as pool:
        assert {there for there, _ in in_both_slots(pool, QUIET_MODULE)} == {True}


def test_a_module_that_starts_a_thread_makes_slots_start_without_a_fork(tmp_path: Path) -> None:
    (tmp_path / "threaded_on_import.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    image = sky.Image(includes=[str(tmp_path)])
    with sky.ComputePool(sky.Local(), concurrency=2, image=image, preload=["threaded_on_import"]) as pool:
        assert {there for there, _ in in_both_slots(pool, "threaded_on_import")} == {False}


@sky.compute
def numeric_threads(_: int) -> dict[str, int]:
    import threadpoolctl

    return {found["internal_api"]: found["num_threads"] for found in threadpoolctl.threadpool_info()}


@pytest.mark.parametrize("count", ["1", "3"])
def test_libraries_use_the_number_of_threads_in_the_environment(count: str) -> None:
    pytest.importorskip("sklearn")  # brings an OpenMP library
    image = sky.Image(env=dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count))
    with sky.ComputePool(sky.Local(), image=image, preload=["sklearn.utils._openmp_helpers"]) as pool:
        found = numeric_threads(0) >> pool
    assert found == {"openblas": int(count), "openmp": int(count)}


@sky.compute
def draw() -> tuple[Any, ...]:
    import numpy as np

    return os.getpid(), int(np.random.default_rng().integers(2**60)), int(np.random.randint(2**60))


def test_slots_draw_their_own_random_numbers() -> None:
    with sky.ComputePool(sky.Local(), nodes=2, preload=["numpy"]) as pool:
        drawn = [draw() >> pool for _ in range(2)] + list((draw() & draw()) >> pool)
    assert len({modern for _, modern, _ in drawn}) == len({old for _, _, old in drawn}) == 4


def test_one_name_instead_of_a_list_is_refused() -> None:
    with pytest.raises(UsageError, match="preload"):
        sky.ComputePool(sky.Local(), preload="numpy")
