"""GPUs of a node, shared by its slots: every process sees only its own. Without a GPU it runs too, and says so.

python examples/42_gpu_sharing.py
"""

from __future__ import annotations

import os

import skyward as sky


@sky.compute
def describe_node() -> str:
    info = sky.instance_info()
    assert info is not None
    if not info.devices:
        return "no GPU here: calls see none"
    sizes = ", ".join(f"{device.name} ({device.memory_gib:.0f} GiB)" for device in info.devices)
    return f"{len(info.devices)} devices: {sizes}"


@sky.compute
def train(learning_rate: float) -> str:
    """Use the first visible device, as any script does: it is this process's own."""
    info = sky.instance_info()
    assert info is not None
    if not info.devices:
        return f"lr={learning_rate}: on the CPU"
    own = ", ".join(str(device.index) for device in info.devices)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")  # as it was, if all devices of the node are its own
    return f"lr={learning_rate}: GPU {own} of the node, CUDA_VISIBLE_DEVICES {visible}"


def main() -> None:
    with sky.ComputePool(sky.Local()) as pool:  # one slot: a call has all devices of its node
        print(describe_node() >> pool)

    with sky.ComputePool(sky.Local(), concurrency=2) as pool:  # two slots: each has half of them
        for line in pool.map(train, [0.1, 0.01]):
            print(line)


if __name__ == "__main__":
    main()
