"""Digits with JAX: `multiring run -n 2 -- python examples/digits/with_jax.py`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from digits_task import MOMENTUM, RATE, main  # type: ignore[import-not-found] # beside this file

import multiring.jax as mj


def scores_of(weights: Any, images: Any) -> Any:
    """Return ten scores for each image."""
    return jax.nn.relu(images @ weights["a"] + weights["b"]) @ weights["c"] + weights["d"]


def loss_of(weights: Any, images: Any, labels: Any) -> Any:
    """Return the mean loss."""
    logs = jax.nn.log_softmax(scores_of(weights, images))
    return -jnp.take_along_axis(logs, labels[:, None], axis=1).mean()


@jax.jit
def stepped(weights: Any, velocity: Any, images: Any, labels: Any) -> Any:
    """Return weights and velocity after a step with all ranks' gradients, and this rank's loss before the step."""
    loss, own = jax.value_and_grad(loss_of)(weights, images, labels)
    shared = mj.allreduce(own)  # all gradients at once
    velocity = jax.tree.map(lambda v, gradient: MOMENTUM * v + gradient, velocity, shared)
    return jax.tree.map(lambda weight, v: weight - RATE * v, weights, velocity), velocity, loss


class Model:
    """The network, trained in one compiled step."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights: Any = jax.tree.map(jnp.asarray, dict(weights))
        self._velocity: Any = jax.tree.map(jnp.zeros_like, self._weights)

    def step(self, images: Any, labels: Any) -> float:
        """See digits_task.Model."""
        self._weights, self._velocity, loss = stepped(self._weights, self._velocity, images, labels)
        return float(loss)

    def scores(self, images: Any) -> Any:
        """See digits_task.Model."""
        return np.asarray(scores_of(self._weights, images))


if __name__ == "__main__":
    main("JAX", mj.init, Model)
