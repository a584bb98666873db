"""Tensor parallel: `torchrun --nproc-per-node 2 examples/distributed/tensor_parallel.py --backend multiring`.

Two ranks share a block, and between its layers each of them has a part of the sequences. With four ranks there are two
such pairs, and FSDP2 shards the parameters over the pairs.
"""

import torch
import torch.distributed as dist
from steps import finish, parser, train  # type: ignore[import-not-found] # beside this file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

BATCH, SEQUENCE, FEATURES, CLASSES = 4, 8, 16, 4  # BATCH: samples of all ranks together
TENSOR = 2  # the number of ranks that share a block


class Block(nn.Module):
    """A transformer's feed-forward block, with one layer before it and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 32)
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.leave = nn.Linear(32, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of shape (batch, sequence, classes) for inputs of shape (batch, sequence, features)."""
        hidden = self.enter(inputs)
        hidden = hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        logits: Tensor = self.leave(hidden)
        return logits


PLAN = {
    "enter": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "leave": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def main() -> None:
    """Train, and print the losses."""
    options = parser().parse_args()

    dist.init_process_group(options.backend)
    pairs = dist.get_world_size() // TENSOR
    mesh = init_device_mesh("cpu", (pairs, TENSOR), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = Block()
    parallelize_module(model, mesh["tensor"], PLAN)
    if pairs > 1:
        fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pair = mesh["data"].get_local_rank()
    losses = []
    for _ in range(options.steps):
        inputs = torch.randn(BATCH, SEQUENCE, FEATURES)
        labels = inputs[..., :CLASSES].argmax(-1)
        logits = model(inputs[pair::pairs])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[pair::pairs].flatten())
        losses.append(train(optimizer, loss, mesh["data"].get_group()))
    finish(losses)


if __name__ == "__main__":
    main()
