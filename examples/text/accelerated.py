"""Train a transformer to find the main topic of a sentence: on many ranks, by Accelerate.

    torchrun --nproc-per-node 2 examples/text/accelerated.py

single.py is the script for one process; docs/four_ways.md counts the lines that differ.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler

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


def evaluate(model: nn.Module, held_back: DataLoader[tuple[Tensor, int]], accelerator: Accelerator) -> float:
    """Return the mean loss over all test sentences."""
    with torch.no_grad():
        losses = [cross_entropy(model(x), y, reduction="none") for x, y in held_back]
    return float(torch.cat([accelerator.gather_for_metrics(each) for each in losses]).mean())


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
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, split_batches=True)
    torch.manual_seed(0)
    train, held_back = sentences(options.sentences, seed=1), sentences(301, seed=2)
    model = Classifier().to(getattr(torch, options.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.Generator()
    loader: Any = DataLoader(train, BATCH, sampler=RandomSampler(train, generator=order))
    steps = options.epochs * -(-len(loader) // ACCUMULATED)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    tests = accelerator.prepare(DataLoader(held_back, BATCH))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    parts: dict[str, Any] = {"model": accelerator.unwrap_model(model), "optimizer": optimizer, "scheduler": scheduler}
    first = 0
    if options.resume:
        saved = torch.load(options.checkpoint)
        first = saved["epoch"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    for epoch in range(first, options.until or options.epochs):
        order.manual_seed(epoch)
        for tokens, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(tokens), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        loss = evaluate(model, tests, accelerator)
        if (epoch + 1) % options.every == 0 and accelerator.is_main_process:
            print(f"epoch {epoch + 1}: {loss!r}", flush=True)
            torch.save(
                {**{name: part.state_dict() for name, part in parts.items()}, "epoch": epoch + 1}, options.checkpoint
            )


if __name__ == "__main__":
    main()
