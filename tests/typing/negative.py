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


@sky.compute
def joined(count: int, names: list[str]) -> str:
    return f"{count} {names}"


@sky.compute(nodes=2)
def on_two(count: int) -> bytes:
    return bytes(count)


bare("two")  # error: call-overload
bare()  # error: call-overload
bare(2, title="y")  # error: call-overload
bare.local("two")  # error: arg-type
stacked("three")  # error: call-overload
stacked(3, rate=0.5)  # error: call-overload

bare(stacked(1))  # error: arg-type
bare(2).keep() + 1  # error: operator
joined(1, stacked(1))  # error: arg-type
joined(stacked(1), ["a"])  # error: arg-type

pool = sky.ComputePool(provider=sky.Local())
number: int = bare(2) >> pool  # error: assignment
one: list[str] = bare(2) @ pool  # error: assignment
of_two: bytes = on_two(2) >> pool  # error: assignment
of_two_here: list[list[str]] = bare.with_options(nodes=2).local(2)  # error: assignment
of_two_nodes: list[str] = bare.with_options(nodes=2)(2) >> pool  # error: assignment
bare.with_options(nodes=2).local("two")  # error: arg-type
on_two("two")  # error: call-overload
of_one: list[str] = bare(2) >> pool.any(2)  # error: assignment
(bare(2) > pool).why_waits  # error: attr-defined
waited: float = (bare(2) > pool).why_waiting  # error: assignment
value: bytes = bare(2)  # error: assignment
bare >> pool  # error: operator
bare(pool.put("two"))  # error: arg-type
text: int = pool.run(stacked(1))  # error: assignment
sky.ComputePool(provider=sky.Local(), executor="fibre")  # error: arg-type
sky.ComputePool(provider=sky.Local(), nodez=2)  # error: call-arg
sky.Local(lease="1")  # error: call-arg
sky.compute(retries="often")  # error: call-overload
sky.no_such_name  # error: attr-defined
NoCapacity("none is left", tired=("m5.large",))  # error: call-arg

scores = sky.dict[str, int]("scores")
scores[1] = 1  # error: index
scores["a"] = "b"  # error: assignment
scores.set("a", "b")  # error: arg-type
scores.compare_and_set("a", 1)  # error: call-arg
name: str = scores["a"]  # error: assignment
sky.queue[int]("work").put("text")  # error: arg-type
sky.queue[int]("work").get(timeout=1)  # error: call-arg
sky.barrier("b")  # error: call-arg
sky.dict("x", consistency="strong")  # error: call-arg
pool.lock("x").acquire(False, 1)  # error: call-arg


class Model(sky.ActorBase):
    def __init__(self, path: str) -> None:
        self.path = path

    @sky.compute
    def predict(self, x: float) -> list[float]:
        return [x]


Model(1) >> pool  # error: arg-type
model = Model("weights.pt") >> pool
model.predict("text") >> pool  # error: call-overload
model.predict(1.0, top=2) >> pool  # error: call-overload
wrong: float = model.predict(1.0) >> pool  # error: assignment
model.predict(1.0) + 1  # error: operator
sky.actor(retries=1)  # error: call-overload


@sky.compute
def uses(model: Model, x: float, pool: sky.ComputePool) -> float:
    model.predict("text") >> pool  # error: call-overload
    model.train(x) >> pool  # error: attr-defined
    return model.predict(x) >> pool  # error: return-value


uses(3, 1.0, pool)  # error: call-overload
uses(model, "text", pool)  # error: call-overload
uses(model.predict, 1.0, pool)  # error: call-overload


async def asynchronous() -> None:
    await sky.counter("n").increment.aio("1")  # error: arg-type
