"""Imports of the process that tests fork their ranks from. Its forks look through none of them for garbage.

They compile nothing, so they do without torch's compiler: a fork of the smaller process takes a third less.
"""

import gc

gc.disable()

from tests.few_modules import lean_frameworks  # noqa: E402

with lean_frameworks():
    import numpy.random  # noqa: F401 (a save imports it, and torch.utils.serialization)
    import torch._dynamo
    import torch.distributed
    import torch.utils.serialization.config  # noqa: F401

    import skyward.training.checkpoint  # noqa: F401

gc.enable()
gc.freeze()
