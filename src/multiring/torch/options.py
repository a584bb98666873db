"""What a DistributedOptimizer was asked for, and whether that makes sense."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multiring.errors import ArgumentError
from multiring.schedule import wire_of
from multiring.torch.tensors import dtype_name

OPS = ("average", "sum")


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Send each gradient that is a matrix as two narrow factors, and what they leave out with the next gradient.

    A gradient of shape (n, ...) is an n x m matrix M; its factors P (n x rank) and Q (m x rank) take rank (n + m)
    numbers instead of n m. Gradients that this would not make smaller, such as those of biases, travel as they are.
    The larger `rank`, the closer P Q^T is to M.

    Args:
        rank: of the approximation.
        seed: of the first Q; the same on all ranks.

    Raises:
        ArgumentError: `rank` below 1, or `seed` below 0.

    Source: Vogels, Karimireddy & Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
    optimization", NeurIPS 2019, arXiv 1905.13727.
    """

    rank: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("rank", self.rank, 1), ("seed", self.seed, 0)):
            try:
                number = operator.index(value)
            except TypeError:
                number = least - 1
            if number < least:
                raise ArgumentError(f"PowerSGD({name}={value!r}): want an integer >= {least}")

    def pays(self, rows: int, columns: int) -> bool:
        """Return whether the factors of a matrix are smaller than it."""
        return self.rank * (rows + columns) < rows * columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How gradients are shared; see `DistributedOptimizer`."""

    op: str
    bucket_bytes: int
    backward_passes_per_step: int
    wire: str | None = None
    error_feedback: bool = False
    compression: PowerSGD | None = None

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ArgumentError(f"op={self.op!r}: want one of {', '.join(OPS)}")
        if self.bucket_bytes < 1 or self.backward_passes_per_step < 1:
            raise ArgumentError(
                f"bucket_bytes={self.bucket_bytes!r}, backward_passes_per_step={self.backward_passes_per_step!r}: "
                "want 1 or more"
            )
        if not isinstance(self.compression, PowerSGD | None):
            raise ArgumentError(f"compression={self.compression!r}: want PowerSGD(rank=...), or None")
        wire_of(self.wire)
        if self.wire is not None and self.compression is not None:
            raise ArgumentError(
                f"wire={self.wire!r} and compression={self.compression}: want one of them; factors travel as float32"
            )
        if self.error_feedback and self.wire is None and self.compression is None:
            raise ArgumentError(
                "error_feedback=True without wire: nothing is lost to feed back; want wire=... too, or neither"
            )

    def __str__(self) -> str:
        plain = [f"{name}={getattr(self, name)!r}" for name in ("op", "bucket_bytes", "backward_passes_per_step")]
        return ", ".join([*plain, *self._lossy])

    @property
    def _lossy(self) -> list[str]:
        names = ("wire", "error_feedback", "compression")
        return [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name)]

    def require_fit(self, parameters: Sequence[tuple[str, Tensor]]) -> None:
        """Raise ArgumentError where `parameters` cannot be shared in the lossy way that was asked for."""
        if not self._lossy:
            return
        what = ", ".join(self._lossy)
        for name, parameter in parameters:
            if parameter.dtype != torch.float32:
                raise ArgumentError(
                    f"parameter {name} is {dtype_name(parameter.dtype)}, and {what} takes float32 gradients only: "
                    "use model.float(), or leave the option out"
                )
        if self.compression is not None:
            shapes = {name: matrix_shape(parameter) for name, parameter in parameters}
            if parameters and not any(self.compression.pays(*shape) for shape in shapes.values()):
                name = max(shapes, key=lambda name: min(shapes[name]))
                raise ArgumentError(
                    f"{what} would compress no parameter: not even {name}, a matrix of {shapes[name]}, is larger than "
                    "its factors; want a lower rank, or no compression"
                )


def matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Return the rows and columns of `parameter` as PowerSGD sees it.

    Rows are the outermost dimension in memory that is longer than 1: for a convolution its output channels, whether
    or not its memory format is channels_last.
    """
    strides = torch.empty_like(parameter, device="meta").stride()
    outermost = max(
        (dim for dim in range(parameter.dim()) if parameter.shape[dim] > 1), key=lambda dim: strides[dim], default=None
    )
    if outermost is None:
        return 1, parameter.numel()
    rows = parameter.shape[outermost]
    return rows, parameter.numel() // rows
