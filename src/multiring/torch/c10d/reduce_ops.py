"""Translate torch's ReduceOp to a Group's operation, with extra steps for operations that a Group lacks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiring._runtime.arrays import DTYPES
from multiring.torch.c10d.errors import RefusedError
from multiring.torch.interop import dtype_name

Fold = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ReduceRule:
    """A way to combine the ranks' contributions."""

    name: str  # the name on which the ranks must agree
    op: str | None = None  # the Group's operation, if there is one
    factor: Any = None  # the factor by which each contribution is multiplied first
    fold: Fold | None = None  # a function that combines two contributions, if a Group has no such operation

    def combine(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the combination of two contributions of one rank; for an average, their sum."""
        return (self.fold or _COMBINED[str(self.op)])(one, other)

    def check(self, what: str, dtype: torch.dtype) -> None:
        """Raise RefusedError unless the reduction supports `dtype`."""
        if dtype.is_complex:
            fits = self.op in {"sum", "average"}
        elif self.fold is not None:
            fits = not dtype.is_floating_point
        elif self.factor is not None:
            fits = dtype.is_floating_point
        else:
            fits = not (dtype is torch.bool and self.op == "average")
        if not fits or (not dtype.is_complex and dtype_name(dtype) not in DTYPES):
            raise RefusedError(f"{what}: {self.name} has no meaning for {dtype_name(dtype)}; convert the tensor")


_COMBINED: dict[str, Fold] = {
    "sum": torch.add,
    "average": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}

_PLAIN = {
    ReduceOp.SUM: ReduceRule("sum", "sum"),
    ReduceOp.AVG: ReduceRule("average", "average"),
    ReduceOp.PRODUCT: ReduceRule("product", "product"),
    ReduceOp.MIN: ReduceRule("min", "min"),
    ReduceOp.MAX: ReduceRule("max", "max"),
    ReduceOp.BAND: ReduceRule("bitwise and", fold=torch.bitwise_and),
    ReduceOp.BOR: ReduceRule("bitwise or", fold=torch.bitwise_or),
    ReduceOp.BXOR: ReduceRule("bitwise xor", fold=torch.bitwise_xor),
}


def reduction_of(op: Any) -> ReduceRule:
    """Return the ReduceRule for `op`, a ReduceOp or a member of its enum.

    Raises:
        RefusedError: `op` is unknown.
    """
    kind = getattr(op, "op", op)
    found = _PLAIN.get(kind)
    if found is not None:
        return found
    if kind == ReduceOp.PREMUL_SUM:
        return ReduceRule("sum of multiples", "sum", factor=_factor_of(op))
    raise RefusedError(f"op={op}: want one of {', '.join(str(known) for known in _PLAIN)}, or PREMUL_SUM")


def _factor_of(op: Any) -> Any:
    # torch has the factor as an attribute since 2.12; before, only the pickled state contains it.
    return op.factor if hasattr(op, "factor") else op.__getstate__()[1]
