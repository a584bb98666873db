"""Digits with tinygrad: `multiring run -n 2 -- python examples/digits/with_tinygrad.py`. DEV names its device."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from digits_task import MOMENTUM, RATE, main  # type: ignore[import-not-found] # beside this file
from tinygrad import Context, Tensor, TinyJit, nn

from multiring import adapters

sys.path.insert(0, str(Path(__file__).parents[1]))
import tinygrad_multiring as tm  # type: ignore[import-not-found] # in the folder above


class Model:
    """The network, trained by an optimizer that averages gradients over ranks."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights = {name: Tensor(value).realize() for name, value in weights.items()}
        plain = nn.optim.SGD(list(self._weights.values()), lr=RATE, momentum=MOMENTUM)
        self._optimizer = tm.distribute(plain)
        self._computed = TinyJit(self._loss_and_gradients)

    def _scores(self, images: Tensor) -> Tensor:
        held = self._weights
        return (images @ held["a"] + held["b"]).relu() @ held["c"] + held["d"]

    def _loss_and_gradients(self, images: Tensor, labels: Tensor) -> list[Tensor]:
        self._optimizer.zero_grad()
        loss = self._scores(images).sparse_categorical_crossentropy(labels).backward()
        return [loss.realize(), *(each.grad.realize() for each in self._weights.values())]

    def step(self, images: Any, labels: Any) -> float:
        """See digits_task.Model."""
        with Context(TRAINING=1):
            loss, *gradients = self._computed(Tensor(images).realize(), Tensor(labels).realize())
            for weight, gradient in zip(self._weights.values(), gradients, strict=True):
                weight.grad = gradient  # a replayed JIT program does not set it
            self._optimizer.step()
        return float(loss.item())

    def scores(self, images: Any) -> Any:
        """See digits_task.Model."""
        return self._scores(Tensor(images)).numpy()


if __name__ == "__main__":
    main("tinygrad", adapters.init, Model)
