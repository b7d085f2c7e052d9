"""Token-by-token sampling from a language model in training, without side effects on the training."""

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

CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "block_size", "context_length", "max_seq_len")
"""Names under which models and their configs store the longest sequence that they accept."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Rules to choose the next token, under Hugging Face's names.

    Args:
        do_sample: draw from the distribution; False takes the most likely token.
        temperature: divisor of the logits, above 0.
        top_k: draw from this many most likely tokens; 0 or None means all.
        top_p: draw from the most likely tokens whose probabilities add up to this, in (0, 1].
        repetition_penalty: divisor of the logits of tokens that occurred before, above 0; negative logits are
            multiplied. 1 turns it off. Source: CTRL, arXiv 1909.05858, section 4.1.

    Raises:
        UsageError: a value is out of its range.
    """

    do_sample: bool = True
    temperature: float = 0.7
    top_k: int | None = 20
    top_p: float = 1.0
    repetition_penalty: float = 1.15

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UsageError(
                f"generation_config.temperature={self.temperature!r}: must be above 0; "
                "raise it, or set do_sample=False for the most likely token"
            )
        if not 0 < self.top_p <= 1:
            raise UsageError(
                f"generation_config.top_p={self.top_p!r}: must be above 0 and at most 1; set 1 for all tokens"
            )
        if self.top_k is not None and self.top_k < 0:
            raise UsageError(f"generation_config.top_k={self.top_k!r}: must be at least 0; set 0 for all tokens")
        if not self.repetition_penalty > 0:
            raise UsageError(
                f"generation_config.repetition_penalty={self.repetition_penalty!r}: must be above 0; set 1 for none"
            )

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sampling:
        """Build from a mapping; raise UsageError for options that only Hugging Face's `generate` has."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(config) - known)
        if unknown:
            raise UsageError(
                f"generation_config: {', '.join(unknown)} needs a model with Hugging Face's generate(); "
                f"for a plain module use {', '.join(sorted(known))}"
            )
        return cls(**config)

    def choose(self, logits: Tensor, seen: list[int], generator: torch.Generator) -> int:
        """Choose the next token from `logits` (vocabulary,), on the CPU, after the tokens `seen`."""
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
        # A token stays if the tokens before it do not reach top_p yet, so the first one always stays.
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
    """Return the tokens that follow `prompt`, up to `end` and without it.

    Each token computes the whole sequence; there is no cache. All ranks compute logits, rank 0 chooses, and every rank
    continues with its token.
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
    """Return the logits (batch, time, vocabulary) from a model's output.

    They are the output itself, `.logits`, `["logits"]`, or the first tensor with three dimensions in a tuple, such as
    (loss, logits).

    Raises:
        UsageError: the output has no such tensor.
    """
    logits = output
    if isinstance(output, Mapping) and "logits" in output:
        logits = output["logits"]
    elif hasattr(output, "logits"):
        logits = output.logits
    elif isinstance(output, (tuple, list)):
        logits = next((item for item in output if getattr(item, "ndim", 0) == 3), output)
    if getattr(logits, "ndim", 0) != 3:
        raise UsageError(
            f"TextgenCallback: the model returned {type(output).__name__}, with no logits of the shape "
            "(batch, time, vocabulary); return them as a tensor, .logits, ['logits'] or in a tuple"
        )
    # Tensor parallelism may leave each rank a part of the vocabulary.
    return logits.full_tensor() if is_dtensor(logits) else logits  # type: ignore[no-any-return]  # it has ndim


def context_length(model: nn.Module) -> int | None:
    """Return the longest sequence that the model accepts, from its config or itself; None if neither has it."""
    for holder in (getattr(model, "config", None), model):
        for name in CONTEXT_LENGTHS:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def device_of(model: nn.Module) -> torch.device:
    """Return the device for the model's inputs; shards offloaded to the CPU compute on their mesh's device."""
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
    """Put the model in eval mode for a block, without any effect on the training.

    The block runs eagerly, without gradients, with random numbers from `seed`. After it, or after an exception in it,
    each module's mode, compiled calls and the random state of Python, numpy and torch are restored. So a run draws the
    same numbers with and without the block.
    """
    import torch

    modes = [(module, module.training) for module in model.modules()]
    # model.compile() sets this attribute. Each new sequence length would compile again, so the block runs eagerly.
    compiled = [(module, call) for module in model.modules() if (call := getattr(module, "_compiled_call_impl", None))]
    try:
        model.eval()
        for module, _ in compiled:
            module._compiled_call_impl = None
        # Not inference_mode: a tensor that the model caches there could never take part in a backward pass.
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
        torch.default_generator.manual_seed(
            seed
        )  # torch.manual_seed would also seed devices whose state is not saved here
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
