"""Train a small network on scikit-learn's digits with DistributedDataParallel, on two nodes.

python examples/06_torch_ddp.py
"""

from __future__ import annotations

import skyward as sky


@sky.compute
@sky.integrations.torch(backend="gloo", seed=0)  # the same first weights in every rank
@sky.stdout(only="head")
def train(epochs: int, learning_rate: float) -> tuple[float, int]:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.25, random_state=0, stratify=y)
    data = TensorDataset(torch.tensor(x_train, dtype=torch.float32), torch.tensor(y_train))
    sampler = DistributedSampler(data, seed=0)  # its rank and world size are those of the process group
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(network)  # averages the gradients of all ranks in every step
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    loss_of = torch.nn.CrossEntropyLoss()

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model(inputs), labels)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(labels), len(labels)])
        dist.all_reduce(total)  # the loss over the data of all ranks, not of this one
        print(f"epoch {epoch + 1:2d}  loss {total[0] / total[1]:.4f}", flush=True)

    with torch.no_grad():
        # Every rank tests its shard; the sums are everybody's.
        inputs, labels = sky.shard(torch.tensor(x_test, dtype=torch.float32), torch.tensor(y_test))
        hits = torch.stack([(network(inputs).argmax(1) == labels).sum(), torch.tensor(len(labels))])
        dist.all_reduce(hits)
    return (hits[0] / hits[1]).item(), dist.get_world_size()


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        # `@` is every node: one world of two ranks. The value of each node is that of its first rank.
        results = train(epochs=12, learning_rate=3e-3) @ pool
        accuracy, world_size = results[0]
        assert results[1] == results[0]
        print(f"trained on {world_size} ranks: test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
