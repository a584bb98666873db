"""Pipeline parallel: `torchrun --nproc-per-node 2 examples/distributed/pipeline.py --backend multiring`.

Each rank has one stage of the model, or two with `--schedule interleaved`.
"""

import torch
import torch.distributed as dist
from steps import finish, parser  # type: ignore[import-not-found] # beside this file
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

BATCH, MICROBATCHES, FEATURES = 12, 4, 16
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def main() -> None:
    """Train, and print the losses."""
    options_of = parser()
    options_of.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    options = options_of.parse_args()

    dist.init_process_group(options.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    is_interleaved = options.schedule == "interleaved"
    count = ranks * (2 if is_interleaved else 1)
    blocks, stages = nn.ModuleList(), []
    for index in range(rank, count, ranks):
        torch.manual_seed(index)
        blocks.append(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()))
        stages.append(PipelineStage(blocks[-1], index, count, torch.device("cpu")))
    schedule = SCHEDULES[options.schedule](
        stages if is_interleaved else stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.5, momentum=0.9)
    torch.manual_seed(0)
    losses = []
    for _ in range(options.steps):
        inputs = torch.randn(BATCH, FEATURES)
        wanted = inputs.roll(1, 1).tanh()
        optimizer.zero_grad()
        parts: list[torch.Tensor] = []  # losses of the microbatches
        if rank == 0:
            schedule.step(inputs)
        elif rank == ranks - 1:
            schedule.step(target=wanted, losses=parts)
        else:
            schedule.step()
        optimizer.step()
        mean = torch.stack(parts).mean().detach() if parts else torch.zeros(())
        dist.broadcast(mean, src=ranks - 1)
        losses.append(mean.item())
    finish(losses)


if __name__ == "__main__":
    main()
