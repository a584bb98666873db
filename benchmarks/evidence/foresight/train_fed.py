"""A user's training script that reads a data set: python train_fed.py DATA FORMAT BATCH STEPS WORKERS MS.

A step computes a small model and then sleeps for MS milliseconds, as a host does whose accelerator computes. `DATA` has
a field `image` or `array`. At the end, the script prints its median step without the first ones.
"""

import argparse
import time
from statistics import median

import torch
from torch import Tensor, nn

import multiring.torch as mt
from multiring.data import Dataset

CLASSES, WARM_UP = 10, 3


class Means(nn.Module):
    """A linear model of the means of a sample's channels."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(1, CLASSES), seconds

    def forward(self, x: Tensor) -> Tensor:
        """Return a number for each sample and class."""
        time.sleep(self.seconds)
        result: Tensor = self.linear(x.flatten(1)[:, :64].float().mean(1, keepdim=True))
        return result


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("format")
    parser.add_argument("batch", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("workers", type=int)
    parser.add_argument("ms", type=float)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    mt.init()
    model: nn.Module = Means(arguments.ms / 1e3)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-9))
    data = Dataset(arguments.data, format=arguments.format)
    loader = mt.DataLoader(data, arguments.batch * mt.size(), workers=arguments.workers)
    ends: list[float] = []
    while len(ends) < arguments.steps:
        for batch in loader:
            x = batch["image" if "image" in batch else "array"]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.int64)).backward()  # type: ignore[no-untyped-call] # torch's own
            optimizer.step()
            ends.append(time.monotonic())
            if len(ends) == arguments.steps:
                break
    steps = [after - before for before, after in zip(ends[WARM_UP:], ends[WARM_UP + 1 :], strict=False)]
    print(f"median step: {median(steps)} s", flush=True)


if __name__ == "__main__":
    main()
