"""Text generation from prompts, at evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from ...errors import UsageError
from ..agree import Alone, Ranks
from ..events import TrainerCallback
from ..parts import is_dtensor
from .lines import write_line
from .sampling import Sampling, context_length, device_of, logits_of, sample, undisturbed

DEFAULT_SAMPLING = {"do_sample": True, "top_k": 20, "temperature": 0.7, "repetition_penalty": 1.15}

TAG = "eval-text"


class Tokenizer(Protocol):
    """Interface that a run's `processing_class` needs; Hugging Face's tokenizers have it.

    `eos_token_id`, if present, ends a text. A prompt without tokens begins with `bos_token_id`, or else with
    `eos_token_id`.
    """

    def encode(self, text: str, /) -> Sequence[int]: ...

    def decode(self, tokens: Sequence[int], /) -> str: ...


class TextgenCallback(TrainerCallback):
    """Generate text from prompts at evaluations.

    Text is generated at the first evaluation and then at each one that reaches the next multiple of
    `generation_steps`. It goes to TensorBoard under the tag "eval-text", one part per prompt, or to standard output
    without a `summary_writer`. `texts` keeps the latest parts.

    Models with Hugging Face's `generate` use it. Any other module must return logits for token ids (1, time); it
    computes the whole sequence for each token, so keep `max_new_tokens` small if that is slow.

    Random numbers come from a separate seed, the step, so training draws the same numbers with and without this
    callback, and a resumed run generates the same text. Module modes and compiled calls are restored, also after an
    exception.

    Rank 0 generates alone if it has the whole model. If parameters are DTensors, or the trainer has
    `pipeline_generate`, all ranks take part: rank 0 chooses each token and sends it to all. The trainer's
    `pipeline_generate(input_ids=(1, time), max_new_tokens=, eos_token_id=, pad_token_id=, **generation_config)` must
    return the whole sequence, (1, time), at least on rank 0.

    Args:
        summary_writer: a TensorBoard SummaryWriter, or a ResumableSummaryWriter.
        prompts: texts, or the path of a YAML file with a list of texts.
        generation_config: options of Hugging Face's `generate`, or its GenerationConfig. A plain module takes
            do_sample, temperature, top_k, top_p and repetition_penalty. None means do_sample=True, top_k=20,
            temperature=0.7, repetition_penalty=1.15.
        generation_steps: steps between texts, at least 1; None means the run's eval_steps.
        max_new_tokens: tokens of each text, at least 1.

    Raises:
        UsageError: a value is out of its range, or `prompts` is not a list of texts.

    Example:
        >>> textgen = TextgenCallback(prompts=["Once upon a time"], max_new_tokens=32)
        >>> textgen.texts
        []
    """

    on_error = "disable"
    collective_events = frozenset({"on_evaluate"})

    def __init__(
        self,
        summary_writer: Any = None,
        prompts: Sequence[str] | str | Path | None = None,
        generation_config: Any = None,
        generation_steps: int | None = None,
        max_new_tokens: int = 200,
    ) -> None:
        if generation_steps is not None and generation_steps < 1:
            raise UsageError(
                f"TextgenCallback.generation_steps={generation_steps!r}: must be at least 1; "
                "set 1 or more, or None for eval_steps"
            )
        if max_new_tokens < 1:
            raise UsageError(
                f"TextgenCallback.max_new_tokens={max_new_tokens!r}: must be at least 1; set max_new_tokens=1 or more"
            )
        self.summary_writer = summary_writer
        self.prompts = _prompts(prompts)
        self.generation_config: Any = DEFAULT_SAMPLING if generation_config is None else generation_config
        self.generation_steps = generation_steps
        self.max_new_tokens = max_new_tokens
        self.texts: list[str] = []
        self._next_step = 0

    # State: the counter -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"next_step": self._next_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._next_step = int(state_dict["next_step"])

    # Events -----------------------------------------------------------------------------------------------------------

    def on_evaluate(
        self,
        args: Any,
        state: Any,
        model: Any,
        processing_class: Any = None,
        trainer: Any = None,
        ranks: Ranks | None = None,
        **kwargs: Any,
    ) -> None:
        world, step = ranks or Alone(), int(state.global_step)
        # Rank 0's counter decides. After a resume in which only rank 0 got the state, the others would disagree.
        if not world.share(step >= self._next_step):
            return
        every = self.generation_steps or getattr(state, "eval_steps", None) or getattr(args, "eval_steps", None) or 1
        self._next_step = (step // int(every) + 1) * int(every)
        if not callable(getattr(model, "parameters", None)):
            raise UsageError(
                f"TextgenCallback: the run's model is of type {type(model).__name__}, not a torch module; "
                "remove the callback from this run"
            )
        pipeline = getattr(trainer, "pipeline_generate", None)
        if pipeline is None and not any(is_dtensor(parameter) for parameter in model.parameters()):
            if world.rank != 0:
                return
            world = Alone()
        with undisturbed(model, seed=step):
            texts = [
                self._text(prompt, model, _tokenizer(processing_class), pipeline, world, seed=step)
                for prompt in self.prompts
            ]
        if world.rank == 0:
            self.texts = texts
            self._publish("\n\n---\n\n".join(texts), step)

    def _publish(self, text: str, step: int) -> None:
        if self.summary_writer is None:
            write_line(f"step {step}, generated:\n{text}")
            return
        self.summary_writer.add_text(TAG, text, global_step=step)
        self.summary_writer.flush()

    # One text ---------------------------------------------------------------------------------------------------------

    def _text(self, prompt: str, model: Any, tokenizer: Any, pipeline: Any, world: Ranks, *, seed: int) -> str:
        """Return the prompt and its continuation; ranks other than 0 return an empty text."""
        tokens = world.share(_encode(tokenizer, prompt) if world.rank == 0 else None)
        if tokens is None:
            raise UsageError(
                f"TextgenCallback.prompts: {prompt!r} has no tokens, and the processing_class has neither "
                "bos_token_id nor eos_token_id; use a prompt with text"
            )
        if pipeline is not None:
            new = self._by_pipeline(tokens, model, tokenizer, pipeline)
        elif world.world_size == 1 and _has_generate(model):
            new = self._by_generate(tokens, model, tokenizer)
        else:
            new = self._by_logits(tokens, model, tokenizer, world, seed=seed)
        return f"{prompt} [START] {_decode(tokenizer, new)}" if world.rank == 0 else ""

    def _by_generate(self, tokens: list[int], model: Any, tokenizer: Any) -> list[int]:
        import torch

        input_ids = torch.tensor([tokens], device=device_of(model))
        options: dict[str, Any]
        if isinstance(self.generation_config, Mapping):
            options = {
                "pad_token_id": _padding(tokenizer),
                **self.generation_config,
                "max_new_tokens": self.max_new_tokens,
            }
        else:
            config = deepcopy(self.generation_config)
            config.max_new_tokens = self.max_new_tokens
            options = {"generation_config": config}
        output = model.generate(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **options)
        whole = _row(output)
        return whole if getattr(model.config, "is_encoder_decoder", False) else whole[len(tokens) :]

    def _by_pipeline(self, tokens: list[int], model: Any, tokenizer: Any, pipeline: Any) -> list[int]:
        import torch

        output = pipeline(
            input_ids=torch.tensor([tokens], device=device_of(model)),
            max_new_tokens=self.max_new_tokens,
            eos_token_id=getattr(tokenizer, "eos_token_id", None),
            pad_token_id=_padding(tokenizer),
            **_options(self.generation_config),
        )
        return [] if output is None else _row(output)[len(tokens) :]

    def _by_logits(self, tokens: list[int], model: Any, tokenizer: Any, world: Ranks, *, seed: int) -> list[int]:
        import torch

        device, longest = device_of(model), context_length(model)

        def next_logits(so_far: list[int]) -> torch.Tensor:
            window = so_far if longest is None else so_far[-longest:]
            return logits_of(model(torch.tensor([window], device=device)))[0, -1]

        return sample(
            next_logits,
            tokens,
            sampling=Sampling.of(_options(self.generation_config)),
            max_new_tokens=self.max_new_tokens,
            end=getattr(tokenizer, "eos_token_id", None),
            generator=torch.Generator().manual_seed(seed),
            ranks=world,
        )


def _prompts(prompts: Sequence[str] | str | Path | None) -> list[str]:
    texts: object = prompts
    if isinstance(prompts, (str, Path)):
        texts = _read_yaml(Path(prompts))
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) for text in texts):
        raise UsageError(
            f"TextgenCallback.prompts={prompts!r}: must be a list of texts; "
            "pass one, or the path of a YAML file with a list of texts"
        )
    return list(texts)


def _read_yaml(path: Path) -> object:
    try:
        import yaml
    except ImportError as error:
        raise UsageError(
            f"TextgenCallback.prompts={str(path)!r}: reading it needs PyYAML; "
            "run pip install 'skyward[training]', or pass the texts themselves"
        ) from error
    try:
        content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(
            f"TextgenCallback.prompts={str(path)!r}: cannot be read ({error}); pass a YAML file with texts"
        ) from error
    return content


def _options(config: Any) -> dict[str, Any]:
    """Return the config as keywords; a GenerationConfig is reduced to its options about the choice of tokens."""
    if isinstance(config, Mapping):
        return dict(config)
    options = {field.name: getattr(config, field.name, None) for field in fields(Sampling)}
    return {name: value for name, value in options.items() if value is not None}


def _has_generate(model: Any) -> bool:
    # Other models may have a `generate` with other arguments; only Hugging Face's comes with a generation_config.
    return callable(getattr(model, "generate", None)) and hasattr(model, "generation_config")


def _tokenizer(processing_class: Any) -> Any:
    """Return the tokenizer; a multimodal processor has one inside."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if not callable(getattr(tokenizer, "encode", None)) or not callable(getattr(tokenizer, "decode", None)):
        raise UsageError(
            f"TextgenCallback: the run's processing_class is {tokenizer!r}, without encode() and decode(); "
            "pass the trainer a tokenizer as processing_class"
        )
    return tokenizer


def _encode(tokenizer: Any, prompt: str) -> list[int] | None:
    tokens = [int(token) for token in tokenizer.encode(prompt)]
    if tokens:
        return tokens
    first = getattr(tokenizer, "bos_token_id", None)
    first = getattr(tokenizer, "eos_token_id", None) if first is None else first
    return None if first is None else [int(first)]


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    if hasattr(tokenizer, "all_special_ids"):
        return str(tokenizer.decode(tokens, skip_special_tokens=True))
    return str(tokenizer.decode(tokens))


def _padding(tokenizer: Any) -> int | None:
    padding = getattr(tokenizer, "pad_token_id", None)
    return getattr(tokenizer, "eos_token_id", None) if padding is None else padding


def _row(output: Any) -> list[int]:
    sequences = getattr(output, "sequences", output)
    return [int(token) for token in (sequences.tolist() if hasattr(sequences, "tolist") else sequences)[0]]
