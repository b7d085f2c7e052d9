"""Code that a user may write, with its types. mypy finds nothing here, and it is never run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import skyward as sky


@sky.compute
def bare(count: int, *, name: str = "x") -> list[str]:
    return [name] * count


@sky.compute(timeout_s=10, retries=1, retry_on=ConnectionError)
def with_options(count: int) -> float:
    return count / 2


@sky.compute
@sky.integrations.torch
def trained(epochs: int) -> dict[str, float]:
    return {"loss": 1 / epochs}


@sky.compute
@sky.integrations.torch(backend="gloo", processes_per_node=2)
@sky.stdout(only="head")
@sky.silent
def stacked(epochs: int, rate: float = 0.1) -> bytes:
    return bytes(epochs)


@sky.compute
@sky.integrations.transformers(seed=1)
@sky.integrations.accelerate
@sky.integrations.lightning
def tuned(epochs: int) -> list[float]:
    return [1.0] * epochs


@sky.compute
@sky.integrations.jax(processes_per_node=2, local_device_count=4)
def sharded(epochs: int) -> list[float]:
    return [1.0] * epochs


@sky.compute
@sky.integrations.diloco(sync_every=100, min_workers=2, outer_lr=0.5)
def loosely_joined(epochs: int) -> list[float]:
    return [1.0] * epochs


@sky.compute
@sky.integrations.keras(backend="torch", seed=1, distribution="data_parallel")
@sky.integrations.tensorflow
def fitted(epochs: int) -> list[float]:
    return [1.0] * epochs


@sky.compute
@sky.integrations.torch(returns="ranks", processes_per_node=2)
def of_all_ranks(epochs: int) -> float:
    return 1 / epochs


@sky.compute(timeout_s=10)
@sky.integrations.jax(returns="head")
def of_the_head(epochs: int) -> float:
    return 1 / epochs


@sky.compute
def counted(limit: int) -> Iterator[int]:
    yield from range(limit)


@sky.compute
def counted_once() -> int:
    return 1


@sky.compute
def joined(count: int, names: list[str], rate: float = 0.1) -> str:
    return f"{count} {names} {rate}"


@sky.compute(nodes=2, gpus=1)
def on_two(epochs: int) -> float:
    return 1 / epochs


@sky.compute(nodes=2)
@sky.integrations.torch(returns="ranks")
def ranks_on_two(epochs: int) -> float:
    return 1 / epochs


def plain(x: int) -> str:
    return str(x)


assert_type(bare(2), sky.PendingCompute[list[str]])
assert_type(bare(2, name="y"), sky.PendingCompute[list[str]])
assert_type(bare.local(2, name="y"), list[str])
assert_type(with_options(1), sky.PendingCompute[float])
assert_type(with_options.with_options(timeout_s=1)(2), sky.PendingCompute[float])
assert_type(loosely_joined(3), sky.PendingCompute[list[float]])
assert_type(trained(3), sky.PendingCompute[dict[str, float]])
assert_type(stacked(3, rate=0.5), sky.PendingCompute[bytes])
assert_type(stacked.local(3), bytes)
assert_type(on_two(3), sky.PendingCompute[list[float]])
assert_type(on_two.local(3), float)
assert_type(on_two.with_options(nodes=3, retries=1)(3), sky.PendingCompute[list[float]])
assert_type(on_two.with_timeout(9).local(3), float)
assert_type(with_options.with_options(nodes=2)(3), sky.PendingCompute[list[float]])
assert_type(with_options.with_options(nodes=2).local(3), float)
assert_type(with_options.with_options(nodes=2).with_options(retries=1).local(3), float)
assert_type(of_all_ranks.with_options(nodes=2).local(3), sky.RankValues[float])
assert_type(sharded(3), sky.PendingCompute[list[float]])
assert_type(fitted(3), sky.PendingCompute[list[float]])
assert_type(tuned(3), sky.PendingCompute[list[float]])

with sky.ComputePool(provider=sky.Local(lease_s=2.0), nodes=2, concurrency=2) as pool:
    assert_type(pool, sky.ComputePool)
    assert_type(bare(2) >> pool, list[str])
    assert_type(bare(2) >> sky, list[str])
    assert_type(bare(2) @ pool, list[list[str]])
    assert_type(bare(2) > pool, sky.Future[list[str]])
    assert_type((bare(2) > sky).why_waiting, str)
    assert_type(bare(2) >> pool.any(2), list[list[str]])
    assert_type(bare(2) > pool.any(2), sky.Future[list[list[str]]])
    assert_type(bare(2) @ pool.any(2), list[list[str]])
    assert_type(of_all_ranks(1) >> pool.any(2), sky.RankValues[float])
    assert_type((bare(2) & bare(3)) > pool, sky.Future[tuple[Any, ...]])
    assert_type(pool.run(trained(1)), dict[str, float])
    assert_type(pool.submit(stacked(1)), sky.Future[bytes])
    assert_type(pool.broadcast(stacked(1)), list[bytes])
    assert_type(of_all_ranks(1) @ pool, sky.RankValues[float])
    assert_type(of_all_ranks(1) >> pool, sky.RankValues[float])
    assert_type(pool.broadcast(of_all_ranks(1)), sky.RankValues[float])
    assert_type(pool.broadcast(of_all_ranks, 1), sky.RankValues[float])
    assert_type(of_the_head(1) @ pool, list[float])
    assert_type(of_the_head(1) >> pool, float)
    assert_type(counted(3) >> pool, Iterator[int])
    assert_type(pool.map(plain, [1, 2]), list[str])
    assert_type(pool.map(with_options, [1, 2]), list[float])
    assert_type(on_two(1) >> pool, list[float])
    assert_type(on_two(1) > pool, sky.Future[list[float]])
    assert_type(pool.map(on_two, [1, 2]), list[list[float]])
    assert_type(ranks_on_two(1) >> pool, sky.RankValues[float])
    assert_type(pool.imap(plain, range(3)), Iterator[str])
    assert_type(pool.executor().submit(plain, 1), sky.Future[str])
    assert_type(with_options(counted_once()), sky.PendingCompute[float])
    assert_type(with_options(counted_once()) >> pool, float)
    assert_type(bare(counted_once(), name="y"), sky.PendingCompute[list[str]])
    assert_type(joined(1, bare(2)), sky.PendingCompute[str])
    assert_type(joined(counted_once(), bare(2), rate=0.5), sky.PendingCompute[str])
    assert_type(stacked(counted_once(), 0.5), sky.PendingCompute[bytes])
    kept = bare(2).keep() >> pool
    assert_type(kept, sky.Ref[list[str]])
    assert_type(kept.get(), list[str])
    assert_type(bare(2).keep() @ pool, list[sky.Ref[list[str]]])
    assert_type(pool.put(3, nodes=[0]), sky.Ref[int])
    assert_type(joined(pool.put(3), kept), sky.PendingCompute[str])
    group = bare(1) & with_options(2)
    assert_type(group, sky.PendingComputeGroup)
    assert_type(sky.gather(bare(1), with_options(2), stream=True), sky.PendingComputeGroup)

assert_type(sky.once("model", lambda: [1, 2]), list[int])
assert_type(sky.instance_info(), sky.InstanceInfo | None)
assert_type(sky.accelerators.Accelerator.from_name("A100"), sky.Accelerator)
if sky.is_head:
    assert_type(sky.is_head(), bool)


scores = sky.dict[str, int]("scores")
assert_type(scores["a"], int)
assert_type(scores.get("a"), int | None)
assert_type(scores.pop("a", 1), int)
assert_type(scores.items(), list[tuple[str, int]])
assert_type(scores.compare_and_set("a", 1, 2), bool)
assert_type(scores.change("a", lambda value: value + 1), int)
assert_type(list(scores), list[str])
assert_type(sky.list[float]("losses")[-1], float)
assert_type(sky.list[float]("losses")[1:], list[float])
assert_type(sky.set[str]("seen").members(), set[str])
assert_type(sky.counter("n").increment(), int)
assert_type(sky.queue[str | None]("work", 4).get(timeout_s=1), str | None)
with sky.lock("lock") as fence:
    assert_type(fence, int)
assert_type(sky.barrier("b", 2).wait(timeout_s=1.5), int)
here: sky.dict[str, bytes] = pool.dict("here")
assert_type(here["x"], bytes)


async def asynchronous_state(queue: sky.queue[str]) -> None:
    assert_type(await queue.get.aio(timeout_s=1), str)
    assert_type(await scores.get.aio("a", 0), int | None)
    async with sky.semaphore("s", 2) as permit:
        assert_type(permit, int)


async def asynchronous(pool: sky.ComputePool) -> None:
    value: list[str] = await pool.run_async(bare(1))
    assert value


class Scorer(sky.ActorBase):
    def __init__(self, path: str, *, scale: float = 1.0) -> None:
        self.path = path

    @sky.compute
    def predict(self, x: float, *, top: int = 1) -> list[float]:
        return [x] * top

    @sky.compute
    def stream(self, limit: int) -> Iterator[float]:
        yield from map(float, range(limit))


@sky.compute
def scored(scorer: Scorer, xs: list[float], pool: sky.ComputePool) -> float:
    assert_type(scorer.predict(1.0, top=2) >> pool, list[float])
    assert_type(scorer.predict(1.0) > pool, sky.Future[list[float]])
    assert_type((scorer.predict(1.0) & scorer.predict(2.0)) > pool, sky.Future[tuple[Any, ...]])
    return sum(sum(scorer.predict(x) >> pool) for x in xs)


with sky.ComputePool(provider=sky.Local()) as pool:
    scorer = Scorer("weights.pt", scale=2.0) >> pool
    assert_type(scorer, Scorer)
    assert_type(scorer.predict(1.0, top=2), sky.PendingCompute[list[float]])
    assert_type(scorer.predict(1.0) >> pool, list[float])
    assert_type(scorer.predict(1.0) > pool, sky.Future[list[float]])
    assert_type(scorer.predict.with_options(timeout_s=1)(1.0), sky.PendingCompute[list[float]])
    assert_type(scorer.stream(3) >> pool, Iterator[float])
    assert_type(pool.map(scorer.predict, [1.0, 2.0]), list[list[float]])
    assert_type(pool.map([scorer.predict, scorer.predict], [1.0, 2.0]), list[list[float]])
    assert_type(scored(scorer, [1.0], pool), sky.PendingCompute[float])
    assert_type(scored(scorer, [1.0], pool) >> pool, float)
    with Scorer.with_options(max_restarts=1)("weights.pt") >> pool as named:
        assert_type(named, Scorer)
