"""Context parallel: `torchrun --nproc-per-node 2 examples/distributed/context_parallel.py --backend multiring`.

Each rank has a part of every sequence. torch gathers the keys and values for its attention, and scatters their
gradients. torch does this for flex attention, which has no backward on CPU, so this example uses plain attention
instead. torch's other way, `context_parallel()` around scaled_dot_product_attention, has kernels for CUDA only.
"""

import torch
import torch.distributed as dist
from steps import finish, parser, train  # type: ignore[import-not-found] # beside this file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._attention import _context_parallel_shard, _ContextParallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

BATCH, SEQUENCE, FEATURES, HEADS, CLASSES = 2, 24, 16, 2, 4


class Attention(nn.Module):
    """Causal attention; the first query is at position `start`."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention's output, of the shape of `query`: (batch, heads, own positions, features)."""
        rows = torch.arange(query.shape[2]) + self.start
        mask = rows[:, None] >= torch.arange(key.shape[2])
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Block(nn.Module):
    """Attention between two linear layers."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 3 * HEADS * FEATURES)
        self.attention = Attention(start)
        self.leave = nn.Linear(HEADS * FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of shape (batch, positions, classes) for inputs of shape (batch, positions, features)."""
        heads = self.enter(inputs).unflatten(-1, (3, HEADS, FEATURES)).permute(2, 0, 3, 1, 4)
        logits: Tensor = self.leave(self.attention(*heads).transpose(1, 2).flatten(2))
        return logits


def main() -> None:
    """Train, and print the losses."""
    options = parser().parse_args()

    dist.init_process_group(options.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("context",))
    torch.manual_seed(0)
    block = Block(rank * SEQUENCE // ranks)
    parallelize_module(block.attention, mesh, _ContextParallel(2, _ContextParallel.AttentionType.FLEX))
    model = DistributedDataParallel(block)  # parameters are the same on all ranks, gradients differ
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(options.steps):
        inputs = torch.randn(BATCH, SEQUENCE, FEATURES)
        labels = inputs[..., :CLASSES].cumsum(1).argmax(-1)
        own, wanted = _context_parallel_shard(mesh, [inputs, labels], [1, 1])
        assert isinstance(wanted, Tensor)
        loss = nn.functional.cross_entropy(model(own).flatten(0, 1), wanted.flatten())
        losses.append(train(optimizer, loss))
    del model  # before its group; see ddp.py
    finish(losses)


if __name__ == "__main__":
    main()
