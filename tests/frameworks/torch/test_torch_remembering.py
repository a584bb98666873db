"""Measuring a model undoes every change that forward passes make to it."""

import copy
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from multiring.torch.parallelizing.measuring import undone
from multiring.torch.step.noise import _Observation


class Stateful(nn.Module):
    """A module that changes a random choice of its state in each forward pass."""

    total: Tensor
    mean: Tensor
    missing: Tensor | None

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)  # noqa: S311 -- no secret
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("total", torch.zeros(()), persistent=draw.random() < 0.5)
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("missing", None)
        self.calls = draw.randrange(5)
        self.seen: list[Any] = [torch.zeros(2), {"deep": [1, 2]}]
        self.queue = deque([1, 2], maxlen=4)
        self.names = {"a"}
        self.array = np.zeros(3)
        self.kinds = draw.sample(range(8), draw.randrange(1, 8))

    def forward(self, given: Tensor) -> Tensor:
        """Change state, and return a scalar that depends on `given`."""
        for kind in self.kinds:
            self._change(kind, given)
        return (given * self.weight).sum()

    def _change(self, kind: int, given: Tensor) -> None:
        match kind:
            case 0:
                self.total.add_(1)
            case 1:
                self.mean = self.mean * 0.9 + given.mean()
            case 2:
                self.missing = given.detach().clone()
            case 3:
                self.calls += 1
            case 4:
                self.seen[0].add_(1)
                self.seen[1]["deep"].append(3)
                self.seen.append(given)
            case 5:
                self.queue.append(3)
                self.names.add("b")
                self.array += 1
            case 6:
                self.register_buffer(f"more{len(self.queue)}", torch.ones(1))
            case _:
                self.weight.data.mul_(0.5)


def state_of(module: nn.Module) -> str:
    return str({name: value for name, value in vars(module).items() if name != "_modules"})


@pytest.mark.parametrize("seed", range(20))
def test_a_model_is_what_it_was_after_measuring(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(Stateful(seed), nn.Identity())
    before, same = copy.deepcopy(model), vars(model[0])["seen"]
    drawn = (random.getstate(), torch.get_rng_state())
    with undone(model):
        for _ in range(3):
            torch.autograd.backward([model(torch.randn(3))])
            random.random()  # noqa: S311 -- no secret
    assert state_of(model[0]) == state_of(before[0])
    assert vars(model[0])["seen"] is same
    assert random.getstate() == drawn[0]
    assert torch.equal(torch.get_rng_state(), drawn[1])
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("seed", range(4))
def test_a_sketch_has_the_norm_of_what_it_is_of(seed: int) -> None:
    """A sketch keeps the squared norm in expectation, and it is linear.

    For the same signs, the sketch of a mean is the mean of the sketches.
    """
    draw = torch.Generator().manual_seed(seed)
    shapes = [(int(n), 7) for n in torch.randint(1, 900, (5,), generator=draw)]
    one, other = ([torch.randn(*shape, generator=draw) for shape in shapes] for _ in range(2))
    found = []
    for gradients in (one, other, [(a + b) / 2 for a, b in zip(one, other, strict=True)]):
        observation = _Observation(4096, seed)
        observation.begin()
        observation.see_own(gradients[:2])
        observation.see_own(gradients[2:])
        want = float(sum(each.double().square().sum() for each in gradients))
        assert observation.own == pytest.approx(want, rel=0.15)  # six standard deviations of 2 / sqrt(2 * 4096)
        found.append(observation.sketch.copy())
    assert np.allclose((found[0] + found[1]) / 2, found[2], atol=1e-4)
