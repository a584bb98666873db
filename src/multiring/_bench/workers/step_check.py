"""Check that gradients are the mean over ranks, by one number each, and that all ranks have the same parameters."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from multiring._schedule import FORMATS, wire_of

# An average rounds once, by 6e-8 of an element. A wrong combination is off by about a whole gradient.
TOLERANCE = 1e-4
# Each rank's element is encoded once, and the sum once more. The errors have random signs. With this factor
# of one error, the error of a sum exceeds the tolerance by chance in fewer than one of 10,000 tensors.
_CHANGES = 2.5
# An upper bound of a block's largest element, relative to the root mean square of the block.
_SPREAD = 6
# The signs of a gradient's elements repeat with this prime.
PERIOD = 4093

# By parameter: the sum of its gradient's elements with random signs, and the norm of the gradient.
Sums = Mapping[str, Sequence[float]]


def gathered(tensor: Tensor) -> Tensor:
    """Return `tensor` whole.

    If the tensor is sharded over the ranks, all ranks must call this function.
    """
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def signed_sums(model: nn.Module) -> Sums:
    """Return, for every parameter with a gradient, the sum of its elements with random signs, and its norm.

    The sum is linear: the sum of a mean of gradients is the mean of their sums. So a mean can be checked without
    communication of gradients.
    """
    signs = torch.randint(2, (PERIOD,), generator=torch.Generator().manual_seed(7)).double() * 2 - 1
    sums = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            flat = gathered(parameter.grad).reshape(-1)
            whole = flat.numel() // PERIOD * PERIOD
            folded = flat[:whole].view(-1, PERIOD).sum(0, dtype=torch.float64)
            folded[: flat.numel() - whole] += flat[whole:]
            sums[name] = float(folded.cpu() @ signs), float(torch.linalg.vector_norm(flat, dtype=torch.float64))
    return sums


def tolerance_of(wire: str) -> float:
    """Return the tolerance of a gradient's signed sum, relative to the gradient's norm.

    `wire` is the wire type that the gradient passed; "" is an exact wire.
    """
    form = FORMATS.get(wire_of(wire or None))
    return TOLERANCE if form is None else _CHANGES * form.error * (_SPREAD if form.is_scaled else 1)


def mean_fault(got: Sums, alone: list[Sums], tolerance: float = TOLERANCE) -> str:
    """Return how `got` differs from the mean of the ranks' own gradients `alone`, or ""."""
    if not got or (len(alone) > 1 and alone[0] == alone[1]):
        raise AssertionError(
            "want different gradients on every rank, or this check proves nothing: give each rank its own samples"
        )
    for name, first in alone[0].items():
        if name not in got:
            return f"{name} has no gradient"
        want = sum(sums[name][0] for sums in alone) / len(alone)
        scale = max(first[1], *(sums[name][1] for sums in alone))
        if not abs(got[name][0] - want) <= tolerance * scale:
            return f"the gradient of {name} sums to {got[name][0]:g} with signs, want {want:g}, the mean of all ranks'"
    return ""


def digest(model: nn.Module) -> str:
    """Return a digest of the bits of all parameters."""
    seen = hashlib.sha256()
    for parameter in model.parameters():
        seen.update(gathered(parameter.detach()).reshape(-1).cpu().numpy().data)
    return seen.hexdigest()
