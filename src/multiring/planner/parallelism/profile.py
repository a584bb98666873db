"""A training step as forecasts see it: the parts of a model, and what was measured of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from multiring.errors import ArgumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A part of a model that is gathered, or given to a pipeline's stage, as a whole; units run in their order.

    `seconds` (forward and backward) counts beside that of other units only. `output_bytes`, `saved_bytes` (what
    autograd keeps until backward), `gathers` and `sums` are bytes of one sample. What begins with `split` is the part
    that the ranks of a tensor axis divide; they exchange `gathers` (the bytes of each all-gather) and `sums` (of each
    all-reduce).
    """

    name: str
    parameters: int
    parameter_bytes: int
    seconds: float
    output_bytes: float
    saved_bytes: float
    split_parameters: int = 0
    split_bytes: int = 0
    split_seconds: float = 0.0
    gathers: tuple[float, ...] = ()
    sums: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Compute:
    """What forward and backward of the whole model take for some samples, while all ranks compute."""

    samples: int
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """What torch itself takes, while all ranks compute; all in seconds.

    `collective_s` is what a collective takes longer than its price, however small: dispatch, and ranks that come late.
    `update_s_per_byte` is the optimizer's for each byte of parameters (`update_s_per_divided_byte` where ranks divide
    them: smaller tensors stay in caches), `update_s_per_parameter` for each tensor, and
    `update_s_per_dtensor` for each that is a DTensor. `sharded_unit_s` is for each group of parameters that is gathered
    and reduced together, `split_module_s` for each module that a tensor axis divides, `microbatch_s` for each
    microbatch of a stage, `copy_s_per_byte` for a byte copied, `sum_s_per_byte` for a byte of gradients that are added
    to those of earlier microbatches.
    """

    collective_s: float = 0.0
    update_s_per_byte: float = 0.0
    update_s_per_divided_byte: float = 0.0
    update_s_per_parameter: float = 0.0
    update_s_per_dtensor: float = 0.0
    sharded_unit_s: float = 0.0
    split_module_s: float = 0.0
    microbatch_s: float = 0.0
    copy_s_per_byte: float = 0.0
    sum_s_per_byte: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A model, the batch that all ranks together train on in one step, and what was measured of both.

    `compute` ascends by samples. `crowding` is how many times longer computing takes while all ranks do it than while
    one does: above 1 where ranks share cores. An optimizer keeps `optimizer_states` times the bytes of the parameters.
    `refused` says why an axis ("tensor", "pipeline") cannot be had; `divisor` is what the ranks of a tensor axis
    have to divide.

    Raises:
        ArgumentError: no units, no samples, or nothing was measured.
    """

    units: tuple[Unit, ...]
    batch: int
    compute: tuple[Compute, ...]
    crowding: float = 1.0
    optimizer_states: int = 2
    overheads: Overheads = Overheads()
    divisor: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.units or self.batch < 1 or not self.compute:
            raise ArgumentError(
                f"{len(self.units)} units, a batch of {self.batch}, {len(self.compute)} measurements: want some of each"
            )

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters."""
        return sum(unit.parameter_bytes for unit in self.units)

    @property
    def split_share(self) -> float:
        """Which part of the computing the ranks of a tensor axis divide."""
        whole = sum(unit.seconds for unit in self.units)
        return sum(unit.split_seconds for unit in self.units) / whole if whole else 0.0

    def compute_of(self, samples: float) -> Compute:
        """Return what `samples` take: between two measurements in a straight line, beyond the last in proportion."""
        first, last = self.compute[0], self.compute[-1]
        if samples <= first.samples or len(self.compute) == 1:
            # Below what was measured a step has the same fixed part: it is no shorter in proportion.
            scale = max(samples / first.samples, 1.0)
            return Compute(first.samples, first.forward_s * scale, first.backward_s * scale)
        if samples >= last.samples:
            scale = samples / last.samples
            return Compute(last.samples, last.forward_s * scale, last.backward_s * scale)
        low, high = next(pair for pair in pairwise(self.compute) if samples <= pair[1].samples)
        at = (samples - low.samples) / (high.samples - low.samples)
        return Compute(
            round(samples),
            low.forward_s + at * (high.forward_s - low.forward_s),
            low.backward_s + at * (high.backward_s - low.backward_s),
        )
