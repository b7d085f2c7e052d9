"""From machines that run to nodes: what a rented machine is to the transport that brings it up."""

from __future__ import annotations

from ..errors import ProviderError
from ..events import Emit
from ..machine import Machine, PoolSpec
from .cloud import Host

__all__ = ["bring_up"]


def bring_up(hosts: list[Host], spec: PoolSpec, pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
    """Agents on all of the hosts, or none of them and an error."""
    raise ProviderError(f"{len(hosts)} machine(s) run, and there is no transport to bring them up with yet")
