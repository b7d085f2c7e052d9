"""Keep objects on nodes: load a model once, and let calls change state there.

python examples/43_actors.py
"""

from __future__ import annotations

import os
from typing import Self

import skyward as sky


class Model(sky.ActorBase):
    """Model that is loaded once, by its constructor, in a process of its own."""

    def __init__(self, path: str, *, scale: float = 1.0) -> None:
        self.path = path
        self.scale = scale  # a real one loads its weights here

    def __enter__(self) -> Self:
        print(f"{self.path} is loaded")
        return self

    def __exit__(self, *_: object) -> None:
        print(f"{self.path} is freed")

    @sky.compute
    def predict(self, x: float) -> float:
        return self.scale * x

    @sky.compute
    def tune(self, scale: float) -> float:
        self.scale = scale
        return scale

    @sky.compute
    def crash(self) -> None:
        os._exit(1)


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        with Model("a.pt", scale=2.0) >> pool as model:
            print("one call:", model.predict(3.0) >> pool)
            futures = [model.predict(1.0) > pool, model.tune(5.0) > pool, model.predict(1.0) > pool]
            print("in order:", [future.result() for future in futures])

        models = [Model("b.pt", scale=10.0) >> pool for _ in range(2)]
        print("shared by two:", pool.map([model.predict for model in models], [1.0, 2.0, 3.0]))

        named = Model.with_options(name="main", max_restarts=1)("c.pt") >> pool
        named.tune(7.0) >> pool
        print("by name:", pool.actor("main").predict(1.0) >> pool)
        try:
            named.crash() >> pool
        except sky.errors.ActorLost as error:
            print("lost:", error.reason)
        print("after the restart:", named.predict(1.0) >> pool)


if __name__ == "__main__":
    main()
