"""Imports of the process that tests fork their ranks from. Its forks look through none of them for garbage."""

import gc

gc.disable()

import pytest  # noqa: E402, F401
import torch._dynamo  # noqa: E402
import torch.distributed  # noqa: E402, F401

import skyward.training.checkpoint  # noqa: E402, F401

gc.enable()
gc.freeze()
