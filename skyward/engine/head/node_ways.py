"""Ways of a head to its nodes: a socket to the one beside it, and Ray or a channel that the client lends to the others.

A detached pool goes on without a client from the moment when Ray reaches all nodes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from ...errors import Unreachable, UsageError
from ...values.machine import Machine
from ..dialler import CommandEnds, Connect, DialledEnds
from ..direct import DirectEngine
from ..lender import command_to
from ..ray.driving import DriverOrder, RayDriver
from ..ray.links import RayWays
from .kept_calls import KeptCalls
from .lending import LentLinks
from .messages import HeadConfig
from .turns import ClientTurns

_RAY_FIRST = 0.7
"""Part of the time for the links of a head that begins again in which only Ray may carry them."""


class NodeWays:
    """Ways of a head to its nodes, with the driver of its Ray. Thread-safe.

    Args:
        engine: Opens its links these ways.
        lent: Links over channels that the client lends.
        request: Sends the client a request whose reply nobody needs: what Ray carries, and lacks.
        kept: State of a detached pool; None for another one.
    """

    def __init__(
        self,
        config: HeadConfig,
        engine: DirectEngine,
        turns: ClientTurns,
        *,
        lent: LentLinks,
        request: Callable[..., object],
        kept: KeptCalls | None,
    ) -> None:
        self._config, self._turns, self._lent = config, turns, lent
        self._request, self._kept = request, kept
        self._ledger, self._repair = engine.ledger, engine.link_repair
        self.are_open = threading.Event()
        """Set when the links to all nodes are open or given up, after a head was killed; else from the beginning."""
        self._by_ray = RayWays(
            lambda machine: partial(self._lend, machine),
            self._move,
            lacks=partial(request, "ray_lacks"),
            carries=self._on_carried,
        )
        self._driver = RayDriver(self._by_ray, self._on_lost)
        self._keys: tuple[str, ...] = ()
        """Keys of the Ray that stands, by which the next client lets nodes in; see `RayRaiser`. In no file."""
        self._lost: tuple[str, str] | None = None
        """Folder of the last Ray and the reason of its end; None while there may be one."""
        engine.nodes.opener.way_to = self._way_to

    def is_beside(self, machine: Machine) -> bool:
        """Return whether a machine is the one of the head."""
        return machine.folder == self._config.node_folder

    def _way_to(self, machine: Machine) -> Connect:
        if self.is_beside(machine):
            return partial(CommandEnds, command_to(machine))
        return self._by_ray.way_to(machine)

    def _lend(self, machine: Machine) -> DialledEnds:
        """Open a channel that the client lends. Raises Unreachable if a detached pool has no client at the moment."""
        if self._turns.is_detached and not self._turns.is_linked:
            text = f"node {machine.node}: Ray does not reach it, and no client lends a channel; attach to the pool"
            raise Unreachable(text, node=None)
        return self._lent.way_to(machine)()

    def lose(self, node: int, *, will_return: bool) -> None:
        """Forget the way to a lost node."""
        self._by_ray.lose(node, will_return=will_return)

    def close(self) -> None:
        """End the driver, and all channels that the client lends."""
        self._driver.stop()
        self._lent.close()

    # Ray ------------------------------------------------------------------------------------------------------------

    def go_on(self, machines: Sequence[Machine]) -> float:
        """Reach nodes by the Ray of an earlier process of this head, if it had one.

        Return the time (monotonic) until which those that Ray does not reach may be tried.
        """
        state = {} if self._kept is None else self._kept.state
        # Nothing renews a lease meanwhile, the own one included: half of it is for all that comes next.
        began, limit_s = time.monotonic(), min((machine.lease_s for machine in machines), default=0.0) / 2
        if "ray" in state:  # first, because the next client adopts a Ray that carries all links
            self._driver.start(DriverOrder(**state["ray"]))
            others = [machine for machine in machines if not self.is_beside(machine)]
            self._by_ray.await_ready(others, limit_s * _RAY_FIRST)
        return began + limit_s

    def _move(self, node: int) -> None:
        """Dial the link to a node again, because Ray reaches it."""
        if not self.are_open.is_set():
            self.are_open.wait()  # nobody watches the links yet; the head opens them, or its process ends
            if node in self._by_ray.by_ray:
                return
        self._repair.move(node)

    def drive(self, python: str, folder: str, here: str, address: str) -> None:
        """Use a Ray that stands from now on. Raises UsageError if a detached pool has no room to note it."""
        order = DriverOrder(python=python, folder=folder, here=here, address=address, pool=self._config.pool)
        if self._kept is not None:
            with self._ledger:
                self._kept.note(ray=asdict(order))
        self._lost, self._keys = None, ()
        self._driver.start(order)

    def let_go(self) -> None:
        """Reach all nodes the other way from now on, because Ray ends."""
        self._driver.stop()

    def keep_keys(self, *keys: str) -> None:
        """Keep the keys of the Ray that stands, for the next client of a detached pool."""
        self._keys = keys

    def _on_carried(self, by_ray: frozenset[int], missing: frozenset[int]) -> None:
        self._request("ray_carries", sorted(by_ray), sorted(missing))
        if by_ray and not missing:
            self.go_alone()

    def go_alone(self) -> None:
        """Note that a detached pool needs no client from now on: the head reaches all nodes."""
        with self._ledger:
            if self._kept is not None and not self._turns.goes_alone:
                self._turns.goes_alone = True
                with contextlib.suppress(UsageError):  # the disk is full; the next head finds out itself
                    self._kept.note(goes_alone=True)

    def _on_lost(self, folder: str, why: str) -> None:
        self._lost = folder, why
        self._by_ray.is_lost()
        self._request("ray_is_lost", folder, why)

    def tell_of_ray(self) -> None:
        """Tell a client what it may have missed while the head was away."""
        self._request("ray_carries", sorted(self._by_ray.by_ray), sorted(self._by_ray.missing))
        if self._lost is not None:
            self._request("ray_is_lost", *self._lost)

    def ray_there(self) -> dict[str, Any]:
        """Return what the next client of a detached pool needs to know about Ray."""
        state = {} if self._kept is None else self._kept.state
        order = state.get("ray", {})
        return {
            "address": order.get("address", ""),
            "companions": state.get("companions", {}),
            "carries": bool(order) and not self._by_ray.missing and self._lost is None,
            "keys": self._keys if self._lost is None else (),
        }
