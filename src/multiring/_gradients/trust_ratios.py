"""Trust ratios: factors of a layer's step, from norms of its weights and step.

    LARS          trust |w| / (|g| + wd |w| + eps)        as published; or trust |w| / (|g + wd w| + eps)
    LARC, scale   the LARS ratio, as a factor of the learning rate
    LARC, clip    the LARS ratio over the learning rate, at most 1
    LAMB          phi(|w|) / |u|                           u is Adam's direction with decay

If a layer's weights or its step are zero, its ratio is 1, so that zero-initialised layers begin to move.

Source: You, Gitman & Ginsburg, "Large batch training of convolutional networks", 2017, arXiv 1708.03888 (LARS, and LARC
as its clipped form); You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR 2020,
arXiv 1904.00962 (LAMB).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

# For each published form of LARS: the ratio's denominator, and whether the momentum includes the learning rate.
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
    """Return the LARS ratio of each layer. All arrays have the shape (layers,).

    Args:
        weights: |w|.
        gradients: |g|.
        decayed: |g + wd w|; used only with the denominator "sum".
        trust: the trust coefficient, eta.
        weight_decay: wd.
        eps: number added to the denominator.
        denominator: "norms" as published, or "sum" as in optax.
    """
    own, norms = np.asarray(weights, float), np.asarray(gradients, float)
    below = norms + weight_decay * own if denominator == "norms" else np.asarray(decayed, float)
    has_one = (own > 0) & ((norms if denominator == "norms" else below) > 0)
    return np.where(has_one, trust * own / np.where(has_one, below + eps, 1.0), 1.0)


def larc_ratios(ratios: ArrayLike, learning_rate: float, mode: str) -> Ratios:
    """Return the gradient's factor for each LARS ratio, given the learning rate.

    Args:
        ratios: the result of `lars_ratios`.
        learning_rate: the optimizer's learning rate.
        mode: "scale" returns the ratio itself. "clip" makes the ratio an upper limit of the learning rate.
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
    """Return the LAMB ratio of each layer. All arrays have the shape (layers,).

    Args:
        weights: |w|.
        directions: |u|.
        limits: phi: the lower and the upper limit of |w|.
        clip: the upper limit of the ratio.
    """
    own, norms = np.asarray(weights, float), np.asarray(directions, float)
    has_one = (own > 0) & (norms > 0)
    counted = own if limits is None else np.clip(own, *limits)
    found = np.where(has_one, counted / np.where(has_one, norms, 1.0), 1.0)
    return found if clip is None else np.minimum(found, clip)
