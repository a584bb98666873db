"""Train a transformer to find the main topic of a sentence: on many ranks, by DistributedOptimizer.

    multiring run -n 2 examples/text/optimizer.py

single.py is the script for one process; docs/four_ways.md counts the lines that differ.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import multiring.torch as mt

TOPICS = (
    {"river", "lake", "rain", "sea", "wave", "boat", "fish"},
    {"gear", "bolt", "motor", "wheel", "brake", "engine"},
)
VOCABULARY = {word: number for number, word in enumerate(sorted({"the", "and", "of", "a"}.union(*TOPICS)))}
LENGTH, BATCH, ACCUMULATED = 15, 24, 2


def sentences(count: int, seed: int) -> Any:
    """Return sentences, as lists of word numbers, and the topic that each has more words of."""
    draw = random.Random(seed)  # noqa: S311 -- the same on all ranks
    words = [draw.choices(list(VOCABULARY), k=LENGTH) for _ in range(count)]
    more = [sum(word in TOPICS[1] for word in each) > sum(word in TOPICS[0] for word in each) for each in words]
    numbers = [torch.tensor([VOCABULARY[word] for word in each]) for each in words]
    return list(zip(numbers, map(int, more), strict=True))


class Classifier(nn.Module):
    """A transformer of two layers whose mean output gives a score for each topic."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(VOCABULARY), 32), nn.Parameter(torch.zeros(LENGTH, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(32, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of shape (batch, 2)."""
        scores: Tensor = self.scores(self.layers(self.words(tokens) + self.places).mean(1))
        return scores


def evaluate(model: nn.Module, held_back: Any) -> float:
    """Return the mean loss over all test sentences."""
    with torch.no_grad():
        losses = [cross_entropy(model(x), y, reduction="sum").item() for x, y in DataLoader(held_back, BATCH)]
    return sum(losses) / len(held_back)


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--until", type=int, help="end after this epoch; resume later")
    parser.add_argument("--sentences", type=int, default=1200)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--checkpoint", type=Path, default=Path("build/text.pt"))
    parser.add_argument("--every", type=int, default=1, help="epochs between checkpoints")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Train; evaluate after each epoch, and save every few epochs."""
    options = arguments()
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
            (cross_entropy(model(tokens), labels) / ACCUMULATED).backward()  # type: ignore[no-untyped-call]
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
