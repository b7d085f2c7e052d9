"""A training loop of one's own with Hugging Face Accelerate, on two nodes: scikit-learn's digits.

python examples/16_accelerate.py
"""

from __future__ import annotations

import skyward as sky


@sky.compute
@sky.integrations.accelerate(backend="gloo", seed=0)  # the same first weights in every rank
@sky.stdout(only="head")
def train(epochs: int, learning_rate: float) -> tuple[float, int, int]:
    import torch
    from accelerate import Accelerator
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch.utils.data import DataLoader, TensorDataset

    x, y = load_digits(return_X_y=True)
    parts = train_test_split(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y), test_size=449, random_state=0)
    train_data, test_data = TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])

    accelerator = Accelerator()  # one process of the world that stands
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        network,
        torch.optim.Adam(network.parameters(), lr=learning_rate),
        DataLoader(train_data, batch_size=32, shuffle=True),
        DataLoader(test_data, batch_size=32),
    )
    loss_of = torch.nn.CrossEntropyLoss()

    for epoch in range(epochs):
        losses = []
        for inputs, labels in train_loader:  # the batches of this rank
            optimizer.zero_grad()
            loss = loss_of(model(inputs), labels)
            accelerator.backward(loss)  # averages the gradients of all ranks
            optimizer.step()
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
        print(f"epoch {epoch + 1:2d}  loss {mean:.4f}", flush=True)

    hits, seen = 0, 0
    model.eval()
    with torch.no_grad():
        for inputs, labels in test_loader:
            # 449 rows do not divide by two ranks. Accelerate fills the last batch up, and takes the filling out here.
            guesses, truth = accelerator.gather_for_metrics((model(inputs).argmax(1), labels))
            hits += int((guesses == truth).sum())
            seen += len(truth)
    return hits / seen, seen, accelerator.num_processes


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        results = train(epochs=12, learning_rate=3e-3) @ pool
        accuracy, seen, processes = results[0]
        assert results[1] == results[0]
        print(f"trained by {processes} processes: test accuracy {accuracy:.3f} of {seen} digits")


if __name__ == "__main__":
    main()
