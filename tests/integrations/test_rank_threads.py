"""Number of threads that the numeric libraries of a rank use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import pytest

import skyward as sky
from skyward.integrations.base import IntegrationBase, integrate
from skyward.values.topology import Rank

CORES = 12


@dataclass(frozen=True, kw_only=True)
class Bare(IntegrationBase):
    """Integration without a framework, whose ranks are forked from a process that has loaded numpy."""

    name: ClassVar[str] = "bare"
    extra: ClassVar[str] = "bare"
    packages: ClassVar[tuple[str, ...]] = ()
    preload: ClassVar[tuple[str, ...]] = ("numpy",)

    def session(self, rank: Rank) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


def threads() -> tuple[set[str | None], set[int]]:
    """Return the variables and the threads of the libraries."""
    import numpy as np
    from threadpoolctl import threadpool_info

    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    libraries = {info["num_threads"] for info in threadpool_info()}
    return {os.environ.get(name) for name in names}, libraries if np.ones(1).all() else set()


def threads_of_ranks(processes_per_node: int) -> sky.ComputeFunction[[], tuple[set[str | None], set[int]]]:
    return sky.compute(integrate(threads, Bare(processes_per_node=processes_per_node)))


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    """Open a pool on a machine that seems to have 12 cores: 6 for each node, 3 for each slot."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.endswith("_NUM_THREADS"):
                patch.delenv(name)
        patch.setattr(os, "cpu_count", lambda: CORES)
        with sky.ComputePool(sky.Local(), nodes=2, concurrency=2) as pool:
            yield pool


@pytest.mark.parametrize(("processes_per_node", "share"), [(1, 3), (2, 3), (3, 2), (6, 1), (7, 1)])
def test_ranks_share_the_cores_of_their_node(pool: sky.ComputePool, processes_per_node: int, share: int) -> None:
    assert threads_of_ranks(processes_per_node)() >> pool == ({str(share)}, {share})


@sky.compute
def torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def test_omp_num_threads_alone_counts_for_every_library() -> None:
    with sky.ComputePool(sky.Local(), nodes=2, image=sky.Image(env={"OMP_NUM_THREADS": "2"})) as pool:
        assert torch_threads() >> pool == 2  # MKL's own variable would come first
        assert threads_of_ranks(3)() >> pool == ({"2", None}, {2})


def test_the_users_choices_stay_whatever_the_number_of_ranks() -> None:
    chosen = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "2")
    with sky.ComputePool(sky.Local(), nodes=1, image=sky.Image(env=chosen)) as pool:
        assert threads_of_ranks(3)() >> pool == ({"2"}, {2})
