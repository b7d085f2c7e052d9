"""Random numbers for an evaluation in a thread of the training process, separate from training's.

Generators belong to the process, not to a thread. A sampler or a new layer in an evaluation would change the numbers
that training draws next, depending on timing. Here, functions that accept a generator get one of the evaluation's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FUNCTIONS = ("bernoulli", "multinomial", "normal", "poisson", "rand", "randint", "randn", "randperm")
_METHODS = (
    "bernoulli",
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "normal_",
    "random_",
    "uniform_",
)
_INITS = (
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "orthogonal_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
)
_TAKES = frozenset((*_FUNCTIONS, *_METHODS, *_INITS))
"""Compared by name, because transformers replaces functions in torch.nn.init while it makes a model."""
_LIKE = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}


class OwnGenerators(TorchFunctionMode):
    """Let torch draw from separate generators in this thread, inside a `with` block.

    They start as if `torch.manual_seed` had just been called with the last seed, so a factory that seeds gets the usual
    numbers. Not covered: `torch.manual_seed`, dropout of a model in training mode, and the generators of Python and
    numpy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[torch.device, torch.Generator] = {}
        self._seed = torch.initial_seed()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LIKE:
            return self._like(func, *args, **kwargs)
        if getattr(func, "__name__", "") in _TAKES and kwargs.get("generator") is None:
            device = _device_of(args, kwargs)
            if device.type != "meta":
                kwargs = {**kwargs, "generator": self._generator(device)}
        return func(*args, **kwargs)

    def _like(self, func: Any, tensor: Any, **kwargs: Any) -> Any:
        options = {"dtype": tensor.dtype, "device": tensor.device, **kwargs}
        device = torch.device(options["device"])
        if options.pop("memory_format", None) is not None or device.type == "meta":
            return func(tensor, **kwargs)
        return _LIKE[func](tensor.shape, generator=self._generator(device), **options)

    def _generator(self, device: torch.device) -> torch.Generator:
        seed = torch.initial_seed()
        if seed != self._seed:
            self._seed, self._made = seed, {}
        if device not in self._made:
            self._made[device] = torch.Generator(device).manual_seed(seed)
        return self._made[device]


def _device_of(args: Any, kwargs: Any) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    for argument in (*args, kwargs.get("tensor"), kwargs.get("input"), kwargs.get("mean")):
        if isinstance(argument, torch.Tensor):
            return argument.device
    return torch.get_default_device()
