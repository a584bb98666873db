"""Fit the last layer of a classifier to the features of its pretrained encoder, without a gradient through the encoder.

The layer is a logistic regression: convex, so that its optimum depends on the data alone, not on rates or epochs. Each
training picture counts with all of its mirror images and turns that the augmentation may draw. The encoder sees each of
these pictures once. For one of them, that takes a third of its time in an epoch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import multiring.torch as mt
from multiring.errors import ArgumentError, StateError
from multiring.vision.fitting.samples import PictureSamples
from multiring.vision.models.preprocessing import normalise, symmetric_pictures
from multiring.vision.models.residual import PictureClassifier
from multiring.vision.models.vision_model import VisionModel

_DECAYS = (3e-1, 1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 1e-4)  # tried in this order, each from the solution before
_DEFAULT_DECAY = 3e-2  # without samples that choose
_PICTURES = 8  # that the encoder sees at a time; fixed, so that features do not depend on the number of ranks
_MOST_NUMBERS = 1 << 27  # of the features, 1 GiB
_STEPS = 100  # of L-BFGS for each decay
# Of the largest deviation of a feature. One that hardly varies in training may be large in a picture to come.
_LEAST_SPREAD = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSamples:
    """What a head is fitted to.

    Attributes:
        training: the training samples, without augmentation.
        val: the samples that choose the weight decay, or None.
        symmetries: how many symmetric pictures of each training picture count: 1, 2, 4 or 8.
        smoothing: the share of a label that is spread over all classes.
    """

    training: PictureSamples
    val: PictureSamples | None
    symmetries: int
    smoothing: float


def fit_head(model: VisionModel, samples: HeadSamples, device: torch.device, place: tuple[int, int]) -> float:
    """Fit the head of a classifier, and return the weight decay that was chosen; every rank calls it.

    The decay with the lowest loss on the samples `val` is chosen. A picture's probabilities there are the means of its
    symmetric pictures', as the model answers.

    Args:
        model: on the host; its encoder is pretrained. Its head is changed.
        samples: the samples.
        device: on which the features are computed.
        place: this rank, and the number of ranks. They share the pictures.

    Raises:
        ArgumentError: there are too many pictures for the memory.
        StateError: the features are not finite.
        DataError: a picture cannot be read, or its file changed since the last scan.
    """
    network = model.network
    if not isinstance(network, PictureClassifier):
        raise ArgumentError(f"fit_head=True for the kind {model.description.kind!r}: want the kind 'classify'")
    views = _affordable(len(samples.training.all), network.head.in_features, samples.symmetries)
    was_training = model.training
    model.to(device).eval()
    x, truth = _features(model, samples.training, views, device, place)
    val = None
    if samples.val is not None:
        val = _features(model, samples.val, model.description.symmetries, device, place)
    model.to("cpu").train(was_training)
    x, truth = x.flatten(0, 1), truth.repeat(views)
    mean, spread = x.mean(0), x.std(0, correction=0)
    spread = spread.clamp(min=max(_LEAST_SPREAD * float(spread.max()), 1e-12))
    x.sub_(mean).div_(spread)
    chooses = (x[None], truth) if val is None else ((val[0] - mean) / spread, val[1])
    # A row for each feature and one for the bias; a column for each output.
    weights = torch.zeros(x.shape[1] + 1, network.head.out_features, dtype=torch.float64)
    best = weights, _DEFAULT_DECAY, math.inf
    for decay in (_DEFAULT_DECAY,) if val is None else _DECAYS:
        weights = _fitted(x, truth, decay, samples.smoothing, weights)
        if (loss := _loss(weights, *chooses)) < best[2]:
            best = weights, decay, loss
    if not math.isfinite(best[2]):
        raise StateError(f"the features of the pretrained encoder or the losses of its head are not finite: {best[2]}")
    scaled = best[0][:-1] / spread[:, None]
    with torch.no_grad():
        network.head.weight.copy_(scaled.T)
        network.head.bias.copy_(best[0][-1] - mean @ scaled)
    return best[1]


def _affordable(pictures: int, features: int, symmetries: int) -> int:
    """Return how many symmetric pictures of each picture the memory holds; at most `symmetries`."""
    most = _MOST_NUMBERS // features
    if pictures > most:
        raise ArgumentError(
            f"fit_head=True with {pictures} training pictures of {features} features: want at most {most} pictures. "
            "Leave the option out, and let the epochs train the head"
        )
    return next(each for each in (8, 4, 2, 1) if each <= symmetries and pictures * each <= most)


def _features(
    model: VisionModel, samples: PictureSamples, views: int, device: torch.device, place: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the features of all samples, float64 (views, n, features), and their classes, int64 (n,)."""
    network, count = model.network, len(samples.all)
    assert isinstance(network, PictureClassifier)  # noqa: S101 -- for the checker of types
    found = torch.zeros(views, count, network.head.in_features, dtype=torch.float64)
    classes = torch.zeros(count, dtype=torch.int64)
    for number, start in enumerate(range(0, count, _PICTURES)):
        if number % place[1] != place[0]:
            continue
        read = [samples.sample(each) for each in range(start, min(start + _PICTURES, count))]
        squares = torch.stack([torch.from_numpy(each["pixels"]) for each in read]).to(device).permute(0, 3, 1, 2)
        inputs = normalise(squares.to(model.mean.dtype), model.mean, model.std)
        with torch.no_grad():
            some = network.features(symmetric_pictures(inputs, views))
        found[:, start : start + len(read)] = some.reshape(views, -1, some.shape[1]).double().cpu()
        classes[start : start + len(read)] = torch.tensor([int(each["class"]) for each in read])
    if place[1] > 1:  # the others' rows are 0
        found = mt.allreduce(found, op=mt.Sum, name="features")
        classes = mt.allreduce(classes, op=mt.Sum, name="classes")
    return found, classes


def _fitted(x: Tensor, truth: Tensor, decay: float, smoothing: float, start: Tensor) -> Tensor:
    """Return the weights with the lowest mean loss plus the decay times the sum of their squares, from a start."""
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(x @ weights[:-1] + weights[-1], truth, label_smoothing=smoothing)
        loss = loss + decay * weights[:-1].square().sum()
        loss.backward()  # type: ignore[no-untyped-call] # torch does not annotate it
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call] # torch does not annotate it
    return weights.detach()


def _loss(weights: Tensor, features: Tensor, truth: Tensor) -> float:
    """Return the mean loss of the means of the symmetric pictures' probabilities."""
    logits = (features @ weights[:-1] + weights[-1]).log_softmax(2).logsumexp(0) - math.log(len(features))
    return float(cross_entropy(logits, truth))
