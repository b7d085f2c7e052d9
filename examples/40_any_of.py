"""Any of several sources: one table of offers, and the first source that has machines wins.

python examples/40_any_of.py             # two clouds in memory, whose machines are this one
python examples/40_any_of.py gpu1 gpu2   # your own hosts if they answer, otherwise Amazon EC2; may cost a few cents
"""

from __future__ import annotations

import sys
from typing import Any

import skyward as sky
from skyward.testing import FakeCloud, FakeFaults, FakeProvider, FastClock


@sky.compute
def square(x: int) -> int:
    return x * x


def sources_of(hosts: list[str]) -> list[Any]:
    if hosts:
        return [sky.SSH(hosts=hosts), sky.AWS(region="us-east-1"), sky.AWS(region="eu-west-1")]
    spot_is_gone = FakeFaults(no_capacity=frozenset({("small", "north", True)}))
    north = FakeCloud(FastClock(), account="north", zones=["north"], faults=spot_is_gone)
    south = FakeCloud(FastClock(), account="south", zones=["south"])
    return [FakeProvider(api=cloud, has_agents=True) for cloud in (north, south)]


def main() -> None:
    sources = sources_of(sys.argv[1:])
    pool = sky.ComputePool(any_of=sources, selection="cheapest", nodes=2, vcpus=2, max_hourly_cost=1.0, logs=False)
    for offer in pool.offers()[:4]:  # all sources in one table; nothing is rented
        kind = "spot" if offer.is_spot else "on demand"
        print(f"{offer.instance_type:6} {offer.zone:6} {kind:10} {offer.price_usd_per_hour:.3f} USD per hour")

    with pool:
        print("squares:", pool.map(square, range(5)))
    zones = [offer.zone for offer in pool.offers()[:2]]
    print("the next pool tries first:", zones[0])  # the full offer is remembered for a while

    try:
        sky.ComputePool(any_of=sources, vcpus=1000).start()
    except sky.errors.NoCapacity as error:
        print(error)


if __name__ == "__main__":
    main()
