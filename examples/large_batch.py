"""Plot the law of large batches: epochs to a target over the batch, its fit, and the noise scale's prediction.

    python examples/large_batch.py                 # large_batch.png and the table, in half a minute
    python examples/large_batch.py --quick         # in seconds, with wide errors

A small network learns handwritten digits with batches of 8 to 512, each with the best of several learning rates.
E = Emin (1 + B/Bc) is fitted. Before that, Bc is predicted from the noise scale of a small batch's gradients. The
program needs scikit-learn and matplotlib.
"""

import argparse
import math
import statistics
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import multiring.torch as mt
from multiring.convergence import Law, fit_critical_batch_size, recommend_batch_size

Row = tuple[int, float, float, list[float]]  # batch, rate, mean of the epochs, epochs

TRAINED = 1350
TARGET = 0.25  # test loss
LIMIT = 120  # epochs
SMALL = 16  # the batch for measuring the noise scale


def digits() -> tuple[Tensor, Tensor]:
    """Return images of shape (1797, 64) and their classes, in a fixed order."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.data / 16, dtype=torch.float32)[order], torch.tensor(data.target)[order]


def network(seed: int) -> nn.Module:
    """Return a network of 64-32-10."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def epochs_to_target(batch: int, rate: float, seed: int) -> float:
    """Return the number of epochs until the test loss is `TARGET`; infinity if that takes more than `LIMIT`."""
    images, labels = digits()
    model = network(seed)
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    before, seen, order = math.inf, 0, torch.empty(0, dtype=torch.long)
    every = max(1, TRAINED // 10 // batch)
    step = 0
    while seen < LIMIT * TRAINED:
        while len(order) < batch:
            order = torch.cat([order, torch.randperm(TRAINED, generator=generator)])
        which, order = order[:batch], order[batch:]
        gradients = torch.autograd.grad(cross_entropy(model(images[which]), labels[which]), parameters)
        with torch.no_grad():
            for each, gradient in zip(parameters, gradients, strict=True):
                each.sub_(gradient, alpha=rate)
        seen += batch
        step += 1
        if step % every == 0:
            with torch.no_grad():
                loss = float(cross_entropy(model(images[TRAINED:]), labels[TRAINED:]))
            if loss <= TARGET:
                part = (before - TARGET) / (before - loss) if math.isfinite(before) else 1.0
                return (seen - (1 - part) * every * batch) / TRAINED
            if not loss < 1e3:
                return math.inf
            before = loss
    return math.inf


def foretold(seeds: range) -> float:
    """Return the critical batch, predicted from the noise scale of steps with a small batch, up to the target."""
    found = []
    for seed in seeds:
        images, labels = digits()
        model = network(seed)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        noise = mt.noise_scale(optimizer, every=1, window=10**6, warns=False)
        generator = torch.Generator().manual_seed(seed)
        loss = math.inf
        while loss > TARGET:
            order = torch.randperm(TRAINED, generator=generator)
            for which in order[: TRAINED // SMALL * SMALL].view(-1, 2, SMALL // 2):
                optimizer.zero_grad()
                for part in which:
                    torch.autograd.backward(cross_entropy(model(images[part]), labels[part]) / 2)
                    noise.part(SMALL // 2)
                optimizer.step()
            with torch.no_grad():
                loss = float(cross_entropy(model(images[TRAINED:]), labels[TRAINED:]))
        found.append(noise.critical(SMALL))
    return statistics.median(found)


def best(batch: int, rates: list[float], seeds: range) -> tuple[float, list[float]]:
    """Return the best rate according to two other seeds, and the epochs of `seeds` with that rate."""
    tried = {rate: statistics.mean(epochs_to_target(batch, rate, 100 + seed) for seed in range(2)) for rate in rates}
    rate = min(rates, key=lambda each: tried[each])
    return rate, [epochs_to_target(batch, rate, seed) for seed in seeds]


def main() -> None:
    """Measure, and draw the law."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer batches, rates and seeds")
    parser.add_argument("--picture", default="large_batch.png", help="the file for the picture")
    options = parser.parse_args()
    if options.picture and Path(options.picture).exists():
        parser.error(f"--picture {options.picture}: the file exists already; give another name, or remove it")
    torch.set_num_threads(1)
    seeds = range(2 if options.quick else 5)
    batches = [16, 64, 256] if options.quick else [8, 16, 32, 64, 128, 256, 512]
    critical = foretold(seeds)
    print(f"predicted by the noise scale at batch {SMALL}: a critical batch of {critical:,.0f}")
    rows: list[Row] = []
    for batch in batches:
        middle = 1.6 / (1 + 200 / batch)
        rates = [middle * factor for factor in ((1.0, 2.0) if options.quick else (0.5, 1.0, 2.0, 4.0))]
        rate, epochs = best(batch, rates, seeds)
        reached = [each for each in epochs if math.isfinite(each)]
        if reached:
            rows.append((batch, rate, math.exp(statistics.mean(map(math.log, reached))), reached))
    law = fit_critical_batch_size([row[0] for row in rows], [row[2] for row in rows])
    print("   batch   rate  epochs  steps   fit")
    for batch, rate, mean, _ in rows:
        print(f"{batch:8} {rate:6.2f} {mean:7.2f} {mean * TRAINED / batch:6.0f} {law.needed(batch):5.2f}")
    print(f"fit: {law.least:.2f} epochs (1 + B / {law.critical:,.0f}); predicted {critical / law.critical:.2f} of that")
    print(recommend_batch_size(critical=law.critical, batch=batches[0], learning_rate=rows[0][1], batches=batches))
    if options.picture:
        draw(options.picture, rows, law, critical)


def draw(path: str, rows: list[Row], law: Law, critical: float) -> None:
    """Draw epochs over the batch."""
    mpl.use("Agg")
    figure, axes = plt.subplots()
    for batch, _, _, reached in rows:
        axes.plot([batch] * len(reached), reached, "o", color="tab:blue", alpha=0.3)
    sizes = [row[0] for row in rows]
    axes.plot(sizes, [row[2] for row in rows], "o", color="tab:blue", label="measured")
    axes.plot(sizes, [law.needed(each) for each in sizes], label=f"fit, Bc = {law.critical:,.0f}")
    axes.axvline(critical, linestyle=":", color="tab:red", label=f"Bc by the noise scale = {critical:,.0f}")
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel=f"epochs to a test loss of {TARGET}")
    axes.legend()
    figure.savefig(path)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main()
