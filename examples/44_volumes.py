"""Keep files on the nodes between pools: a volume is a folder that outlives calls, pools and programs.

python examples/44_volumes.py
"""

from __future__ import annotations

import os

import skyward as sky


@sky.compute
def prepare(text: str) -> str:
    file = sky.volume("/data") / "words.txt"
    if file.exists():
        return "found"
    part = file.with_suffix(f".{os.getpid()}")  # renamed when it is complete, so that nobody reads half of it
    part.write_text("\n".join(text.split()))
    part.replace(file)
    return "made"


@sky.compute
def count() -> int:
    return len((sky.volume("/data") / "words.txt").read_text().splitlines())


def main() -> None:
    volumes = {"/data": sky.Volume("skyward-example")}
    with sky.ComputePool(sky.Local(), volumes=volumes) as pool:
        print("first pool:", prepare("the sky is the limit") >> pool)
    with sky.ComputePool(sky.Local(), nodes=2, volumes=volumes) as pool:
        print("second pool:", prepare("not used") >> pool, count() @ pool)


if __name__ == "__main__":
    main()
