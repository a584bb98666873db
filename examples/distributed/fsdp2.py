"""FSDP2 and HSDP: `torchrun --nproc-per-node 2 examples/distributed/fsdp2.py --backend multiring`.

With `--replicas 2` the ranks form two replicas of shards (HSDP). FSDP2 asks its backend for averages; with `--sum`
it asks for sums, and divides by itself.
"""

import torch
import torch.distributed as dist
from steps import finish, parser, train  # type: ignore[import-not-found] # beside this file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH, FEATURES, CLASSES = 12, 16, 4  # BATCH: samples of all ranks together


def main() -> None:
    """Train, and print the losses."""
    options_of = parser()
    options_of.add_argument("--replicas", type=int, default=1)
    options_of.add_argument("--sum", action="store_true")
    options = options_of.parse_args()

    dist.init_process_group(options.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if options.replicas > 1:
        shape = (options.replicas, ranks // options.replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 33), nn.ReLU(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, CLASSES))
    for layer in (*model, model):
        if isinstance(layer, nn.Linear | nn.Sequential):
            fully_shard(layer, mesh=mesh).set_force_sum_reduction_for_comms(options.sum)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(options.steps):
        inputs = torch.randn(BATCH, FEATURES)
        labels = inputs[:, :CLASSES].argmax(1)
        loss = nn.functional.cross_entropy(model(inputs[rank::ranks]), labels[rank::ranks])
        losses.append(train(optimizer, loss))
    finish(losses)


if __name__ == "__main__":
    main()
