"""What the experiments of benchmarks/convergence.py train: endless generated images, digits, and small networks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CLASSES = 10
PIXELS = 64
_CENTRES = 4  # of each class
_SPREAD = 0.62  # of the centres, beside noise of 1 in every pixel: classes overlap


class Stream:
    """Images of 8 x 8, endless: each class is a few Gaussian clusters, whose centres are the same in every run."""

    def __init__(self, seed: int) -> None:
        """Draw from `seed` on."""
        fixed = torch.Generator().manual_seed(20)
        self._centres = torch.randn(CLASSES * _CENTRES, PIXELS, generator=fixed) * _SPREAD
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """Return images of shape (samples, 64), and their classes."""
        which = torch.randint(CLASSES * _CENTRES, (samples,), generator=self._generator)
        noise = torch.randn(samples, PIXELS, generator=self._generator)
        return self._centres[which] + noise, which % CLASSES


class Digits:
    """scikit-learn's handwritten digits: 1,350 for training, shuffled anew in each pass, 447 for testing."""

    def __init__(self, seed: int) -> None:
        """Shuffle by `seed`."""
        from sklearn.datasets import load_digits  # noqa: PLC0415 -- only where they are asked for

        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(20))
        images = torch.tensor(data.data / 16, dtype=torch.float32)[order]
        labels = torch.tensor(data.target)[order]
        self._train = images[:1350], labels[:1350]
        self.test = images[1350:], labels[1350:]
        self._generator = torch.Generator().manual_seed(seed)
        self._left = torch.empty(0, dtype=torch.long)

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """Return the next images, from as many passes as it takes."""
        while len(self._left) < samples:
            self._left = torch.cat([self._left, torch.randperm(1350, generator=self._generator)])
        which, self._left = self._left[:samples], self._left[samples:]
        return self._train[0][which], self._train[1][which]


def network(seed: int) -> nn.Module:
    """Return the network of the law: 64-96-48-10, 22 kFLOP forward."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(PIXELS, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, CLASSES))


def deep_network(seed: int) -> nn.Module:
    """Return 12 layers without normalisation, whose scales alternate: 10 x too large, 10 x too small; 88 kFLOP."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(PIXELS, 64), nn.ReLU()]
    for number in range(10):
        layer = nn.Linear(64, 64)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        with torch.no_grad():
            layer.weight.mul_(4.0 if number % 2 else 0.25)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, CLASSES))


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return images of the same shape."""
        return torch.relu(images + self.body(images))


def small_resnet(seed: int) -> nn.Module:
    """Return a residual network of two blocks and 8 channels with batch normalisation; 0.3 MFLOP forward."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        _Block(8),
        _Block(8),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


@dataclass(frozen=True, slots=True)
class Run:
    """How one run ended."""

    samples: float | None  # to the target; None where it was not reached
    evaluations: int
    loss: float  # the last one, on test images
    accuracy: float  # likewise


def evaluated(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the loss and the part of `images` that is classified right."""
    model.eval()
    with torch.no_grad():
        outputs = model(images)
    model.train()
    return float(cross_entropy(outputs, labels)), float((outputs.argmax(1) == labels).float().mean())


def samples_to(  # noqa: PLR0913 -- each is a number of its own
    target: float, model: nn.Module, source: Any, step: Callable[[int], None], *, batch: int, every: int, limit: int
) -> Run:
    """Train until the test loss is `target`; between two evaluations its logarithm counts as a straight line.

    Args:
        target: a loss.
        model: what `step` trains.
        source: whose `test` has images and labels.
        step: takes one step with a batch of so many samples.
        batch: its size.
        every: samples between evaluations; rounded to steps, at least one.
        limit: samples after which the run gives up.
    """
    between = max(1, round(every / batch))
    seen, evaluations = 0, 0
    before = evaluated(model, *source.test)[0]
    loss, accuracy = before, 0.0
    while seen < limit:
        for _ in range(between):
            step(batch)
        seen += between * batch
        loss, accuracy = evaluated(model, *source.test)
        evaluations += 1
        if not loss < 1e3:
            return Run(None, evaluations, loss, accuracy)
        if loss <= target:
            part = (before - target) / (before - loss)
            return Run(seen - (1 - part) * between * batch, evaluations, loss, accuracy)
        before = loss
    return Run(None, evaluations, loss, accuracy)
