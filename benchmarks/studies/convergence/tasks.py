"""Define the data and networks of benchmarks/studies/convergence/main.py.

The data are endless generated images and digits. The networks are small.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CLASSES = 10
PIXELS = 64
_CENTRES = 4  # centres per class
_SPREAD = 0.62  # the centres' standard deviation; every pixel has noise of 1, so classes overlap


class Stream:
    """An endless stream of 8 x 8 images.

    Each class is a few Gaussian clusters, whose centres are the same in every run.
    """

    def __init__(self, seed: int) -> None:
        """Start the stream at `seed`."""
        fixed = torch.Generator().manual_seed(20)
        self._centres = torch.randn(CLASSES * _CENTRES, PIXELS, generator=fixed) * _SPREAD
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, samples: int) -> tuple[Tensor, Tensor]:
        """Return images of shape (samples, 64) and their classes."""
        which = torch.randint(CLASSES * _CENTRES, (samples,), generator=self._generator)
        noise = torch.randn(samples, PIXELS, generator=self._generator)
        return self._centres[which] + noise, which % CLASSES


class Digits:
    """scikit-learn's handwritten digits, 1,350 for training and 447 for testing.

    The training digits are shuffled anew in each pass.
    """

    def __init__(self, seed: int) -> None:
        """Load the digits, and shuffle them by `seed`."""
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
        """Return the next images and labels, over as many passes as needed."""
        while len(self._left) < samples:
            self._left = torch.cat([self._left, torch.randperm(1350, generator=self._generator)])
        which, self._left = self._left[:samples], self._left[samples:]
        return self._train[0][which], self._train[1][which]


def network(seed: int) -> nn.Module:
    """Return the network 64-96-48-10, which the law is measured on (22 kFLOP forward)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(PIXELS, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, CLASSES))


def deep_network(seed: int) -> nn.Module:
    """Return a network that is hard to train: 12 layers without normalization.

    The scales of its layers alternate between too large and too small. It takes 88 kFLOP forward.
    """
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
    """Return a residual network with two blocks of 8 channels and batch normalization.

    It takes 0.3 MFLOP forward.
    """
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
    """The result of a run."""

    samples: float | None  # samples to the target, or None if the run did not reach it
    evaluations: int
    loss: float  # the last loss on test images
    accuracy: float  # the last accuracy on test images


def evaluated(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the loss and the accuracy of a model on `images`."""
    model.eval()
    with torch.no_grad():
        outputs = model(images)
    model.train()
    return float(cross_entropy(outputs, labels)), float((outputs.argmax(1) == labels).float().mean())


def samples_to(  # noqa: PLR0913 -- each is a number of its own
    target: float, model: nn.Module, source: Any, step: Callable[[int], None], *, batch: int, every: int, limit: int
) -> Run:
    """Train until the test loss reaches `target`.

    Between two evaluations, the logarithm of the loss is interpolated linearly.

    Args:
        target: The loss to reach.
        model: The model that `step` trains.
        source: The data; `source.test` holds images and labels.
        step: A function that takes one step with a batch of the given size.
        batch: The number of samples per step.
        every: The number of samples between evaluations, rounded to steps (at least one step).
        limit: The number of samples after which the run gives up.
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
