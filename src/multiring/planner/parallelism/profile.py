"""The profile of a training step: the parts of a model and their measurements, as input of forecasts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from multiring._schedule import Wire
from multiring.errors import ArgumentError
from multiring.planner.parallelism.feeding import Feeding

# torch's DistributedDataParallel and multiring's own buckets have this limit.
_BUCKET_BYTES = 25 << 20
_MOST_LAG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientExchange:
    """How the ranks of a data axis average gradients.

    A bucket is complete once it has `bucket_bytes`, as DistributedDataParallel's buckets are; with `at_most`, before it
    would have more, as multiring's buckets are. The limit of the first bucket is at most 1 MiB. `wire` encodes
    gradients between hosts. With a `lag` of 1, a step uses the averages of the previous step's gradients, so that
    communication has a whole step.

    Raises:
        ArgumentError: the limit is not positive, or the lag is neither 0 nor 1.
    """

    bucket_bytes: int = _BUCKET_BYTES
    at_most: bool = False
    wire: Wire = Wire.NONE
    lag: int = 0

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1 or not 0 <= self.lag <= _MOST_LAG:
            raise ArgumentError(
                f"buckets of {self.bucket_bytes} bytes with a lag of {self.lag}: want 1 byte or more, and 0 or 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A part of a model that is gathered, or given to a pipeline's stage, as a whole.

    Units run in their order.

    `seconds` (forward and backward) has a meaning only relative to other units. `output_bytes`, `saved_bytes` (the
    tensors that autograd saves until backward), `gathers` and `sums` are bytes for one sample. The fields that begin
    with `split` describe the part that the ranks of a tensor axis divide. These ranks exchange `gathers` (the bytes of
    each all-gather) and `sums` (the bytes of each all-reduce).
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
    """The seconds of the whole model's forward and backward for some samples, while all ranks compute."""

    samples: int
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Overheads:
    """The time that torch itself takes while all ranks compute, in seconds.

    `collective_s` is the excess of a collective over its price, at any size: dispatch, and ranks that come late.
    `update_s_per_byte` is the optimizer's time for each byte of parameters. `update_s_per_divided_byte` replaces it if
    ranks divide the parameters: smaller tensors stay in caches. `update_s_per_parameter` is added for each tensor, and
    `update_s_per_dtensor` for each DTensor. `sharded_unit_s` is the time for each group of parameters that is gathered
    and reduced together, `split_module_s` for each module that a tensor axis divides, `microbatch_s` for each
    microbatch of a stage, and `copy_s_per_byte` for a copied byte. `sum_s_per_byte` is the time to add a byte of
    gradients to the gradients of earlier microbatches. `outside_s` is the part of a step outside of forward, backward
    and update: the wait for samples, and the program's own code.
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
    outside_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A model, the batch that all ranks together train on in one step, and the measurements of both.

    `compute` is sorted by samples. `crowding` is the computing time while all ranks compute, divided by the time while
    one rank computes: above 1 if ranks share cores. The optimizer keeps `optimizer_states` times the bytes of the
    parameters. `refused` maps an axis ("tensor", "pipeline") to the reason why it is impossible. The number of ranks on
    a tensor axis must divide `divisor`. `spread` has the compute of each measured step, divided by their median; empty:
    the steps were not told apart. `feeding` says how samples are made; None: that is unknown, and a step waits for them
    as long as `overheads.outside_s` says.

    Raises:
        ArgumentError: there are no units, no samples, or no measurements.
    """

    units: tuple[Unit, ...]
    batch: int
    compute: tuple[Compute, ...]
    crowding: float = 1.0
    optimizer_states: int = 2
    overheads: Overheads = Overheads()
    divisor: int = 0
    exchange: GradientExchange = GradientExchange()
    refused: Mapping[str, str] = field(default_factory=dict)
    spread: tuple[float, ...] = ()
    feeding: Feeding | None = None

    def __post_init__(self) -> None:
        if not self.units or self.batch < 1 or not self.compute:
            raise ArgumentError(
                f"{len(self.units)} units, a batch of {self.batch}, {len(self.compute)} measurements: want all > 0"
            )

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters."""
        return sum(unit.parameter_bytes for unit in self.units)

    @property
    def split_share(self) -> float:
        """The part of the computing that the ranks of a tensor axis divide."""
        whole = sum(unit.seconds for unit in self.units)
        return sum(unit.split_seconds for unit in self.units) / whole if whole else 0.0

    def slowest_of(self, ranks: int) -> float:
        """Return the median, over steps, of the longest compute of `ranks` ranks, divided by the median of one rank.

        The ranks' steps are taken to vary independently, each as `spread` does. The maximum of N draws is below x if
        all are, so its median is the quantile 0.5^(1/N) of one. It is at most the longest step that was measured.
        """
        return float(np.quantile(self.spread, 0.5 ** (1 / ranks))) if self.spread else 1.0

    def compute_of(self, samples: float) -> Compute:
        """Return the time of `samples`: interpolated between measurements, in proportion beyond the last one."""
        first, last = self.compute[0], self.compute[-1]
        if samples <= first.samples or len(self.compute) == 1:
            # A step has a fixed part, so fewer samples than measured take no less time.
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
