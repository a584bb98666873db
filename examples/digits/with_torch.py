"""Digits with torch: `multiring run -n 2 -- python examples/digits/with_torch.py`."""

from collections.abc import Mapping
from typing import Any

import torch
from digits_task import MOMENTUM, RATE, main  # type: ignore[import-not-found] # beside this file
from torch import nn

import multiring.torch as mt


class Model:
    """The network, trained by DistributedOptimizer."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        values = [torch.tensor(weights["a"].T), torch.tensor(weights["b"])]
        values += [torch.tensor(weights["c"].T), torch.tensor(weights["d"])]
        for parameter, value in zip(self._net.parameters(), values, strict=True):
            parameter.data.copy_(value)
        plain = torch.optim.SGD(self._net.parameters(), lr=RATE, momentum=MOMENTUM)
        self._optimizer = mt.DistributedOptimizer(plain, self._net.named_parameters())

    def step(self, images: Any, labels: Any) -> float:
        """See digits_task.Model."""
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._net(torch.from_numpy(images)), torch.from_numpy(labels))
        loss.backward()  # type: ignore[no-untyped-call] # torch's own
        self._optimizer.step()
        return float(loss)

    def scores(self, images: Any) -> Any:
        """See digits_task.Model."""
        return self._net(torch.from_numpy(images)).detach().numpy()


if __name__ == "__main__":
    main("torch", mt.init, Model)
