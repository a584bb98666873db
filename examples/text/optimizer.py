"""Train a transformer to find the main topic of a sentence: on many ranks, by DistributedOptimizer.

    multiring run -n 2 examples/text/optimizer.py

single.py is the script for one process; docs/four_ways.md counts the lines that differ.
"""

from typing import Any

import torch
from topics import ACCUMULATED, BATCH, Classifier, arguments, sentences  # type: ignore[import-not-found] # beside this file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import multiring.torch as mt


def evaluate(model: nn.Module, held_back: Any) -> float:
    """Return the mean loss over all test sentences."""
    with torch.no_grad():
        losses = [cross_entropy(model(x), y, reduction="sum").item() for x, y in DataLoader(held_back, BATCH)]
    return sum(losses) / len(held_back)


def main() -> None:
    """Train; evaluate after each epoch, and save every few epochs."""
    options = arguments(__doc__)
    mt.init()
    torch.manual_seed(0)
    train, held_back = sentences(options.sentences, seed=1), sentences(301, seed=2)
    model = Classifier().to(getattr(torch, options.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order: Any = DistributedSampler(train, mt.size(), mt.rank())
    loader: Any = DataLoader(train, BATCH // mt.size(), sampler=order)
    mt.broadcast_parameters(model.state_dict(), root_rank=0)
    mt.broadcast_optimizer_state(optimizer, root_rank=0)
    mt.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=ACCUMULATED)
    steps = options.epochs * -(-len(loader) // ACCUMULATED)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    first = 0
    if options.resume:
        saved = torch.load(options.checkpoint)
        first = saved["epoch"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for epoch in range(first, options.until or options.epochs):
        order.set_epoch(epoch)
        for number, (tokens, labels) in enumerate(loader, 1):
            (cross_entropy(model(tokens), labels) / ACCUMULATED).backward()
            if number % ACCUMULATED and number < len(loader):
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        own = held_back[mt.rank() :: mt.size()]
        loss = mt.mean({"loss": evaluate(model, own)}, len(own))["loss"]
        if (epoch + 1) % options.every == 0 and mt.rank() == 0:
            print(f"epoch {epoch + 1}: {loss!r}", flush=True)
            torch.save(
                {**{name: part.state_dict() for name, part in parts.items()}, "epoch": epoch + 1}, options.checkpoint
            )


if __name__ == "__main__":
    main()
