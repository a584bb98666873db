"""The sentences, the transformer and the options that the scripts beside this file share."""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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


def arguments(description: str | None) -> argparse.Namespace:
    """Return the command line's options; `description` is the text of --help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--until", type=int, help="end after this epoch; resume later")
    parser.add_argument("--sentences", type=int, default=1200)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--checkpoint", type=Path, default=Path("build/text.pt"))
    parser.add_argument("--every", type=int, default=1, help="epochs between checkpoints")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()
