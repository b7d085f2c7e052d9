"""What a pool's machines cost, from when they are made until they are gone; and its end before its budget's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import BudgetExceeded
from ..events import BudgetWarning, CostUpdated, Emit, Event, InstanceLaunched, InstanceTerminated
from ..values.machine import Offer

__all__ = ["Forecast", "Spending", "affordable", "forecast"]

WARN_AT = 0.8
"""The part of a budget at which it warns."""
_LONGEST_LOOK_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a pool would cost by its first offer, all nodes together; USD. Others may cost more: see `pool.offers()`.

    `minimum_usd`: what it costs even if it is closed at once. `lasts_s`: how long its `budget_usd` lasts, None without.
    """

    offer: Offer
    nodes: int
    price_usd_per_hour: float
    minimum_usd: float
    lasts_s: float | None = None

    def after(self, seconds: float) -> float:
        """The cost of so many seconds, in USD."""
        return max(self.minimum_usd, self.price_usd_per_hour * seconds / 3600)


def affordable(offers: Sequence[Offer], *, nodes: int, minimum_s: float, budget_usd: float | None) -> list[Offer]:
    """Those of which so many machines can run for `minimum_s` within the budget. Raises BudgetExceeded if none can."""
    if budget_usd is None:
        return list(offers)
    fitting = [o for o in offers if o.price_usd_per_hour * nodes * minimum_s / 3600 < budget_usd]
    if not fitting:
        least = min(offers, key=lambda o: o.price_usd_per_hour)
        cost = least.price_usd_per_hour * nodes * minimum_s / 3600
        raise BudgetExceeded(
            f"budget_usd={budget_usd:g}: {nodes} x {least.instance_type} at {least.price_usd_per_hour:g} USD/h cost "
            f"{cost:.4g} USD even if they are given back at once ({minimum_s:g} s); nothing was launched. Raise it, or "
            "ask for less",
            budget_usd=budget_usd,
            cost_usd=cost,
        )
    return fitting


def forecast(offers: Sequence[Offer], *, nodes: int, minimum_s: float, budget_usd: float | None) -> Forecast:
    """Of so many machines by the first offer that is affordable. Raises BudgetExceeded if none is."""
    offer = affordable(offers, nodes=nodes, minimum_s=minimum_s, budget_usd=budget_usd)[0]
    price = offer.price_usd_per_hour * nodes
    return Forecast(
        offer=offer,
        nodes=nodes,
        price_usd_per_hour=price,
        minimum_usd=price * minimum_s / 3600,
        lasts_s=None if budget_usd is None or not price else budget_usd / price * 3600,
    )


class Spending:
    """The account of one pool. Thread-safe.

    Each machine costs the price of its offer from its launch until the provider says that it is gone, by the second,
    and `minimum_s` at least. (A spot price may move meanwhile; what was agreed at the launch is what is counted.)

    Args:
        budget_usd: before so much is spent `stop` is called, once, by a thread of ours; None: never.
        ending_s: machines cost money for so long after the decision to end them.
        tell: is told CostUpdated at each change, and BudgetWarning at 80 %.
    """

    def __init__(
        self,
        *,
        minimum_s: float,
        ending_s: float,
        budget_usd: float | None,
        tell: Emit,
        stop: Callable[[BudgetExceeded], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._minimum_s = minimum_s
        self._ending_s = ending_s
        self._budget_usd = budget_usd
        self._tell = tell
        self._stop = stop
        self._clock = clock
        self._condition = threading.Condition()
        self._running: dict[str, tuple[float, float]] = {}
        self._ended_usd = 0.0
        self._has_warned = False
        self._is_watching = False

    def take(self, event: Event) -> None:
        """An event of the pool; those that change what it costs count."""
        if isinstance(event, InstanceLaunched):
            with self._condition:
                self._running[event.instance] = (self._clock(), event.price_usd_per_hour)
                self._condition.notify_all()
                if self._budget_usd is not None and not self._is_watching:
                    self._is_watching = True
                    threading.Thread(target=self._watch, name="skyward-budget", daemon=True).start()
        elif isinstance(event, InstanceTerminated):
            with self._condition:
                began, price = self._running.pop(event.instance, (0.0, 0.0))
                self._ended_usd += self._cost(began, price, self._clock())
                self._condition.notify_all()
        else:
            return
        self._tell(CostUpdated(price_usd_per_hour=self.price_usd_per_hour, spent_usd=self.spent_usd))

    @property
    def price_usd_per_hour(self) -> float:
        """Of all machines that exist now."""
        with self._condition:
            return sum(price for _, price in self._running.values())

    @property
    def spent_usd(self) -> float:
        """Until now."""
        return self.spent_after(0.0)

    def spent_after(self, seconds: float) -> float:
        """What will have been spent in so many seconds, if nothing changes."""
        with self._condition:
            at = self._clock() + seconds
            return self._ended_usd + sum(self._cost(began, price, at) for began, price in self._running.values())

    @property
    def left_usd(self) -> float | None:
        """Of the budget, with what the machines that run would still cost if they were ended now; None: no limit."""
        return None if self._budget_usd is None else self._budget_usd - self.spent_after(self._ending_s)

    def _cost(self, began: float, price: float, at: float) -> float:
        return price * max(self._minimum_s, at - began) / 3600 if price else 0.0

    def _watch(self) -> None:
        """Until no machine runs, or the budget is as good as spent."""
        with self._condition:
            while self._running:
                wait_s = self._due_s()
                if wait_s <= 0:
                    break
                self._condition.wait(min(wait_s, _LONGEST_LOOK_S))
            self._is_watching = False
            is_over = bool(self._running)
        if is_over:
            error = self._exceeded()
            # Not a daemon: the program must not end in the middle of this.
            try:
                threading.Thread(target=self._stop, args=(error,), name="skyward-budget-stop").start()
            except RuntimeError:  # no more threads: then by this one
                self._stop(error)

    def _due_s(self) -> float:
        """Seconds until the pool must end; warns on the way."""
        assert self._budget_usd is not None
        assert self.left_usd is not None
        per_s = self.price_usd_per_hour / 3600
        if per_s == 0:
            return _LONGEST_LOOK_S
        until_end_s = self.left_usd / per_s
        until_warning_s = (WARN_AT * self._budget_usd - self.spent_usd) / per_s
        if not self._has_warned and min(until_warning_s, until_end_s) <= 0:
            self._has_warned = True
            self._tell(
                BudgetWarning(budget_usd=self._budget_usd, spent_usd=self.spent_usd, seconds_left=max(0.0, until_end_s))
            )
        return until_end_s if self._has_warned else min(until_warning_s, until_end_s)

    def _exceeded(self) -> BudgetExceeded:
        assert self._budget_usd is not None
        spent = self.spent_usd
        return BudgetExceeded(
            f"budget_usd={self._budget_usd:g}: {spent:.4g} USD are spent, and to end the machines costs the rest; the "
            "pool was closed",
            budget_usd=self._budget_usd,
            cost_usd=spent,
        )
