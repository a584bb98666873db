"""The options of gradient reduction, and the check that they do not contradict each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multiring._arguments import require_flag, require_number, whole
from multiring._gradients.buckets import BUCKET_BYTES, GradientSpec
from multiring._schedule import WIRES, wire_of
from multiring.errors import ArgumentError

OPS = ("average", "sum", "adasum")


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """Compress matrix gradients as two narrow factors, with error feedback.

    A gradient of shape (n, ...) is treated as an n x m matrix M with n m numbers. Ranks send its factors P (n x rank)
    and Q (m x rank), which have rank (n + m) numbers. The larger `rank`, the closer P Q^T is to M. Gradients that would
    not become smaller, such as those of biases, are sent unchanged.

    Args:
        rank: rank of the approximation.
        seed: seed of the first Q; the same on all ranks.

    Raises:
        ArgumentError: `rank` is below 1, or `seed` is below 0.

    Source: Vogels, Karimireddy & Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
    optimization", NeurIPS 2019, arXiv 1905.13727.
    """

    rank: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("rank", self.rank, 1), ("seed", self.seed, 0)):
            if not _is_integer(value, least):
                raise ArgumentError(f"PowerSGD({name}={value!r}): want an integer >= {least}")

    def pays(self, rows: int, columns: int) -> bool:
        """Return whether the factors of a matrix are smaller than the matrix."""
        return self.rank * (rows + columns) < rows * columns


@dataclass(frozen=True, slots=True)
class WireOnly:
    """A wire type for `GradientOptions.compression`, for adapters without compressors.

    Raises:
        ArgumentError: there is no such wire type.
    """

    wire: str

    def __post_init__(self) -> None:
        wire_of(self.wire)

    @staticmethod
    def compress(array: Any) -> tuple[Any, Any]:
        """Return `array` unchanged: the wire type encodes it when the array is sent."""
        return array, None

    @staticmethod
    def decompress(array: Any, context: Any) -> Any:
        """Return `array` unchanged."""
        del context
        return array


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientOptions:
    """The options of gradient reduction.

    Args:
        op: "average", "sum" or "adasum".
        bucket_bytes: limit of a bucket, in bytes.
        backward_passes_per_step: number of backwards whose gradients add up before a reduction.
        compression: the form in which gradients are sent: None for their own type; an object whose `wire` is the name
            of a wire type; a PowerSGD; or a compressor with `compress` and `decompress` for arrays of the adapter's
            library.
        error_feedback: whether to add the error of the wire type to the next gradient.
        predivide: the part of an average's divisor that is applied before the sum.
        sparse_as_dense: whether sparse gradients are sent as dense gradients.

    Raises:
        ArgumentError: an option is invalid, or two options contradict each other.
    """

    op: str
    bucket_bytes: int = BUCKET_BYTES
    backward_passes_per_step: int = 1
    compression: Any = None
    error_feedback: bool = False
    predivide: float = 1.0
    sparse_as_dense: bool = False

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ArgumentError(f"op={self.op!r}: want one of {', '.join(OPS)}")
        if not (_is_integer(self.bucket_bytes, 1) and _is_integer(self.backward_passes_per_step, 1)):
            raise ArgumentError(
                f"bucket_bytes={self.bucket_bytes!r}, backward_passes_per_step={self.backward_passes_per_step!r}: "
                "want 1 or more"
            )
        if self.predivide != 1.0 and self.op != "average":
            raise ArgumentError(
                f"gradient_predivide_factor={self.predivide!r} with op={self.op!r}: gradient_predivide_factor is not "
                "supported with op != Average; divide the loss instead"
            )
        require_number("gradient_predivide_factor", self.predivide, above=True)
        require_flag("error_feedback", self.error_feedback)
        require_flag("sparse_as_dense", self.sparse_as_dense)
        if self.factors is None:
            self._require_compressor()
        elif self.op == "adasum":
            raise ArgumentError(f"compression={self.compression} with op='adasum': want op=Average, or op=Sum")
        if self.error_feedback and self.wire is None and self.factors is None:
            raise ArgumentError(
                "error_feedback=True without a wire type: nothing is lost to feed back; want "
                f"compression=Compression.{', .'.join(WIRES)} too, or neither"
            )
        if self.error_feedback and self.op == "adasum":
            raise ArgumentError("error_feedback=True with op='adasum': want op=Average, or op=Sum")

    def _require_compressor(self) -> None:
        try:
            require_compressor(self.compression)
        except ArgumentError as error:
            raise ArgumentError(f"{error}, or PowerSGD(rank=...)") from None

    @property
    def wire(self) -> str | None:
        """The wire type of float32 sums between hosts."""
        wire: str | None = getattr(self.compression, "wire", None)
        return wire

    @property
    def factors(self) -> PowerSGD | None:
        """The PowerSGD options, or None."""
        return self.compression if isinstance(self.compression, PowerSGD) else None

    @property
    def translates(self) -> bool:
        """Whether a caller's own compressor compresses gradients."""
        return self.wire is None and self.factors is None and self.compression is not None

    @property
    def is_lossy(self) -> bool:
        """Whether a compression state is kept from step to step."""
        return self.error_feedback or self.factors is not None

    def __str__(self) -> str:
        shown = [f"{name}={getattr(self, name)!r}" for name in ("op", "bucket_bytes", "backward_passes_per_step")]
        if self.predivide != 1.0:
            shown.append(f"gradient_predivide_factor={self.predivide!r}")
        if self.sparse_as_dense:
            shown.append("sparse_as_dense=True")
        return ", ".join([*shown, *self._lossy])

    @property
    def _lossy(self) -> list[str]:
        shown = []
        if self.factors is not None:
            shown.append(f"compression={self.factors}")
        elif self.compression is not None:
            kind = self.compression if isinstance(self.compression, type) else type(self.compression)
            shown.append(f"compression={f'Compression.{self.wire}' if self.wire else kind.__name__}")
        return [*shown, *["error_feedback=True"] * self.error_feedback]

    def lines_with(self, named: Sequence[tuple[str, GradientSpec]], together: Sequence[Sequence[int]]) -> list[str]:
        """Return lines for ranks to compare: these options, the groups of gradients by index, and the gradients."""
        groups = [f"groups={[list(each) for each in together]}"] if together else []
        forms = [
            f"{name}, {spec.dtype} of shape {spec.shape} with strides {spec.strides}"
            + (f", on {spec.device}" if spec.device else "")
            for name, spec in named
        ]
        return [str(self), *groups, *forms]

    def require_fit(self, parameters: Sequence[tuple[str, GradientSpec]]) -> None:
        """Raise ArgumentError if the lossy options do not support one of `parameters`."""
        if not self.is_lossy:
            return
        what = ", ".join(self._lossy)
        for name, spec in parameters:
            if spec.dtype != "float32":
                raise ArgumentError(
                    f"parameter {name} is {spec.dtype}, and {what} takes float32 gradients only: "
                    "use model.float(), or leave the option out"
                )
        if self.factors is not None:
            shapes = {name: matrix_shape(spec) for name, spec in parameters}
            if parameters and not any(self.factors.pays(*shape) for shape in shapes.values()):
                name = max(shapes, key=lambda name: min(shapes[name]))
                raise ArgumentError(
                    f"{what} would compress no parameter: not even {name}, a matrix of {shapes[name]}, is larger than "
                    "its factors; want a lower rank, or no compression"
                )


def require_compressor(compression: Any) -> None:
    """Raise ArgumentError unless `compression` is a compressor or None."""
    if compression is None:
        return
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise ArgumentError(
            f"compression={compression!r}: want Compression.none, {', '.join(f'.{wire}' for wire in WIRES)}, or an "
            "object with compress and decompress"
        )


def matrix_shape(spec: GradientSpec) -> tuple[int, int]:
    """Return the rows and columns of a gradient as PowerSGD's matrix.

    The rows are the outermost dimension in memory that is longer than 1. For a convolution, these are the output
    channels, with or without channels_last.
    """
    outermost = max(
        (dim for dim, size in enumerate(spec.shape) if size > 1), key=lambda dim: spec.strides[dim], default=None
    )
    if outermost is None:
        return 1, spec.count
    rows = spec.shape[outermost]
    return rows, spec.count // rows


def _is_integer(value: Any, least: int) -> bool:
    found = whole(value)
    return found is not None and found >= least
