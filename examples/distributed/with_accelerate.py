"""Accelerate: `torchrun --nproc-per-node 2 examples/distributed/with_accelerate.py --backend multiring`.

Accelerate uses an existing process group. Only if there is none, it makes one with a backend of its own choice.
"""

import json

import torch
import torch.distributed as dist
from accelerate import Accelerator
from steps import parser  # type: ignore[import-not-found] # beside this file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH, FEATURES, CLASSES = 4, 16, 4  # BATCH: samples of one rank


def main() -> None:
    """Train, and print the losses."""
    options = parser().parse_args()

    dist.init_process_group(options.backend)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(options.steps * BATCH * accelerator.num_processes, FEATURES)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :CLASSES].argmax(1)), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for features, labels in loader:
        loss = nn.functional.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
    if accelerator.is_main_process:
        print(json.dumps(losses))
    accelerator.end_training()


if __name__ == "__main__":
    main()
