"""Unused functions are forgotten: a notebook that makes new functions for hours must not fill the nodes."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

import skyward as sky

_KEPT = 512
"""Blobs that stay on a node beyond their calls, those of functions among them (skyward.engine.link)."""


def weighing(number: int) -> Callable[[], int]:
    data = np.full(40_000, number, dtype=np.float64)  # 320 KB: a blob, and so a descriptor on the node
    return lambda: int(data[0])


def test_unused_functions_are_forgotten_and_sent_again_when_needed() -> None:
    with sky.ComputePool(sky.Local(), nodes=1, logs=False) as pool:
        (agent,) = pool.agent_pids().values()
        functions = [weighing(i) for i in range(_KEPT + 90)]
        before = len(os.listdir(f"/proc/{agent}/fd"))
        for i, function in enumerate(functions):
            assert sky.compute(function)() >> pool == i
        assert len(os.listdir(f"/proc/{agent}/fd")) - before <= _KEPT + 20
        assert sky.compute(functions[0])() >> pool == 0
