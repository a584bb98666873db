"""The workloads of evidence/optimizers: small networks on data that are generated, or that come with packages.

Each workload trains from scratch, and is judged by its loss on held-out data, which are the same for every seed.
"""

import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from examples.climate.deeplab import DeepLabV3Plus
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, instance_norm, l1_loss, leaky_relu

Array = NDArray[Any]
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A network, its data and its loss.

    Args:
        name: the name in records.
        about: what it is, for the table.
        steps: the steps of a whole training.
        batch: samples of a step.
        network: returns an untrained network; the caller seeds torch before.
        data: returns a function of a generator and a number of samples that draws a batch, and the held-out batches.
        loss: the mean loss of a batch, from the network's outputs and the targets.
    """

    name: str
    about: str
    steps: int
    batch: int
    network: Callable[[], nn.Module]
    data: Callable[[], tuple[Callable[[np.random.Generator, int], Batch], Sequence[Batch]]]
    loss: Callable[[Tensor, Tensor], Tensor]

    def digest(self) -> str:
        """Return what identifies the held-out data and one drawn batch, so that records of other data are refused."""
        draw, held_out = self.data()
        found = hashlib.blake2b(digest_size=8)
        for pair in (*held_out, draw(np.random.default_rng(0), 4)):
            for tensor in pair:
                # Generated numbers may differ in the last bits from one machine to another.
                found.update(np.round(tensor.double().numpy(), 3).tobytes())
        return found.hexdigest()


# ---- a convolutional network: a digit among parts of other digits ----

_CANVAS, _DIGIT, _PART = 16, 8, 4


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _small_resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        _Residual(12, 12, 1),
        _Residual(12, 24, 2),
        _Residual(24, 48, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


def _digits() -> tuple[Array, Array]:
    """Return scikit-learn's digits, from 0 to 1, and their labels."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 -- only these workloads need it

    found = load_digits()
    return (found.images / 16).astype(np.float32), found.target.astype(np.int64)


def _divided(
    drawn: Callable[[Array, np.random.Generator, int], Batch], pictures: int
) -> tuple[Callable[[np.random.Generator, int], Batch], Sequence[Batch]]:
    """Return what draws batches of most of the pictures, and a batch of the others, which are held out."""
    order = np.random.default_rng(20).permutation(pictures)
    held_out = drawn(order[1350:], np.random.default_rng(21), 1024)
    return functools.partial(drawn, order[:1350]), [held_out]


@functools.cache
def _cluttered_digits() -> tuple[Callable[[np.random.Generator, int], Batch], Sequence[Batch]]:
    images, labels = _digits()

    def drawn(which: Array, random: np.random.Generator, count: int) -> Batch:
        chosen = random.choice(which, count)
        canvas = np.zeros((count, _CANVAS, _CANVAS), np.float32)
        for number in range(5):  # four parts of other digits, and then the digit itself over them
            size = _DIGIT if number == 4 else _PART
            pictures = images[chosen if number == 4 else random.choice(which, count)]
            corner = random.integers(0, _DIGIT - size + 1, (2, count, 1, 1))
            place = random.integers(0, _CANVAS - size + 1, (2, count, 1, 1))
            rows, columns = np.arange(size)[:, None], np.arange(size)[None]
            each = np.arange(count)[:, None, None]
            part = pictures[each, corner[0] + rows, corner[1] + columns]
            at = each, place[0] + rows, place[1] + columns
            canvas[at] = np.maximum(canvas[at], part)
        canvas += random.normal(0, 0.15, canvas.shape).astype(np.float32)
        return torch.from_numpy(canvas[:, None]), torch.from_numpy(labels[chosen])

    return _divided(drawn, len(labels))


@functools.cache
def noisy_digits() -> tuple[Callable[[np.random.Generator, int], Batch], Sequence[Batch]]:
    """Return scikit-learn's digits with noise: for perceptrons, which do not learn digits at random places."""
    images, labels = _digits()

    def drawn(which: Array, random: np.random.Generator, count: int) -> Batch:
        chosen = random.choice(which, count)
        noise = random.normal(0, 0.4, (count, _DIGIT, _DIGIT)).astype(np.float32)
        return torch.from_numpy((images[chosen] + noise)[:, None]), torch.from_numpy(labels[chosen])

    return _divided(drawn, len(labels))


# ---- a transformer: the next character of Python's own sources ----

_SOURCES: tuple[str, ...] = (
    "argparse",
    "ast",
    "asyncio.tasks",
    "collections",
    "configparser",
    "datetime",
    "decimal",
    "difflib",
)
_SOURCES += ("doctest", "enum", "functools", "inspect", "ipaddress", "logging", "pathlib", "pickle", "shutil")
_SOURCES += ("socket", "statistics", "subprocess", "tarfile", "threading", "typing", "unittest.mock", "zipfile")
_CONTEXT = 64
_CHARACTERS = 97  # those from space to tilde, the line feed, and one for all others


class CharacterTransformer(nn.Module):
    """A decoder-only transformer with norms before the layers.

    Args:
        width: numbers per character; a head has 16 of them.
        layers: the number of layers.
    """

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(_CHARACTERS, width)
        self.places = nn.Embedding(_CONTEXT, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 16, 4 * width, 0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _CHARACTERS, bias=False)
        for each in (self.characters, self.places):
            nn.init.normal_(each.weight, std=0.5)
        mask = torch.full((_CONTEXT, _CONTEXT), -torch.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return (n, characters, length) logits for (n, length) characters."""
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(x)).transpose(1, 2)
        return logits


@functools.cache
def _python_sources() -> tuple[Callable[[np.random.Generator, int], Batch], Sequence[Batch]]:
    texts = []
    for name in _SOURCES:
        __import__(name)
        texts.append(inspect.getsource(sys.modules[name]))
    codes = np.frombuffer("\n".join(texts).encode("ascii", "replace"), np.uint8).astype(np.int64)
    codes = np.where(codes == ord("\n"), 95, np.where((codes >= 32) & (codes < 127), codes - 32, 96))
    # A tenth is held out, in 40 pieces from all over the sources.
    pieces = np.array_split(codes, 400)
    kept = np.concatenate([each for number, each in enumerate(pieces) if number % 10])
    other = np.concatenate([each for number, each in enumerate(pieces) if number % 10 == 0])

    def cut(text: Array, starts: Array) -> Batch:
        found = torch.from_numpy(text[starts[:, None] + np.arange(_CONTEXT + 1)])
        return found[:, :-1], found[:, 1:]

    def drawn(random: np.random.Generator, count: int) -> Batch:
        return cut(kept, random.integers(0, len(kept) - _CONTEXT, count))

    return drawn, [cut(other, np.linspace(0, len(other) - _CONTEXT - 1, 128).astype(np.int64))]


# ---- the climate network: storms in generated fields ----

_FIELDS, _HELD_OUT_FIELDS, _HEIGHT, _WIDTH = 96, 16, 32, 48


@functools.cache
def _climate_fields() -> tuple[Callable[[np.random.Generator, int], Batch], Sequence[Batch]]:
    from examples.climate.generate import draw  # noqa: PLC0415 -- it needs SciPy

    splits = []
    for split, count in (("train", _FIELDS), ("val", _HELD_OUT_FIELDS)):
        drawn = [draw(split, number, _HEIGHT, _WIDTH) for number in range(count)]
        splits.append((np.stack([each for each, _ in drawn]), np.stack([each for _, each in drawn])))
    least, most = np.nanmin(splits[0][0], (0, 1, 2)), np.nanmax(splits[0][0], (0, 1, 2))
    (fields, labels), (held_out, truth) = [
        (np.nan_to_num(2 * (data - least) / (most - least) - 1).transpose(0, 3, 1, 2), classes)
        for data, classes in splits
    ]

    def random_batch(random: np.random.Generator, count: int) -> Batch:
        chosen, turns = random.integers(0, _FIELDS, count), random.integers(0, _WIDTH, count)
        data = np.stack([np.roll(fields[each], turn, 2) for each, turn in zip(chosen, turns, strict=True)])
        classes = np.stack([np.roll(labels[each], turn, 1) for each, turn in zip(chosen, turns, strict=True)])
        return torch.from_numpy(data.astype(np.float32)), torch.from_numpy(classes)

    return random_batch, [(torch.from_numpy(held_out.astype(np.float32)), torch.from_numpy(truth))]


def _climate_network() -> nn.Module:
    return DeepLabV3Plus(16, 3, width=8)


def _weighted(logits: Tensor, labels: Tensor) -> Tensor:
    # As in examples/climate with balance=0.2: about 1 / frequency ** 0.2, with a mean of 1.
    weights = torch.tensor([0.7, 1.3, 1.0], device=logits.device)
    return cross_entropy(logits, labels, weights, reduction="none").mean()


# ---- of AlgoPerf: fastMRI's U-Net, on generated phantoms ----

_SIDE, _PHANTOMS, _HELD_OUT_PHANTOMS = 32, 512, 64


class _ConvolutionPair(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = leaky_relu(instance_norm(layer(x)), 0.2)
        return x


class UNet(nn.Module):
    """The U-Net of fastMRI: pairs of convolutions with instance norms, halved and doubled again.

    Args:
        width: channels at the full resolution; AlgoPerf's network has 32.
        halvings: how often the resolution is halved; AlgoPerf's network does so four times.
    """

    def __init__(self, width: int = 8, halvings: int = 3) -> None:
        super().__init__()
        sizes = [width << level for level in range(halvings + 1)]
        self.down = nn.ModuleList(_ConvolutionPair(*pair) for pair in zip([1, *sizes[:-2]], sizes[:-1], strict=True))
        self.lowest = _ConvolutionPair(sizes[-2], sizes[-1])
        self.doublings = nn.ModuleList(
            nn.ConvTranspose2d(2 * size, size, 2, 2, bias=False) for size in reversed(sizes[:-1])
        )
        self.up = nn.ModuleList(_ConvolutionPair(2 * size, size) for size in reversed(sizes[:-1]))
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return images of the same shape (n, 1, h, w); h and w are multiples of 2 ** halvings."""
        kept = []
        for pair in self.down:
            x = pair(x)
            kept.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.lowest(x)
        for double, pair in zip(self.doublings, self.up, strict=True):
            x = leaky_relu(instance_norm(double(x)), 0.2)
            x = pair(torch.cat([x, kept.pop()], 1))
        found: Tensor = self.last(x)
        return found


def _phantoms(random: np.random.Generator, count: int) -> Array:
    """Return images (count, side, side) of ellipses within an ellipse, as in a head."""
    rows, columns = np.meshgrid(*[np.linspace(-1, 1, _SIDE)] * 2, indexing="ij")
    found = np.zeros((count, _SIDE, _SIDE))
    for number in range(9):
        is_head = number == 0
        centre = (
            random.uniform(-0.1, 0.1, (2, count, 1, 1)) if is_head else random.uniform(-0.55, 0.55, (2, count, 1, 1))
        )
        axes = random.uniform(0.75, 0.95, (2, count, 1, 1)) if is_head else random.uniform(0.06, 0.4, (2, count, 1, 1))
        angle, value = random.uniform(0, np.pi, (count, 1, 1)), random.uniform(-0.5, 0.8, (count, 1, 1))
        up, across = rows - centre[0], columns - centre[1]
        one, other = up * np.cos(angle) + across * np.sin(angle), across * np.cos(angle) - up * np.sin(angle)
        inside = (one / axes[0]) ** 2 + (other / axes[1]) ** 2
        found += (1.0 if is_head else value) / (1 + np.exp(np.clip(12 * (inside - 1), -60, 60)))
    return found


@functools.cache
def _undersampled_phantoms() -> tuple[Callable[[np.random.Generator, int], Batch], Sequence[Batch]]:
    fixed = np.random.default_rng(22)
    images, held_out = _phantoms(fixed, _PHANTOMS), _phantoms(fixed, _HELD_OUT_PHANTOMS)

    def measured(truth: Array, random: np.random.Generator) -> Batch:
        """Return images of a quarter of the columns of k-space, and the truth, both scaled by the former."""
        kept = random.random((len(truth), 1, _SIDE)) < 0.19
        kept[..., :1] = kept[..., 1:2] = kept[..., -1:] = True  # the lowest frequencies, about 8 %
        seen = np.abs(np.fft.ifft2(np.fft.fft2(truth) * kept))
        mean, deviation = seen.mean((1, 2), keepdims=True), seen.std((1, 2), keepdims=True)
        pair = [((each - mean) / deviation)[:, None].astype(np.float32) for each in (seen, truth)]
        return torch.from_numpy(pair[0]), torch.from_numpy(pair[1])

    def drawn(random: np.random.Generator, count: int) -> Batch:
        return measured(images[random.integers(0, _PHANTOMS, count)], random)

    return drawn, [measured(held_out, np.random.default_rng(23))]


WORKLOADS = {
    each.name: each
    for each in (
        Workload(
            name="climate",
            about="examples/climate's DeepLabv3+ of width 8, generated fields of 32 x 48 pixels and 16 channels",
            steps=160,
            batch=4,
            network=_climate_network,
            data=_climate_fields,
            loss=_weighted,
        ),
        Workload(
            name="transformer",
            about="2 layers of width 64, the next character of Python's own sources, 64 at a time",
            steps=500,
            batch=16,
            network=CharacterTransformer,
            data=_python_sources,
            loss=cross_entropy,
        ),
        Workload(
            name="convolutional",
            about="a ResNet of 7 convolutions, scikit-learn's digits among parts of others on 16 x 16 pixels",
            steps=400,
            batch=32,
            network=_small_resnet,
            data=_cluttered_digits,
            loss=cross_entropy,
        ),
        Workload(
            name="unet",
            about="AlgoPerf's fastMRI U-Net at a quarter of its width, generated phantoms of 32 x 32 pixels",
            steps=400,
            batch=8,
            network=UNet,
            data=_undersampled_phantoms,
            loss=l1_loss,
        ),
    )
}
