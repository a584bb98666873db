"""Training with lossy gradient compression, and checks that must hold with it."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import multiring

SHAPES = ((6, 8), (7,), (4, 3, 3, 3), (2, 2))  # PowerSGD compresses the first and the third


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    """Return parameters whose gradients a test sets; a convolution is channels_last."""
    made = [torch.zeros(shape) for shape in shapes]
    return [nn.Parameter(each.to(memory_format=torch.channels_last) if each.dim() == 4 else each) for each in made]


def gradient(shape: tuple[int, ...], *seeds: int) -> NDArray[np.float32]:
    """Return a gradient that is the same in every process."""
    return np.random.default_rng(seeds).standard_normal(shape, np.float32)


def hand_over(shared: Sequence[nn.Parameter], step: int, rank: int) -> list[Tensor]:
    """Set each parameter's gradient of this step and rank by a backward pass.

    Return the gradients.
    """
    given = [torch.from_numpy(gradient(tuple(each.shape), step, rank, i)) for i, each in enumerate(shared)]
    loss = sum(((each * value).sum() for each, value in zip(shared, given, strict=True)), torch.zeros(()))
    loss.backward()  # type: ignore[no-untyped-call] # torch has no type for it
    return given


def expect_same_bits(group: multiring.Group, tensors: Sequence[Any]) -> None:
    """Assert that `tensors` have the same bits on all ranks."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    hashes = np.asarray(group.all_gather(np.frombuffer(digest.digest(), np.uint64)))
    assert (hashes == hashes[0]).all()


def residuals(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Return the gradients that this rank has not sent yet, by parameter."""
    found: dict[int, Tensor] = optimizer.state_dict()["multiring"]["residuals"]
    return found
