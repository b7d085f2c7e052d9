"""Cost of a pool's machines from creation until they are gone, and the pool's end before its budget is spent."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..core.records import dataclass
from ..errors import BudgetExceeded
from ..events import BudgetWarning, CostUpdated, Emit, Event, InstanceLaunched, InstanceTerminated
from ..values.machine import Offer

WARN_AT = 0.8
"""Fraction of the budget at which a warning is emitted."""
_LONGEST_LOOK_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Cost of a pool with its first affordable offer, all nodes together, in USD. Other offers may cost more.

    Args:
        offer: The offer.
        nodes: Number of nodes.
        price_usd_per_hour: Price of all nodes.
        minimum_usd: Cost even if the pool is closed at once.
        lasts_s: Seconds until `budget_usd` is spent; None without a budget.
    """

    offer: Offer
    nodes: int
    price_usd_per_hour: float
    minimum_usd: float
    lasts_s: float | None = None

    def after(self, seconds: float) -> float:
        """Return the cost of running for a number of seconds, in USD."""
        return max(self.minimum_usd, self.price_usd_per_hour * seconds / 3600)


def affordable(offers: Sequence[Offer], *, nodes: int, minimum_s: float, budget_usd: float | None) -> list[Offer]:
    """Return the offers whose machines can run `minimum_s` within the budget. Raises BudgetExceeded if none can."""
    if budget_usd is None:
        return list(offers)
    fitting = [o for o in offers if o.price_usd_per_hour * nodes * minimum_s / 3600 < budget_usd]
    if not fitting:
        least = min(offers, key=lambda o: o.price_usd_per_hour)
        cost = least.price_usd_per_hour * nodes * minimum_s / 3600
        raise BudgetExceeded(
            f"budget_usd={budget_usd:g}: {nodes} x {least.instance_type} at {least.price_usd_per_hour:g} USD/h cost "
            f"{cost:.4g} USD even if they are returned at once ({minimum_s:g} s), so nothing was launched; raise the "
            "budget, or ask for less",
            budget_usd=budget_usd,
            cost_usd=cost,
        )
    return fitting


def forecast(offers: Sequence[Offer], *, nodes: int, minimum_s: float, budget_usd: float | None) -> Forecast:
    """Forecast the cost with the first affordable offer. Raises BudgetExceeded if there is none."""
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
    """Account of one pool. Thread-safe.

    Each machine costs its offer's price per second, from launch until the provider confirms that it is gone, and at
    least for `minimum_s`. A spot price may move meanwhile; the price agreed at launch counts.

    Args:
        minimum_s: Shortest billed time of a machine.
        ending_s: Time that machines still cost money after the decision to end them.
        budget_usd: Before this is spent, `stop` is called once, in a separate thread; None for never.
        tell: Receives CostUpdated at each change, and BudgetWarning at 80 %.
        stop: Ends the pool.
        clock: Monotonic time in seconds.
        wall_clock: Time in seconds since the epoch, which other processes share.
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
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._minimum_s = minimum_s
        self._ending_s = ending_s
        self._budget_usd = budget_usd
        self._tell = tell
        self._stop = stop
        self._clock = clock
        self._wall_clock = wall_clock
        self._condition = threading.Condition()
        self._running: dict[str, tuple[float, float]] = {}
        self._ended_usd = 0.0
        self._recorded_at = math.inf
        """Time of the record that `resume` took; infinite for none."""
        self._has_warned = False
        self._is_watching = False

    def take(self, event: Event) -> None:
        """Record an event of the pool, if it changes the cost."""
        if isinstance(event, InstanceLaunched):
            with self._condition:
                self._running[event.instance] = (self._clock(), event.price_usd_per_hour)
                self._begin_watch()
        elif isinstance(event, InstanceTerminated):
            self._end(event.instance)
        else:
            return
        self._tell(CostUpdated(price_usd_per_hour=self.price_usd_per_hour, spent_usd=self.spent_usd))

    def facts(self) -> dict[str, Any]:
        """Return what another process needs to go on counting, as plain data."""
        with self._condition:
            now, wall = self._clock(), self._wall_clock()
            running = {name: (wall - (now - began), price) for name, (began, price) in self._running.items()}
            return {"ended_usd": self._ended_usd, "running": running, "at": wall}

    def resume(self, facts: Mapping[str, Any]) -> None:
        """Go on counting where another process has begun: from its `facts`."""
        with self._condition:
            now, wall = self._clock(), self._wall_clock()
            self._ended_usd = facts["ended_usd"]
            self._recorded_at = now - (wall - facts["at"]) if "at" in facts else math.inf  # not in older records
            self._running = {name: (now - (wall - began), price) for name, (began, price) in facts["running"].items()}
            self._begin_watch()
        self._tell(CostUpdated(price_usd_per_hour=self.price_usd_per_hour, spent_usd=self.spent_usd))

    def keep_only(self, instances: Collection[str], *, most_s: float = math.inf) -> None:
        """End the accounts of all other machines: the process died that had launched them, and they have ended.

        They are charged for at most `most_s` and the time of their end after the record that `resume` took. A node on
        record that is found gone is charged until now, because it lived on with its head: nobody here knows how long.
        """
        with self._condition:
            for instance in self._running.keys() - set(instances):
                self._end(instance, self._recorded_at + most_s + self._ending_s)

    def _end(self, instance: str, at: float = math.inf) -> None:
        """End the account of a machine that is gone since `at` at the latest."""
        with self._condition:
            began, price = self._running.pop(instance, (0.0, 0.0))
            self._ended_usd += self._cost(began, price, min(at, self._clock()))
            self._condition.notify_all()

    def leave(self) -> None:
        """Stop counting, because the machines go on without this process."""
        with self._condition:
            self._ended_usd = self.spent_usd
            self._running.clear()
            self._condition.notify_all()

    def lasts_s(self, ending_s: float) -> float | None:
        """Return for how many seconds the budget lasts if machines then take this long to end; None for no limit."""
        per_s = self.price_usd_per_hour / 3600
        if self._budget_usd is None or not per_s:
            return None
        return (self._budget_usd - self.spent_after(ending_s)) / per_s

    @property
    def price_usd_per_hour(self) -> float:
        """Price of all current machines."""
        with self._condition:
            return sum(price for _, price in self._running.values())

    @property
    def spent_usd(self) -> float:
        """Cost so far."""
        return self.spent_after(0.0)

    def spent_after(self, seconds: float) -> float:
        """Return the cost after a number of seconds, if nothing changes."""
        with self._condition:
            at = self._clock() + seconds
            return self._ended_usd + sum(self._cost(began, price, at) for began, price in self._running.values())

    @property
    def left_usd(self) -> float | None:
        """Rest of the budget after ending all machines now, which takes time and money; None for no limit."""
        return None if self._budget_usd is None else self._budget_usd - self.spent_after(self._ending_s)

    def _cost(self, began: float, price: float, at: float) -> float:
        return price * max(self._minimum_s, at - began) / 3600 if price else 0.0

    def _begin_watch(self) -> None:
        """Start the thread that ends the pool, unless it runs. Needs the condition's lock."""
        self._condition.notify_all()
        if self._budget_usd is not None and not self._is_watching:
            self._is_watching = True
            threading.Thread(target=self._watch, name="skyward-budget", daemon=True).start()

    def _watch(self) -> None:
        """Wait until no machine runs, or the budget is about to be spent."""
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
            # Not a daemon thread: the program must not exit before the machines are ended.
            try:
                threading.Thread(target=self._stop, args=(error,), name="skyward-budget-stop").start()
            except RuntimeError:  # no thread can be started, so this one does it
                self._stop(error)

    def _due_s(self) -> float:
        """Return the seconds until the pool must end, and emit the warning when it is due."""
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
            f"budget_usd={self._budget_usd:g}: {spent:.4g} USD are spent, and ending the machines costs the rest, so "
            "the pool was closed; raise the budget to go on",
            budget_usd=self._budget_usd,
            cost_usd=spent,
        )
