"""Options of a worker: their defaults, their environment variables and their legal values. No framework is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from ...errors import UsageError
from ..evaluation.legal import check_at_least

SYNC_EVERY = 500
"""Inner steps between two synchronisations. Source: arXiv 2311.08105."""
HEARTBEAT_INTERVAL_S = 30.0
TIMEOUT_S = 600.0
MAX_SYNC_RETRIES = 3
ALPHA_WITH_DELAY = 0.5
"""Default weight of a worker's own values where a transfer overlaps with training. Source: arXiv 2501.18512."""

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _flag(text: str) -> bool:
    return _WORDS[text.lower()]


_ENVIRONMENT: dict[str, tuple[str, Any, Callable[[str], Any], str]] = {
    "server_addr": ("DILOCO_SERVER", None, str, "host:port"),
    "sync_every": ("DILOCO_SYNC_EVERY", SYNC_EVERY, int, "a whole number"),
    "worker_id": ("DILOCO_WORKER_ID", None, str, "a name"),
    "bf16_comm": ("DILOCO_BF16_COMM", True, _flag, "true or false"),
    "dylu": ("DILOCO_DYLU", False, _flag, "true or false"),
    "heartbeat_interval": ("DILOCO_HEARTBEAT_INTERVAL", HEARTBEAT_INTERVAL_S, float, "a number of seconds"),
    "num_fragments": ("DILOCO_NUM_FRAGMENTS", 1, int, "a whole number"),
    "fragment_sync_delay": ("DILOCO_FRAGMENT_SYNC_DELAY", 0, int, "a whole number"),
    "fragment_update_alpha": ("DILOCO_FRAGMENT_UPDATE_ALPHA", None, float, "a number between 0 and 1"),
    "quantization_bits": ("DILOCO_QUANTIZATION_BITS", 0, int, "8, 4 or 0"),
}
"""For each option: its variable, its default, the function that reads the variable, and a legal value in words."""


def option(name: str, given: Any) -> Any:
    """Return the value of an option: the argument, or else the variable of the environment, or else the default.

    An argument of 0 or False is one. An empty variable counts as none.

    Raises:
        UsageError: The variable cannot be read.
    """
    variable, default, read, legal = _ENVIRONMENT[name]
    text = os.environ.get(variable, "").strip()
    if given is not None:
        return given
    try:
        return read(text) if text else default
    except (ValueError, KeyError):
        raise UsageError(f"{variable}={text!r}: cannot be read; set it to {legal}") from None


def check_options(
    *,
    sync_every: int,
    timeout: float,
    heartbeat_interval: float,
    max_sync_retries: int,
    dylu: bool,
    num_fragments: int,
    fragment_sync_delay: int,
    fragment_update_alpha: float | None,
    quantization_bits: int,
) -> None:
    """Raise UsageError if an option of a worker is not legal."""
    check_at_least("sync_every", sync_every, 1)
    check_at_least("max_sync_retries", max_sync_retries, 0)
    for name, seconds, least in (("timeout", timeout, 1e-3), ("heartbeat_interval", heartbeat_interval, 0)):
        if isinstance(seconds, bool) or not (math.isfinite(seconds) and seconds >= least):
            raise UsageError(f"{name}={seconds!r}: must be a finite number of seconds; set {name}=60, for example")
    if dylu and not heartbeat_interval:
        raise UsageError("dylu=True: needs heartbeats, which bring the advice; set heartbeat_interval=30, for example")
    check_at_least("num_fragments", num_fragments, 1)
    check_at_least("fragment_sync_delay", fragment_sync_delay, 0)
    if fragment_update_alpha is not None and not 0 <= fragment_update_alpha <= 1:
        raise UsageError(f"fragment_update_alpha={fragment_update_alpha!r}: must be between 0 and 1; set 0.5, or None")
    check_bits("quantization_bits", quantization_bits)


def check_bits(name: str, bits: int) -> None:
    """Raise UsageError if a number of bits is not legal."""
    if isinstance(bits, bool) or bits not in (8, 4, 0):
        raise UsageError(f"{name}={bits!r}: must be 8, 4, or 0 for none; set {name}=8, for example")
