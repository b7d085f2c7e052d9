"""Pipeline-parallel training: every rank holds one stage of the model, and copies of the pipeline share the data."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import UsageError
from ..agree import Ranks
from ..arguments import TrainingArguments
from ..callbacks.sampling import Sampling, context_length, undisturbed
from ..checkpoint import SharingPattern, StateComponent
from ..parts import ModelPart, WholeModel
from . import loss
from .batches import MicroBatch
from .collate import Inputs, columns_of
from .copies import Copies
from .generation import Relay
from .precision import Precision
from .saver import write_weights
from .stages import SCHEDULES, Pieces, PipelineStage, columns_of_later, pieces_of
from .trainer import Trainer
from .world import place

__all__ = ["ModelSplitter", "PipelineTrainer"]

ModelSplitter = Callable[[nn.Module, int], Sequence[nn.Module]]
"""`(model, num_stages) -> stages`: modules that, one after the other, are the model."""

REPLICAS = "stage_replicas"
"""The process group of the ranks that hold the same stage, as components name it."""


class PipelineTrainer(Trainer):
    """A `Trainer` of a model that is split into stages, one on each rank (torch.distributed.pipelining).

    model_splitter: `(model, num_stages) -> [module, ...]`. Every rank calls it with the whole model and keeps its own
        stage, so it is to give the same everywhere; modules that it takes out of the model keep their names in
        checkpoints and in `save_model`. The first stage is called with the batch (dictionaries by keyword, tuples by
        position), each other one with what the one before gives, a tensor or several; what further columns of the batch
        it needs (`attention_mask`) are keyword-only parameters of its forward. For a model that
        `torch.distributed.pipelining.pipeline` can trace: `lambda model, n: [pipe.get_stage_module(i) for i in
        range(n)]`; dropout stays as it was traced then.
    compute_loss_func: `(outputs of the last stage, labels)` -> the mean loss; needed.
    num_stages: None: all ranks are one pipeline. With fewer, which divide their number, there are several copies of
        it that share the data: rank `copy * num_stages + stage`, so 8 ranks with 4 stages are 2 x 4.
    schedule: "1f1b", or "gpipe". num_microbatches: of each batch of `per_device_train_batch_size` samples, which is
        that of one copy; None: as many as stages. 1F1B needs at least that many.

    Arguments, events and flags are those of `Trainer`; `model` is this rank's stage wherever it is given. Rank 0 reads
    the data for all. Gradients, losses and metrics are those of one process with the same batches. fp16, tied weights
    in two stages, and `dispatch_batches=False` are refused.

    Raises: UsageError.
    """

    model_part: ModelPart | None = None
    """What this rank's stage is of the model, from the begin of a training or evaluation on."""

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        model_splitter: ModelSplitter | None = None,
        num_stages: int | None = None,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        **options: Any,
    ) -> None:
        if model_splitter is None:
            raise UsageError("PipelineTrainer: model_splitter=(model, num_stages) -> [module, ...] is needed")
        if schedule not in SCHEDULES:
            raise UsageError(
                f"PipelineTrainer: schedule={schedule!r}: must be one of {', '.join(map(repr, SCHEDULES))}"
            )
        if options.get("compute_loss_func") is None:
            raise UsageError(
                "PipelineTrainer: compute_loss_func=(outputs, labels) -> loss is needed: it is the last stage's"
            )
        self._split, self._schedule = model_splitter, schedule
        self._num_stages, self._num_microbatches = num_stages, num_microbatches
        super().__init__(model, args, **options)

    # How the ranks lie -----------------------------------------------------------------------------------------------

    def _make_ranks(self) -> Ranks:
        ranks = super()._make_ranks()
        stages = ranks.world_size if self._num_stages is None else self._num_stages
        if stages < 1 or ranks.world_size % stages:
            raise UsageError(
                f"PipelineTrainer: num_stages={stages}: must divide the number of ranks, {ranks.world_size}"
            )
        microbatches = stages if self._num_microbatches is None else self._num_microbatches
        if microbatches < 1 or (self._schedule == "1f1b" and microbatches < stages):
            raise UsageError(
                f"PipelineTrainer: num_microbatches={microbatches}: must be at least {stages}, the number of stages "
                "(1 with schedule='gpipe')"
            )
        if self.args.fp16:
            raise UsageError("PipelineTrainer: fp16=True: its scaler would see one stage only; use bf16=True")
        if self.args.dispatch_batches is False:
            raise UsageError("PipelineTrainer: dispatch_batches=False: all stages need the same batches; rank 0 reads")
        self._microbatches, self._copies = microbatches, Copies(ranks, stages)
        self._shares = self._copies.copy_of_rank
        return ranks

    @property
    def _data_ranks(self) -> Ranks:
        return self._copies

    @property
    def _is_read_by_one(self) -> bool:
        return True

    def get_process_groups(self) -> dict[str, Any]:
        """Of the ranks that hold the same stage, "stage_replicas", where there are several copies."""
        return {} if self._copies.replicas is None else {REPLICAS: self._copies.replicas}

    # The stage -------------------------------------------------------------------------------------------------------

    def _take(self, model: nn.Module) -> None:
        copies = self._copies
        self._name, self._text = type(model).__name__, str(model)
        self._context_length = context_length(model)
        stages = list(self._split(model, copies.num_stages))
        if len(stages) != copies.num_stages or not all(isinstance(stage, nn.Module) for stage in stages):
            raise UsageError(
                f"PipelineTrainer: model_splitter gave {len(stages)} stages; {copies.num_stages} modules are needed"
            )
        _check_apart(stages)
        own = stages[copies.stage]
        self._names = _names_in(model, own)
        self.model = self.model_wrapped = place(own, self.device)
        later = frozenset().union(*(columns_of_later(stage) for stage in stages[1:]))
        first = columns_of(stages[0], self.args.label_names)
        self._columns = None if first is None else first | later
        self._inputs = Inputs.of(
            stages[0],
            self.args.label_names,
            who=type(self).__name__,
            called="the first stage" if len(stages) > 1 else "",
        )

    def _wrap(self) -> None:
        self._copies.start_equal(self.model)
        self.model_part = self._part()
        self._pipeline = PipelineStage(
            self.model,
            index=self._copies.stage,
            count=self._copies.num_stages,
            group=self._copies.pipeline,
            device=self.device,
            schedule=self._schedule,
            microbatches=self._microbatches,
            autocast=self._precision.autocast,
        )

    def _part(self) -> ModelPart:
        """Of the parameters as they are trained now: a stage may have been frozen since it was made. Collective."""
        copies = self._copies
        own = [(parameter.numel(), parameter.requires_grad) for parameter in self.model.parameters()]
        sizes = [size for stage in self.ranks.exchange(own)[: copies.num_stages] for size in stage]
        made_here = {name: f"stage{copies.stage}.{name}" for name, _ in self.model.named_parameters()}
        return ModelPart(
            names=made_here | self._names,
            is_counted=copies.rank == 0,
            whole=WholeModel(
                name=self._name,
                text=self._text,
                parameters=sum(size for size, _ in sizes),
                trained=sum(size for size, is_trained in sizes if is_trained),
            ),
        )

    def _make_precision(self) -> Precision:
        return _StagePrecision(self.args, self.device, self._copies)

    # A step ----------------------------------------------------------------------------------------------------------

    def _weigh(self, batches: list[MicroBatch]) -> loss.Weights:
        """Of all micro-batches of the pipeline; factors are tensors (microbatches,), one for each batch."""
        parts: list[MicroBatch] = []
        for batch in batches:
            pieces = self._pieces(loss.on_device(batch.inputs, self.device), self.args.train_batch_size)
            for at, rows in enumerate(pieces.rows):
                parts.append(
                    MicroBatch(
                        inputs={"labels": pieces.labels[at]},
                        samples=min(rows, batch.samples),
                        samples_of_all=None if batch.samples_of_all is None else (at == 0) * batch.samples_of_all,
                    )
                )
        found = self._objective.weigh(parts, ranks=self._copies, group=self._copies.replicas)
        factors = torch.stack([torch.as_tensor(factor, device=self.device) for factor in found.factors]).float()
        return loss.Weights(
            factors=list(factors.reshape(len(batches), self._microbatches)), num_items_in_batch=found.num_items_in_batch
        )

    def _accumulate(self, batches: list[MicroBatch]) -> tuple[torch.Tensor, int, float]:
        total, tokens, flos = super()._accumulate(batches)
        self._copies.average_gradients(self.model)
        # Each stage made its own operations, but the tokens of one batch count once.
        return self._copies.sum_over_stages(total), tokens if self._copies.stage == 0 else 0, flos

    def training_step(
        self, model: nn.Module, inputs: Any, factor: float | torch.Tensor, num_items_in_batch: torch.Tensor | None
    ) -> torch.Tensor:
        """Forward and backward of a batch, through all stages. Gives its share of the loss on the last one, else 0."""
        compute = self.compute_loss_func
        assert compute is not None
        counted = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        pieces = self._pieces(inputs, self.args.train_batch_size)
        factors = torch.as_tensor(factor, device=self.device)
        return self._pipeline.train(pieces, factors, lambda outputs, labels: compute(outputs, labels, **counted))

    def prediction_step(
        self, model: nn.Module, inputs: Any, *, prediction_loss_only: bool
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """The loss, predictions and labels of a batch on the last stage; nothing on others."""
        inputs = loss.on_device(inputs, self.device)
        outputs = self._pipeline_for_evaluation().predict(self._pieces(inputs, self.args.eval_batch_size))
        if outputs is None:
            return None, None, None
        labels, _ = loss.apart(inputs, self.args.label_names)
        assert self.compute_loss_func is not None
        with self._precision.autocast():
            value = None if labels is None else self.compute_loss_func(outputs, labels)
        if prediction_loss_only:
            return value, None, None
        return value, self._predictions_in(outputs, labels), labels

    def _pipeline_for_evaluation(self) -> PipelineStage:
        if not hasattr(self, "_pipeline"):  # nothing was trained yet
            self._wrap()
        return self._pipeline

    def _pieces(self, inputs: Any, batch_size: int) -> Pieces:
        if isinstance(inputs, Mapping):  # every rank has the whole batch, so all of them raise
            self._inputs.check(inputs)
        return pieces_of(inputs, count=self._microbatches, batch_size=batch_size, label_names=self.args.label_names)

    def pipeline_generate(
        self,
        input_ids: torch.Tensor,
        *,
        max_new_tokens: int,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        seed: int | None = None,
        **generation_config: Any,
    ) -> torch.Tensor:
        """Generate text with a language model, through all stages. Collective; rank 0's `input_ids` count.

        Every token computes the whole sequence: nothing is cached. Training is not disturbed: modes of modules and
        random numbers are as before. The first stage gets the tokens as `input_ids`, or as its first argument.

        Args:
            input_ids: the prompt: (1, time) int64.
            max_new_tokens: at most so many follow it.
            eos_token_id: ends the text; it is not in the result.
            pad_token_id: not needed for a single text.
            seed: of the choice of tokens; None: the step.
            generation_config: options of `skyward.training.callbacks.sampling.Sampling`: do_sample, temperature, ...

        Returns:
            Prompt and text: (1, longer time) int64, on every rank.

        Raises:
            UsageError: options or shapes that are not legal.
            RankFailed: a stage has raised; on all ranks.
        """
        prompt = self.ranks.share(input_ids.tolist())
        if len(prompt) != 1 or not isinstance(prompt[0], list) or not prompt[0]:
            raise UsageError(
                f"pipeline_generate: input_ids.shape={tuple(input_ids.shape)}: must be (1, time), one prompt of at "
                "least one token; call it once for each prompt"
            )
        sampling = Sampling.of(generation_config)
        self._pipeline_for_evaluation()
        relay = Relay(
            self.model,
            ranks=self.ranks,
            copies=self._copies,
            device=self.device,
            autocast=self._precision.autocast,
            context_length=self._context_length,
        )
        seed = self.state.global_step if seed is None else seed
        with undisturbed(self.model, seed=seed):
            tokens = relay.generate(
                prompt[0], max_new_tokens=max_new_tokens, end=eos_token_id, sampling=sampling, seed=seed
            )
        return torch.tensor([tokens], device=self.device)

    # What is saved ---------------------------------------------------------------------------------------------------

    def _component(self, key: str, stateful: Any, pattern: SharingPattern) -> StateComponent:
        if self.ranks.world_size == 1 or key not in ("model", "optimizer"):
            return super()._component(key, stateful, pattern)
        if key == "model":
            stateful = _Renamed(stateful, self._names)
        if self._copies.replicas is None:
            return StateComponent(key, stateful, SharingPattern.PER_RANK)
        return StateComponent(key, stateful, SharingPattern.PER_GROUP, REPLICAS)

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Writes the weights of all stages as one model.safetensors. Collective.

        Raises: UsageError where two stages have one name for different weights: the splitter made modules of its own.
        """
        folder = os.fspath(output_dir if output_dir is not None else str(self.args.output_dir))
        own = _Renamed(self.model, self._names).state_dict()
        parts = self.ranks.exchange({name: value.detach().cpu() for name, value in own.items()})
        whole: dict[str, Any] = {}
        for part in parts[: self._copies.num_stages]:
            twice = sorted(whole.keys() & part.keys())
            if twice:
                raise UsageError(
                    f"PipelineTrainer.save_model: {twice[0]!r} is the name of weights in two stages; let "
                    "model_splitter take its modules out of the model"
                )
            whole |= part
        if self.ranks.rank == 0:
            write_weights(folder, whole)
        self.ranks.exchange(None)


class _StagePrecision(Precision):
    """The norm of all stages' gradients is that of the model's."""

    def __init__(self, args: TrainingArguments, device: torch.device, copies: Copies) -> None:
        super().__init__(args, device)
        self._copies = copies

    def clip(self, optimizer: torch.optim.Optimizer, parameters: Any, max_norm: float) -> torch.Tensor:
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        total = self._copies.sum_over_stages(norm.to(self._device).square()).sqrt()
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(trained, max_norm, total)
        return total


class _Renamed:
    """A stage's state under the names of the whole model."""

    def __init__(self, stateful: Any, names: Mapping[str, str]) -> None:
        self._stateful, self._names = stateful, names

    def state_dict(self) -> dict[str, Any]:
        return {self._names.get(name, name): value for name, value in self._stateful.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        own = {name: local for local, name in self._names.items()}
        self._stateful.load_state_dict({own.get(name, name): value for name, value in state_dict.items()})


def _names_in(model: nn.Module, stage: nn.Module) -> dict[str, str]:
    """By the name in the stage, the name in the model, of tensors that are both's. Tied weights have several names in
    either, and each keeps one of its own.
    """
    known: dict[int, list[str]] = {}
    for name, tensor in _named(model):
        known.setdefault(id(tensor), []).append(name)
    names: dict[str, str] = {}
    for name, tensor in _named(stage):
        if left := known.get(id(tensor)):
            names[name] = left.pop(0)
    return names


def _named(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _check_apart(stages: Sequence[nn.Module]) -> None:
    seen: dict[int, tuple[int, str]] = {}
    for at, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            first, other = seen.setdefault(id(parameter), (at, name))
            if first != at:
                raise UsageError(
                    f"PipelineTrainer: {name!r} of stage {at} is the same parameter as {other!r} of stage {first}; "
                    "tied weights cannot be on two ranks, so give one of them its own"
                )
