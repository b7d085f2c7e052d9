"""Begin and end of an exchange, by the settings of its server."""

from __future__ import annotations

import logging

import torch

from ...errors import SkywardError
from .async_rounds import AsyncRounds
from .exchange import DeltaExchange
from .rounds import Rounds
from .saves import ServerSaves
from .server_settings import DiLoCoSettings
from .tensors import exchanged

_log = logging.getLogger(__name__)


def open_exchange(settings: DiLoCoSettings, model: torch.nn.Module | None = None) -> DeltaExchange:
    """Return an exchange for the settings of a server.

    Raises:
        UsageError: The save is of another model, or of the other mode.
    """
    timeout_s = settings.heartbeat_timeout
    return DeltaExchange(
        AsyncRounds(heartbeat_timeout_s=timeout_s)
        if settings.async_mode
        else Rounds(min_workers=settings.min_workers, num_workers=settings.num_workers, heartbeat_timeout_s=timeout_s),
        tensors=None if model is None else _masters(model),
        outer=settings.make_outer(),
        is_bf16_down=settings.bf16_answers,
        bits=settings.quantization_bits,
        weighting=settings.weighting,
        saves=None if settings.save_dir is None else ServerSaves(settings.save_dir),
        save_every=settings.save_every_n_rounds,
    )


def end_exchange(exchange: DeltaExchange) -> Exception | None:
    """Save the last state, and discard what waits for its round. Return the error if it could not be saved."""
    try:
        exchange.save()
    except Exception as error:
        if isinstance(error, SkywardError | OSError):
            _log.error("the last state could not be saved: %s", error)
        else:
            _log.exception("the last state could not be saved")
        return error
    else:
        return None
    finally:
        exchange.close()


def _masters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in exchanged(model).items()}
