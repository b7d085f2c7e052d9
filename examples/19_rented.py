"""Rented machines: what they would cost, what would be asked for, and a budget that ends them before it is spent.

python examples/19_rented.py             # a cloud in memory, whose machines are this one
python examples/19_rented.py us-east-1   # Amazon EC2, with your own credentials; costs a few cents
"""

from __future__ import annotations

import sys
from typing import Any

import skyward as sky
from skyward.testing import FakeCloud, FakeProvider, FastClock


@sky.compute
def square(x: int) -> int:
    return x * x


def provider_of(region: str | None) -> Any:
    if region is not None:
        return sky.AWS(region=region)
    return FakeProvider(api=FakeCloud(FastClock()), has_agents=True)


def main() -> None:
    region = sys.argv[1] if len(sys.argv) > 1 else None
    pool = sky.ComputePool(
        provider_of(region),
        nodes=2,
        vcpus=2,
        allocation="spot-if-available",  # spot machines, and others where there are none
        max_hourly_cost=1.0,  # USD, the whole pool: a dearer offer is never taken
        budget_usd=0.50,  # the pool is closed before this is spent
    )
    # Until here nothing was asked of anybody that could cost money.
    forecast = pool.forecast()
    print(f"{forecast.nodes} x {forecast.offer.instance_type}: {forecast.price_usd_per_hour:.3f} USD per hour")
    print(f"a ten-minute run costs about {forecast.after(600):.3f} USD")
    print("it would ask for:", *(call.operation for call in pool.plan()))

    with pool:  # rented here ...
        print("squares:", pool.map(square, range(8)))
    print(f"the whole run cost {pool.cost_usd:.4f} USD")  # ... and known to be gone here

    try:
        sky.ComputePool(provider_of(region), nodes=200, vcpus=2, budget_usd=0.01).start()
    except sky.errors.BudgetExceeded as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
