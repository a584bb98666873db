"""Learn handwritten digits: a script for one process, which one added line runs on any number of ranks.

Run it alone or by `multiring run -n 3 -- python examples/digits_distribute.py`: the losses are the same, up to
rounding.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import multiring.torch as mt

HELD_BACK = 360  # test images, a fifth of 1797


def main() -> None:
    """Train, and print the loss of each epoch."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="images per step, of all ranks together")
    parser.add_argument("--workers", type=int, default=0, help="processes per rank that read images")
    options = parser.parse_args()

    torch.manual_seed(1)
    bunch = load_digits()
    images, labels = torch.from_numpy(bunch.images / 16.0).unsqueeze(1), torch.from_numpy(bunch.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(2026))
    held_back, rest = order[:HELD_BACK], order[HELD_BACK:]
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()),
        nn.Linear(512, 10),
    ).double()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(
        TensorDataset(images[rest], labels[rest]), options.batch, shuffle=True, num_workers=options.workers
    )

    model, optimizer, loader = mt.distribute(model, optimizer, loader)  # the added line

    for epoch in range(1, options.epochs + 1):
        total = 0.0
        for image, label in loader:
            loss = nn.functional.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call] # torch's own
            optimizer.step()
            total += loader.global_loss(loss).item()  # `loss` is that of the rank's own part
        if mt.rank() == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.6f}")
    with torch.no_grad():
        accuracy = (model(images[held_back]).argmax(1) == labels[held_back]).double().mean()
    if mt.rank() == 0:
        print(f"test accuracy {accuracy:.2%}, {mt.size()} rank{'s' if mt.size() > 1 else ''}")


if __name__ == "__main__":
    main()
