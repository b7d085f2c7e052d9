"""Say hello from two nodes: decorate a function, and choose where it runs where you call it.

python examples/01_hello.py
"""

from __future__ import annotations

import os

import skyward as sky


@sky.compute
def hello(name: str) -> str:
    info = sky.instance_info()
    assert info is not None  # it is None only outside a pool
    print(f"saying hello to {name}")  # shown where you are, with the node in front
    return f"hello {name}, from node {info.node} of {info.total_nodes}, process {os.getpid()}"


@sky.compute
def divide(a: float, b: float) -> float:
    return a / b


def main() -> None:
    # Calling a @compute function runs nothing. It makes a value that an operator sends somewhere.
    print(hello("Ada"))

    # Two nodes on this machine: each is a process of its own, as it would be on a machine of its own.
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        print(hello("Ada") >> pool)  # one node; waits for the value

        for greeting in hello("Grace") @ pool:  # every node; a list in the order of the nodes
            print(greeting)

        future = divide(22, 7) > pool  # a concurrent.futures.Future; does not wait
        print(f"22/7 = {future.result():.4f}")

        # What the function raises arrives as itself; the node's traceback is in its notes.
        try:
            divide(1, 0) >> pool
        except ZeroDivisionError as error:
            print(f"divide(1, 0): {type(error).__name__}: {error}")
            print("\n".join(error.__notes__))

    # The function itself is still there.
    print(f"here, without a pool: {divide.local(1, 4)}")


if __name__ == "__main__":
    main()
