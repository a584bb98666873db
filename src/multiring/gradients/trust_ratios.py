"""Trust ratios: how far a layer's step goes, by how large its weights and its step are.

    LARS          trust |w| / (|g| + wd |w| + eps)        as published; or trust |w| / (|g + wd w| + eps)
    LARC, scale   the same, of the learning rate
    LARC, clip    the same over the learning rate, at most 1
    LAMB          phi(|w|) / |u|                           u is Adam's direction with decay

A layer whose weights or whose step are zero has none: its ratio is 1, so that zero-initialised layers begin to move.

Source: You, Gitman & Ginsburg, "Large batch training of convolutional networks", 2017, arXiv 1708.03888 (LARS, and LARC
as its clipped form); You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020,
arXiv 1904.00962 (LAMB).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Each published form of LARS: the ratio's denominator, and whether the learning rate is inside the momentum.
LARS_FORMS = {"paper": ("norms", True), "optax": ("sum", True), "timm": ("norms", False)}
Ratios = NDArray[np.float64]


def lars_ratios(  # noqa: PLR0913 -- one number for each term of the formula
    weights: ArrayLike,
    gradients: ArrayLike,
    decayed: ArrayLike,
    *,
    trust: float,
    weight_decay: float = 0.0,
    eps: float = 0.0,
    denominator: str = "norms",
) -> Ratios:
    """Return the ratio of each layer; shape (layers,), as all arguments.

    Args:
        weights: |w|.
        gradients: |g|.
        decayed: |g + wd w|, for the denominator "sum"; else not looked at.
        trust: the trust coefficient, eta.
        weight_decay: wd.
        eps: added to the denominator.
        denominator: "norms" as published, "sum" as optax has it.
    """
    own, norms = np.asarray(weights, float), np.asarray(gradients, float)
    below = norms + weight_decay * own if denominator == "norms" else np.asarray(decayed, float)
    has_one = (own > 0) & ((norms if denominator == "norms" else below) > 0)
    return np.where(has_one, trust * own / np.where(has_one, below + eps, 1.0), 1.0)


def larc_ratios(ratios: ArrayLike, learning_rate: float, mode: str) -> Ratios:
    """Return what a LARS ratio multiplies the gradient by, before a step with `learning_rate`.

    Args:
        ratios: of `lars_ratios`.
        learning_rate: the optimizer's, above 0 for "clip".
        mode: "scale": the ratio itself; "clip": the ratio is a limit of the learning rate, which it does not exceed.
    """
    found = np.asarray(ratios, float)
    if mode == "scale":
        return found
    return np.minimum(found / learning_rate, 1.0) if learning_rate > 0 else np.ones_like(found)


def lamb_ratios(
    weights: ArrayLike,
    directions: ArrayLike,
    *,
    limits: tuple[float, float] | None = None,
    clip: float | None = None,
) -> Ratios:
    """Return the ratio of each layer; shape (layers,), as the first two.

    Args:
        weights: |w|.
        directions: |u|.
        limits: phi, the least and the most that |w| counts for.
        clip: the most that a ratio is.
    """
    own, norms = np.asarray(weights, float), np.asarray(directions, float)
    has_one = (own > 0) & (norms > 0)
    counted = own if limits is None else np.clip(own, *limits)
    found = np.where(has_one, counted / np.where(has_one, norms, 1.0), 1.0)
    return found if clip is None else np.minimum(found, clip)
