"""A DDP or FSDP2 program that torchrun starts again from its checkpoint, after a rank has killed itself.

    torchrun --nproc-per-node 2 --max-restarts 1 tests/support/restarted_program.py ddp FOLDER RANK

RANK kills itself in a step of the first start; -1 stands for none. Rank 0 prints the losses of all steps.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

BATCH, FEATURES, CLASSES = 24, 16, 4
STEPS, EVERY, KILLED_AT = 12, 5, 8  # EVERY: steps from one checkpoint to the next


def main() -> None:
    """Train from the newest checkpoint on, and print the losses since the first step."""
    kind, folder, victim = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("multiring")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(FEATURES, 33), nn.ReLU(), nn.Linear(33, CLASSES))
    if kind == "ddp":
        model: nn.Module = DistributedDataParallel(network)
    else:
        model = network
        fully_shard(network, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = torch.zeros(STEPS, dtype=torch.float64)
    done = max((int(each.name) for each in folder.iterdir() if (each / ".metadata").exists()), default=0)
    if done:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        load({"model": of_model, "optimizer": of_optimizer, "losses": losses}, checkpoint_id=folder / str(done))
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    for step in range(done, STEPS):
        if step == KILLED_AT and rank == victim and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step))
        labels = inputs[:, :CLASSES].argmax(1)
        loss = nn.functional.cross_entropy(model(inputs[rank::ranks]), labels[rank::ranks])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # torch's own
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses[step] = mean.item() / ranks
        if (step + 1) % EVERY == 0:
            of_model, of_optimizer = get_state_dict(model, optimizer)
            save({"model": of_model, "optimizer": of_optimizer, "losses": losses}, checkpoint_id=folder / str(step + 1))
    if rank == 0:
        sys.stdout.write(json.dumps({"began": done, "losses": losses.tolist()}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
