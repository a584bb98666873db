"""Digits with Chainer, by ChainerMN's interface: `multiring run -n 2 -- python examples/digits/with_chainer.py`."""

from collections.abc import Mapping
from typing import Any

import chainer
from digits_task import MOMENTUM, RATE, main  # type: ignore[import-not-found] # beside this file

import multiring.chainer as chainermn


class Network(chainer.Chain):  # type: ignore[misc] # Chainer has no types
    """The network."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        super().__init__()
        with self.init_scope():
            self.first = chainer.links.Linear(64, 128, initialW=weights["a"].T, initial_bias=weights["b"])
            self.last = chainer.links.Linear(128, 10, initialW=weights["c"].T, initial_bias=weights["d"])

    def forward(self, images: Any) -> Any:
        """Return ten scores for each image."""
        return self.last(chainer.functions.relu(self.first(images)))


class Model:
    """The network, trained by a multi-node optimizer."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._net = Network(weights)
        # ChainerMN's rule is equivalent: v = momentum * v - rate * gradient; weight += v.
        plain = chainer.optimizers.MomentumSGD(RATE, MOMENTUM)
        self._optimizer = chainermn.create_multi_node_optimizer(plain, chainermn.create_communicator("flat"))
        self._optimizer.setup(self._net)
        self._optimizer.update()  # the first update broadcasts rank 0's weights

    def step(self, images: Any, labels: Any) -> float:
        """See digits_task.Model."""
        loss = chainer.functions.softmax_cross_entropy(self._net(images), labels)
        self._net.cleargrads()
        loss.backward()
        self._optimizer.update()
        return float(loss.array)

    def scores(self, images: Any) -> Any:
        """See digits_task.Model."""
        return self._net(images).array


if __name__ == "__main__":
    main("Chainer", chainermn.init, Model)
