"""The options, the training step and the output that the programs beside this file share."""

import argparse
import json

import torch
import torch.distributed as dist


def parser(steps: int = 50) -> argparse.ArgumentParser:
    """Return a parser of the options of all programs."""
    found = argparse.ArgumentParser()
    found.add_argument("--backend", default="gloo")
    found.add_argument("--steps", type=int, default=steps)
    return found


def train(optimizer: torch.optim.Optimizer, loss: torch.Tensor, group: dist.ProcessGroup | None = None) -> float:
    """Take a step of training; return the mean loss of the ranks of `group`, or of all ranks."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call] # torch's own
    optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean, group=group)
    return mean.item() / dist.get_world_size(group)


def finish(losses: list[float]) -> None:
    """Print the losses on rank 0, and leave the job."""
    if dist.get_rank() == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()
