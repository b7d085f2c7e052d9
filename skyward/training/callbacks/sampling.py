"""Text from a language model that trains: tokens one after another, and nothing of the training disturbed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..agree import Ranks
from ..parts import is_dtensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["Sampling", "context_length", "device_of", "logits_of", "sample", "undisturbed"]

CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "block_size", "context_length", "max_seq_len")
"""What models and their configs call the longest sequence that they take."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; the names are Hugging Face's.

    do_sample: draw from the distribution; False takes the likeliest token.
    temperature: > 0; what logits are divided by.
    top_k: draw among so many of the likeliest; 0 or None: among all.
    top_p: draw among the likeliest that have this probability together, in (0, 1].
    repetition_penalty: >= 1; logits of tokens that occur already are divided by it (multiplied where negative).
        Source: CTRL, arXiv 1909.05858, section 4.1.
    """

    do_sample: bool = True
    temperature: float = 0.7
    top_k: int | None = 20
    top_p: float = 1.0
    repetition_penalty: float = 1.15

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UsageError(
                f"generation_config: temperature is {self.temperature!r}; give one above 0, or do_sample=False"
            )
        if not 0 < self.top_p <= 1:
            raise UsageError(f"generation_config: top_p is {self.top_p!r}; give one above 0, at most 1")
        if self.top_k is not None and self.top_k < 0:
            raise UsageError(f"generation_config: top_k is {self.top_k!r}; give 0 or more")
        if not self.repetition_penalty > 0:
            raise UsageError(f"generation_config: repetition_penalty is {self.repetition_penalty!r}; give one above 0")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sampling:
        """Raises: UsageError for options that only Hugging Face's `generate` has."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(config) - known)
        if unknown:
            raise UsageError(
                f"generation_config: {', '.join(unknown)} needs a model with Hugging Face's generate(); for a plain "
                f"module there are {', '.join(sorted(known))}"
            )
        return cls(**config)

    def choose(self, logits: Tensor, seen: list[int], generator: torch.Generator) -> int:
        """The next token. logits: (vocabulary,) on the CPU; seen: the tokens so far."""
        import torch

        logits = logits.float()
        if self.repetition_penalty != 1:
            at = torch.tensor(sorted(set(seen)), dtype=torch.long)
            old = logits[at]
            logits = logits.index_copy(
                0, at, torch.where(old > 0, old / self.repetition_penalty, old * self.repetition_penalty)
            )
        if not self.do_sample:
            return int(logits.argmax())
        values, tokens = logits.sort(descending=True, stable=True)
        if self.top_k:
            values, tokens = values[: self.top_k], tokens[: self.top_k]
        chances = (values / self.temperature).softmax(0)
        # A token stays if those before it have not yet made up top_p: the first always does.
        chances = chances * (chances.cumsum(0) - chances < self.top_p)
        return int(tokens[torch.multinomial(chances, 1, generator=generator)])


def sample(
    next_logits: Callable[[list[int]], Tensor],
    prompt: list[int],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    end: int | None,
    generator: torch.Generator,
    ranks: Ranks,
) -> list[int]:
    """The tokens that follow `prompt`, up to and without `end`. Computes the whole sequence for each: no cache.

    All ranks compute logits; rank 0 chooses, and its token is everybody's.
    """
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        logits = next_logits(tokens)
        token = ranks.share(sampling.choose(logits.cpu(), tokens, generator) if ranks.rank == 0 else -1)
        if token == end:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def logits_of(output: Any) -> Tensor:
    """The logits (batch, time, vocabulary) in what a model returned: the tensor itself, `.logits`, `["logits"]`, or
    the first tensor of three dimensions in a tuple, as of (loss, logits).
    """
    found = output
    if isinstance(output, Mapping) and "logits" in output:
        found = output["logits"]
    elif hasattr(output, "logits"):
        found = output.logits
    elif isinstance(output, (tuple, list)):
        found = next((each for each in output if getattr(each, "ndim", 0) == 3), output)
    if getattr(found, "ndim", 0) != 3:
        raise UsageError(
            f"TextgenCallback: the model returned {type(output).__name__}, in which there are no logits of the shape "
            "(batch, time, vocabulary)"
        )
    # Tensor parallelism may leave each rank a part of the vocabulary.
    return found.full_tensor() if is_dtensor(found) else found  # type: ignore[no-any-return]  # it has ndim


def context_length(model: nn.Module) -> int | None:
    """How many tokens the model takes at most, where it or its config says so."""
    for holder in (getattr(model, "config", None), model):
        for name in CONTEXT_LENGTHS:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def device_of(model: nn.Module) -> torch.device:
    """Where its inputs go. Shards that wait on the CPU are computed on their mesh's device."""
    import torch

    parameter = next(model.parameters(), None)
    if parameter is None:
        return torch.device("cpu")
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.device_type == parameter.device.type:
        return parameter.device
    return torch.device(mesh.device_type)


@contextmanager
def undisturbed(model: nn.Module, *, seed: int) -> Iterator[None]:
    """In the block the model evaluates, eagerly, without gradients and with random numbers from `seed`; after it, and
    after an exception in it, everything is as before: each module's mode, compiled calls, and the random state of
    Python, numpy and torch, so that a run draws the same numbers with and without the block.
    """
    import torch

    modes = [(module, module.training) for module in model.modules()]
    # What model.compile() sets; texts of ever other lengths would compile ever again.
    compiled = [(module, call) for module in model.modules() if (call := getattr(module, "_compiled_call_impl", None))]
    try:
        model.eval()
        for module, _ in compiled:
            module._compiled_call_impl = None
        # Not inference_mode: a tensor that the model caches in it could never again be part of a backward pass.
        with _random_numbers_apart(model, seed), torch.no_grad():
            yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
        for module, mode in modes:
            module.training = mode


@contextmanager
def _random_numbers_apart(model: nn.Module, seed: int) -> Iterator[None]:
    import torch

    devices = {parameter.device for parameter in model.parameters()} | {device_of(model)}
    kinds = {device.type for device in devices} - {"cpu", "meta"}
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    of_python = random.getstate()
    of_torch = torch.random.get_rng_state()
    of_devices = {kind: _device_states(kind) for kind in kinds}
    try:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed devices that are not ours
        for kind in kinds:
            torch.get_device_module(kind).manual_seed_all(seed) if kind != "mps" else torch.mps.manual_seed(seed)
        yield
    finally:
        random.setstate(of_python)
        torch.random.set_rng_state(of_torch)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        for kind, state in of_devices.items():
            _set_device_states(kind, state)


def _device_states(kind: str) -> Any:
    import torch

    module = torch.get_device_module(kind)
    return module.get_rng_state() if kind == "mps" else module.get_rng_state_all()


def _set_device_states(kind: str, state: Any) -> None:
    import torch

    module = torch.get_device_module(kind)
    if kind == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state_all(state)
