"""Pipeline-parallel training: each rank holds one stage of the model, and copies of the pipeline share the data."""

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

ModelSplitter = Callable[[nn.Module, int], Sequence[nn.Module]]
"""`(model, num_stages) -> stages`: modules that form the model when called one after the other."""

REPLICAS = "stage_replicas"
"""Name of the process group of the ranks that hold the same stage, in components of checkpoints."""


class PipelineTrainer(Trainer):
    """`Trainer` for a model that is split into stages, one on each rank (torch.distributed.pipelining).

    Gradients, losses and metrics are those of one process with the same batches. Rank 0 reads the data for all ranks.
    Callbacks receive this rank's stage as `model`. The first stage is called with the batch: a dict by keyword, a tuple
    by position. Every other stage is called with the outputs of the one before it, a tensor or several. A later stage
    that needs further columns of the batch, such as `attention_mask`, declares them as keyword-only parameters of its
    forward.

    With fewer stages than ranks there are several copies of the pipeline, which share the data. Rank
    `copy * num_stages + stage` holds that stage of that copy: 8 ranks with 4 stages are two copies.

    Args:
        model: the whole model, the same on every rank.
        args: settings, without `fp16` and `dispatch_batches=False`. `per_device_train_batch_size` is the batch of one
            copy.
        model_splitter: `(model, num_stages) -> [module, ...]`. Every rank calls it and keeps its own stage, so its
            result must be the same everywhere, and no parameter may be in two stages. Modules taken out of the model
            keep their names in checkpoints and in `save_model`. For a model traced as `pipe` by
            `torch.distributed.pipelining.pipeline`: `lambda model, n: [pipe.get_stage_module(i) for i in range(n)]`;
            dropout then stays as it was traced.
        num_stages: stages, a divisor of the number of ranks; None: one per rank.
        schedule: "1f1b" or "gpipe".
        num_microbatches: parts of each batch, at least 1; "1f1b" needs at least `num_stages`. None: `num_stages`.
        **options: as for `Trainer`; `compute_loss_func(outputs of the last stage, labels)` is required.

    Raises:
        UsageError: an argument is missing or does not fit, or two stages share a parameter.

    Example:
        Train a sequential model in two stages on two ranks::

            def split(model, num_stages):
                return [model[:4], model[4:]]

            loss = torch.nn.functional.cross_entropy
            trainer = PipelineTrainer(model, args, model_splitter=split, compute_loss_func=loss, train_dataset=data)
            trainer.train()
    """

    model_part: ModelPart | None = None
    """Description of this rank's stage as a part of the model. None: no training or evaluation has begun."""

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
            raise UsageError(
                "model_splitter=None: PipelineTrainer needs one; pass a function (model, num_stages) -> [module, ...]"
            )
        if schedule not in SCHEDULES:
            raise UsageError(
                f"schedule={schedule!r}: must be one of {', '.join(map(repr, SCHEDULES))}; set schedule='1f1b' (the "
                "default)"
            )
        if options.get("compute_loss_func") is None:
            raise UsageError(
                "compute_loss_func=None: the last stage of a PipelineTrainer needs one; pass a function (outputs, "
                "labels) -> loss"
            )
        self._split, self._schedule = model_splitter, schedule
        self._num_stages, self._num_microbatches = num_stages, num_microbatches
        super().__init__(model, args, **options)

    # Layout of the ranks ---------------------------------------------------------------------------------------------

    def _make_ranks(self) -> Ranks:
        ranks = super()._make_ranks()
        stages = ranks.world_size if self._num_stages is None else self._num_stages
        if stages < 1 or ranks.world_size % stages:
            raise UsageError(
                f"num_stages={stages}: does not divide the number of ranks, {ranks.world_size}; set a divisor of it"
            )
        microbatches = stages if self._num_microbatches is None else self._num_microbatches
        if microbatches < 1 or (self._schedule == "1f1b" and microbatches < stages):
            raise UsageError(
                f"num_microbatches={microbatches}: must be >= {stages}, the number of stages (>= 1 with "
                f"schedule='gpipe'); set num_microbatches={stages} or more"
            )
        if self.args.fp16:
            raise UsageError(
                "fp16=True: its loss scaler would see only one stage of the pipeline; set bf16=True instead"
            )
        if self.args.dispatch_batches is False:
            raise UsageError(
                "dispatch_batches=False: all stages need the same batches, so rank 0 reads them; leave it out"
            )
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
        """Return "stage_replicas", the group of the ranks with this stage; nothing if there is one copy."""
        return {} if self._copies.replicas is None else {REPLICAS: self._copies.replicas}

    # The stage -------------------------------------------------------------------------------------------------------

    def _take(self, model: nn.Module) -> None:
        copies = self._copies
        self._name, self._text = type(model).__name__, str(model)
        self._context_length = context_length(model)
        _check_passes(copies, self.device)
        stages = list(self._split(model, copies.num_stages))
        if len(stages) != copies.num_stages or not all(isinstance(stage, nn.Module) for stage in stages):
            raise UsageError(
                f"model_splitter: returned {len(stages)} stages, but {copies.num_stages} modules are needed; return "
                "one torch module for each stage"
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
        """Describe the stage with the parameters that are trained now. Collective."""
        # Made again for each run, because parameters may have been frozen since the trainer was made.
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
        """Weigh all micro-batches of the pipeline. Factors are tensors (microbatches,), one for each batch."""
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
        weights = self._objective.weigh(parts, ranks=self._copies, group=self._copies.replicas)
        factors = torch.stack([torch.as_tensor(factor, device=self.device) for factor in weights.factors]).float()
        return loss.Weights(
            factors=list(factors.reshape(len(batches), self._microbatches)),
            num_items_in_batch=weights.num_items_in_batch,
        )

    def _accumulate(self, batches: list[MicroBatch]) -> tuple[torch.Tensor, int, float]:
        total, tokens, flos = super()._accumulate(batches)
        self._copies.average_gradients(self.model)
        # Each stage counts its own operations, but the tokens of a batch must count once, not once per stage.
        return self._copies.sum_over_stages(total), tokens if self._copies.stage == 0 else 0, flos

    def training_step(
        self, model: nn.Module, inputs: Any, factor: float | torch.Tensor, num_items_in_batch: torch.Tensor | None
    ) -> torch.Tensor:
        """Run forward and backward of a batch through all stages.

        Args:
            model: unused; this rank's stage is trained.
            inputs: the batch, on the device.
            factor: weights of the micro-batches' losses: (microbatches,).
            num_items_in_batch: labels of the whole step, for a loss function that divides by them; else None.

        Returns:
            The batch's share of the step's loss on the last stage, 0 on others: () float32.
        """
        compute = self.compute_loss_func
        assert compute is not None
        counted = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
        pieces = self._pieces(inputs, self.args.train_batch_size)
        factors = torch.as_tensor(factor, device=self.device)
        return self._pipeline.train(pieces, factors, lambda outputs, labels: compute(outputs, labels, **counted))

    def prediction_step(
        self, model: nn.Module, inputs: Any, *, prediction_loss_only: bool
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return loss, predictions and labels of a batch on the last stage; None for each on other stages.

        Args:
            model: unused; this rank's stage predicts.
            inputs: the batch, on any device.
            prediction_loss_only: return only the loss.
        """
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
        if isinstance(inputs, Mapping):  # every rank has the whole batch, so all raise together
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
        """Generate text with a language model, through all stages. Collective; the `input_ids` of rank 0 are used.

        Every token recomputes the whole sequence; there is no cache. Modes of modules and random numbers are restored
        afterwards. The first stage receives the tokens as `input_ids`, or as its first argument.

        Args:
            input_ids: the prompt: (1, T) int64, T >= 1.
            max_new_tokens: tokens to generate at most.
            eos_token_id: token that ends the text; it is not part of the result.
            pad_token_id: unused, because there is one prompt.
            seed: seed of the sampling; None: the step of the run.
            **generation_config: options of `skyward.training.callbacks.sampling.Sampling`: do_sample, temperature, ...

        Returns:
            Prompt and text: (1, T + new tokens) int64, on every rank.

        Raises:
            UsageError: an option or the shape of the prompt is not legal.
            RankFailed: a stage raised; on all ranks.
        """
        prompt = self.ranks.share(input_ids.tolist())
        if len(prompt) != 1 or not isinstance(prompt[0], list) or not prompt[0]:
            raise UsageError(
                f"input_ids.shape={tuple(input_ids.shape)}: must be (1, T), one prompt of T >= 1 tokens; call "
                "pipeline_generate once for each prompt"
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

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def _component(self, key: str, stateful: Any, pattern: SharingPattern) -> StateComponent:
        if self.ranks.world_size == 1 or key not in ("model", "optimizer"):
            return super()._component(key, stateful, pattern)
        if key == "model":
            stateful = _Renamed(stateful, self._names)
        if self._copies.replicas is None:
            return StateComponent(key, stateful, SharingPattern.PER_RANK)
        return StateComponent(key, stateful, SharingPattern.PER_GROUP, REPLICAS)

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Write the weights of all stages as one model.safetensors. Collective.

        Args:
            output_dir: folder to write to; None: `args.output_dir`.

        Raises:
            UsageError: two stages use one name for different weights, because the splitter made new modules.
        """
        folder = os.fspath(output_dir if output_dir is not None else str(self.args.output_dir))
        own = _Renamed(self.model, self._names).state_dict()
        parts = self.ranks.exchange({name: value.detach().cpu() for name, value in own.items()})
        whole: dict[str, Any] = {}
        for part in parts[: self._copies.num_stages]:
            twice = sorted(whole.keys() & part.keys())
            if twice:
                raise UsageError(
                    f"model_splitter: weights of two stages have the name {twice[0]!r}; build the stages of modules of "
                    "the model, not of new ones"
                )
            whole |= part
        if self.ranks.rank == 0:
            write_weights(folder, whole)
        self.ranks.exchange(None)


class _StagePrecision(Precision):
    """Precision that clips by the gradient norm of the whole model, not of one stage."""

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
    """Map names of tensors in the stage to their names in the model.

    A tied weight has several names in both. Each name in the stage gets another one of the model's.
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


def _check_passes(copies: Copies, device: torch.device) -> None:
    """Check that the ranks' process group can send tensors of this device from one stage to the next."""
    if copies.num_stages == 1 or device.type == "cpu":
        return
    backends = torch.distributed.get_backend_config(copies.pipeline)
    if f"{device.type}:gloo" in backends:  # it reduces CUDA tensors, and ends the process that sends one
        raise UsageError(
            f"num_stages={copies.num_stages}: gloo, the backend of these ranks, sends no {device.type} tensors from "
            "one stage to the next; start one rank for each GPU without backend=, or set use_cpu=True"
        )


def _check_apart(stages: Sequence[nn.Module]) -> None:
    seen: dict[int, tuple[int, str]] = {}
    for at, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            first, other = seen.setdefault(id(parameter), (at, name))
            if first != at:
                raise UsageError(
                    f"model_splitter: {name!r} of stage {at} is the same parameter as {other!r} of stage {first}, and "
                    "tied weights cannot be on two ranks; give one of the stages a copy"
                )
