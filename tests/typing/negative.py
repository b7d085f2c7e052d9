"""Mistakes that a checker must refuse: exactly the lines that end in `# error: code` have that error."""

from __future__ import annotations

import skyward as sky
from skyward.errors import NoCapacity


@sky.compute
def bare(count: int, *, name: str = "x") -> list[str]:
    return [name] * count


@sky.compute
@sky.integrations.torch(backend="gloo")
@sky.stdout(only="head")
def stacked(epochs: int) -> bytes:
    return bytes(epochs)


bare("two")  # error: arg-type
bare()  # error: call-arg
bare(2, title="y")  # error: call-arg
bare.local("two")  # error: arg-type
stacked("three")  # error: arg-type
stacked(3, rate=0.5)  # error: call-arg

pool = sky.ComputePool(provider=sky.Local())
number: int = bare(2) >> pool  # error: assignment
one: list[str] = bare(2) @ pool  # error: assignment
value: bytes = bare(2)  # error: assignment
bare >> pool  # error: operator
text: int = pool.run(stacked(1))  # error: assignment
sky.ComputePool(provider=sky.Local(), executor="fibre")  # error: arg-type
sky.ComputePool(provider=sky.Local(), nodez=2)  # error: call-arg
sky.Local(lease="1")  # error: call-arg
sky.compute(retries="often")  # error: call-overload
sky.no_such_name  # error: attr-defined
NoCapacity("none is left", tired=("m5.large",))  # error: call-arg
