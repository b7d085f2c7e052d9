"""Fine-tune a tiny language model with FSDP2: every rank holds half of its weights, gradients and optimizer state.

python examples/10_fsdp_lm.py
"""

from __future__ import annotations

import torch
from torch import nn

import skyward as sky

CONTEXT = 32


class LanguageModel(nn.Module):
    """Rows of bytes in, the mean loss of guessing each next byte out. rows: (B, T + 1) int64 -> () float32"""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(CONTEXT, width)
        layer = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, **layer) for _ in range(depth))
        self.head = nn.Linear(width, 128)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x, following = rows[:, :-1], rows[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), following.flatten())


def text_of(*names: str) -> torch.Tensor:
    """The descriptions of scikit-learn's data sets, as bytes. -> (N,) int64"""
    from sklearn import datasets

    texts = [getattr(datasets, f"load_{name}")().DESCR for name in names]
    return torch.tensor([min(byte, 127) for byte in "".join(texts).encode()])


def train(model: nn.Module, text: torch.Tensor, steps: int, rank: int = 0) -> list[float]:
    """The loss of each step, on this rank's batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    draws = torch.Generator().manual_seed(rank)  # other batches on each rank
    device = next(model.parameters()).device
    losses = []
    for _ in range(steps):
        begins = torch.randint(len(text) - CONTEXT - 1, (16,), generator=draws)
        loss = model(torch.stack([text[begin : begin + CONTEXT + 1] for begin in begins]).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@sky.compute
@sky.integrations.torch(seed=0)
def pretrain(steps: int) -> dict[str, torch.Tensor]:
    model = LanguageModel()
    train(model, text_of("iris", "wine", "diabetes", "breast_cancer"), steps)
    return model.state_dict()


@sky.compute
@sky.integrations.torch
def fine_tune(weights: dict[str, torch.Tensor], steps: int) -> tuple[dict[str, torch.Tensor], float, float, float]:
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"  # the rank's own GPU; gloo shards on the CPU
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    with torch.device("meta"):  # shapes only: no rank ever makes room for the whole model
        model = LanguageModel()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)  # gathered when it is its turn, and let go again
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    states.set_model_state_dict(model, weights, options=options)

    losses = torch.tensor(train(model, text_of("digits"), steps, rank=dist.get_rank()), device=device)
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    own = sum(parameter.to_local().numel() for parameter in model.parameters())
    share = own / sum(parameter.numel() for parameter in model.parameters())
    # Gathered on the first rank; the others get an empty dictionary.
    return states.get_model_state_dict(model, options=options), losses[0].item(), losses[-5:].mean().item(), share


def main() -> None:
    with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        weights = pretrain(steps=80) >> pool  # one node, a world of one
        (tuned, before, after, share), (nothing, *_) = fine_tune(weights, steps=40) @ pool
        print(f"loss on the new text: {before:.2f} -> {after:.2f}")
        print(f"each rank held {share:.0%} of the parameters")
        model = LanguageModel()
        model.load_state_dict(tuned)
        print(f"gathered on the head: {sum(w.numel() for w in tuned.values()):,} parameters; elsewhere: {len(nothing)}")


if __name__ == "__main__":
    main()
