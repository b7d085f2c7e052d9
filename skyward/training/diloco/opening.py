"""Begin and end of an exchange, by the options of its server."""

from __future__ import annotations

import logging
import os

import torch

from ...errors import SkywardError, UsageError
from ..evaluation.legal import check_at_least
from .algorithm import DelayedNesterov, OuterOptimizer
from .async_rounds import AsyncRounds
from .exchange import DeltaExchange
from .rounds import Rounds
from .saves import ServerSaves
from .settings import check_bits, check_weighting
from .tensors import exchanged

_log = logging.getLogger(__name__)


def open_exchange(
    model: torch.nn.Module | None = None,
    num_workers: int = 1,
    *,
    outer_optimizer: OuterOptimizer | None = None,
    save_dir: str | os.PathLike[str] | None = None,
    save_every_n_rounds: int = 1,
    heartbeat_timeout: float = 120.0,
    min_workers: int = 1,
    bf16_answers: bool = False,
    quantization_bits: int = 0,
    async_mode: bool = False,
    dn_buffer_size: int = 0,
    weighting: str = "equal",
) -> DeltaExchange:
    """Return an exchange for the options of a server; `DiLoCoServer` describes them.

    Raises:
        UsageError: An option is not legal, or the save is of another model.
    """
    check_at_least("save_every_n_rounds", save_every_n_rounds, 1)
    check_bits("quantization_bits", quantization_bits)
    check_weighting(weighting, async_mode=async_mode)
    if quantization_bits and async_mode:
        raise UsageError(
            f"quantization_bits={quantization_bits}: asynchronous answers are whole parameters; set it to 0, and use "
            "the workers' quantization_bits"
        )
    saves = None if save_dir is None else ServerSaves(save_dir)
    if async_mode:
        _check_async(outer_optimizer, dn_buffer_size, num_workers, min_workers)
        outer_optimizer = outer_optimizer or DelayedNesterov(every=dn_buffer_size or num_workers)
    elif dn_buffer_size:
        raise UsageError(f"dn_buffer_size={dn_buffer_size}: is for asynchronous updates; set async_mode=True")
    return DeltaExchange(
        AsyncRounds(heartbeat_timeout_s=heartbeat_timeout)
        if async_mode
        else Rounds(min_workers=min_workers, num_workers=num_workers, heartbeat_timeout_s=heartbeat_timeout),
        tensors=None if model is None else _masters(model),
        outer=outer_optimizer,
        is_bf16_down=bf16_answers,
        bits=quantization_bits,
        weighting=weighting,
        saves=saves,
        save_every=save_every_n_rounds,
    )


def end_exchange(exchange: DeltaExchange) -> None:
    """Save the last state, and discard what waits for its round."""
    try:
        exchange.save()
    except (SkywardError, OSError) as error:
        _log.error("the last state could not be saved: %s", error)
    finally:
        exchange.close()


def _check_async(outer: OuterOptimizer | None, dn_buffer_size: int, num_workers: int, min_workers: int) -> None:
    check_at_least("dn_buffer_size", dn_buffer_size, 0)
    check_at_least("num_workers", num_workers, 1)
    if min_workers != 1:
        raise UsageError(f"min_workers={min_workers}: each update is a round in asynchronous mode; leave it at 1")
    if outer is not None and dn_buffer_size:
        raise UsageError(f"dn_buffer_size={dn_buffer_size}: the outer_optimizer ignores it; give one of both")


def _masters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in exchanged(model).items()}
