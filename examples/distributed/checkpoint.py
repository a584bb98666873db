"""Distributed checkpoint: save on some ranks, resume on more or fewer ranks.

torchrun --nproc-per-node 2 examples/distributed/checkpoint.py --backend multiring --folder here --steps 10
torchrun --nproc-per-node 3 examples/distributed/checkpoint.py --backend multiring --folder here --resume
"""

import torch
import torch.distributed as dist
from steps import finish, parser, train  # type: ignore[import-not-found] # beside this file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH, FEATURES, CLASSES = 12, 16, 4  # BATCH: samples of all ranks together


def main() -> None:
    """Train, print the losses, and save; with --resume load, train and print."""
    options_of = parser(steps=10)
    options_of.add_argument("--folder", required=True)
    options_of.add_argument("--resume", action="store_true", help="load from the folder instead of saving there")
    options = options_of.parse_args()

    dist.init_process_group(options.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 33), nn.ReLU(), nn.Linear(33, CLASSES))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = torch.zeros((), dtype=torch.int64)
    if options.resume:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        load({"model": of_model, "optimizer": of_optimizer, "done": done}, checkpoint_id=options.folder)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    losses = []
    for _ in range(options.steps):
        inputs = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(int(done)))
        labels = inputs[:, :CLASSES].argmax(1)
        loss = nn.functional.cross_entropy(model(inputs[rank::ranks]), labels[rank::ranks])
        losses.append(train(optimizer, loss))
        done += 1
    if not options.resume:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        save({"model": of_model, "optimizer": of_optimizer, "done": done}, checkpoint_id=options.folder)
    finish(losses)


if __name__ == "__main__":
    main()
