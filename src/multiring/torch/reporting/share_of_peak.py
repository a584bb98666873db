"""The speed of a training run: samples and FLOP a second, and share of the peak.

FLOP are those of matrix products, convolutions, attention and recurrent layers, forward and backward. torch's counter
and `flop_formulas` count them on a plain copy of the model without values. A multiplication with its addition counts as
two FLOP, and recomputation by activation checkpointing does not count. The peak is the highest rate of matrix products
and of a convolution. It is measured on this machine, on all ranks at once; neither number comes from a data sheet.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from multiring._arguments import require_function, require_whole
from multiring._frontend.joining import barrier
from multiring._frontend.lifecycle import size
from multiring._frontend.object_collectives import allgather_object
from multiring._runtime import is_initialized
from multiring.errors import ArgumentError, StateError
from multiring.torch.parallelizing.held import held_of_module
from multiring.torch.reporting.flop_formulas import FORMULAS

SIZES = (512, 1024, 2048, 4096)
_CHANNELS = 512
_PIXELS = 14
_IMAGES = 4
_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def training_flop(model: nn.Module, step: Callable[[nn.Module], Tensor]) -> int:
    """Return the FLOP of one step, forward and backward.

    Args:
        model: the model. A plain copy of it is counted, so hooks of the original are not called.
        step: a function that gets the copy and returns its loss for the intended number of samples.

    Raises:
        ArgumentError: `step` returns no differentiable loss, or no operation of the model is counted.
    """
    held = held_of_module(model)
    if held is not None and not held.is_whole:
        raise ArgumentError(
            f"training_flop of a model under {held.parallelism}: want the plain model as one process has it; it need "
            "not be trained"
        )
    # Tensors without values suffice to count, so this takes neither the time nor the memory of a step.
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        shapes = {id(each): mode.from_tensor(each) for each in (*model.parameters(), *model.buffers())}
        with mode:
            return _counted(copy.deepcopy(model, shapes), step)
    except ArgumentError:
        raise
    except Exception:  # noqa: BLE001 -- the step may need values: .item(), a mask, NumPy; other errors show below
        return _counted(copy.deepcopy(model), step)


class _NoModules:
    """Replaces torch's module tracker, whose hooks break a step that calls autograd.grad itself."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_what: object) -> None:
        """Do nothing."""


class _Counter(FlopCounterMode):
    """torch's counter without operations that activation checkpointing recomputes in backward."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=FORMULAS)
        self.mod_tracker: Any = _NoModules()
        self.is_backward = False

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # In a backward, only recomputed operations have gradients enabled.
        if self.is_backward and torch.is_grad_enabled():
            return out
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call] # torch does not annotate it


def _counted(plain: nn.Module, step: Callable[[nn.Module], Tensor]) -> int:
    counter: Any = _Counter()
    with counter:
        loss = step(plain)
        if not loss.requires_grad:
            raise ArgumentError("training_flop: `step` returned no loss; want a function of the model that returns one")
        counter.is_backward = True
        loss.backward()  # type: ignore[no-untyped-call] # torch does not annotate it
    found = int(counter.get_total_flops())
    if not found:
        raise ArgumentError("training_flop: torch's counter knows none of the operations of this model")
    return found


def measured_peak(
    dtype: str = "float32", *, sizes: Sequence[int] = SIZES, channels: int = _CHANNELS, seconds: float = 0.2
) -> dict[str, float]:
    """Return this rank's FLOP/s of matrix products and of a 3 x 3 convolution.

    All ranks measure at the same time. In a job of several ranks, every rank has to call it.

    Args:
        dtype: "float32", "bf16" or "fp16".
        sizes: the sizes of the square matrices.
        channels: channels of the convolution. Its images have 14 x 14 pixels, in channels_last.
        seconds: minimum duration of each measurement; the work is repeated at least twice.

    Returns:
        The rates by name, for example "matrix 512".

    Raises:
        ArgumentError: `dtype` is none of the three.
    """
    if dtype not in _DTYPES:
        raise ArgumentError(f"measured_peak(dtype={dtype!r}): want {' or '.join(map(repr, _DTYPES))}")
    kind = _DTYPES[dtype]
    found = {}
    with torch.no_grad():
        for n in sizes:
            one, other = torch.ones(n, n, dtype=kind, device="cpu"), torch.ones(n, n, dtype=kind, device="cpu")
            found[f"matrix {n}"] = _rate(lambda a=one, b=other: a @ b, 2 * n**3, seconds)  # type: ignore[misc]
        layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False, dtype=kind)
        layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
        images = torch.ones(_IMAGES, channels, _PIXELS, _PIXELS, dtype=kind, device="cpu").to(
            memory_format=torch.channels_last
        )
        flop = 2 * 9 * channels**2 * _PIXELS**2 * _IMAGES
        found[f"convolution {channels}"] = _rate(lambda: layer(images), flop, seconds)
    return found


def _rate(work: Callable[[], object], flop: float, seconds: float) -> float:
    """Return the best rate of `work` in FLOP/s, after one warm-up call."""
    work()
    if is_initialized() and size() > 1:
        barrier()
    best, ends, calls = float("inf"), time.perf_counter() + seconds, 0
    while calls < 2 or time.perf_counter() < ends:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
        calls += 1
    return flop / best


@dataclass(frozen=True, slots=True)
class Throughput:
    """The speed of a training run, of all ranks together.

    Attributes:
        seconds: time of training: input, steps and logging, without the time within `paused`.
        samples: number of samples of all ranks.
        flop: FLOP of these samples.
        peak: highest of `peaks`.
        peaks: for each measurement of the peak (before, between and after training), the sum over ranks of FLOP/s.
        ranks: number of ranks.
        dtype: data type with which the peak was measured.
    """

    seconds: float
    samples: int
    flop: float
    peak: float
    peaks: tuple[float, ...]
    ranks: int
    dtype: str

    @property
    def share(self) -> float:
        """The sustained share of the peak, as a fraction."""
        return self.flop / self.seconds / self.peak

    def __str__(self) -> str:
        rate, sustained = self.samples / self.seconds, self.flop / self.seconds / 1e9
        seen = ", ".join(f"{each / 1e9:,.1f}" for each in self.peaks)
        return (
            f"{self.samples:,} samples in {self.seconds:,.1f} s on {self.ranks} ranks: {rate:,.1f} a second\n"
            f"sustained {sustained:,.2f} GFLOP/s, {100 * self.share:.1f} % of {self.peak / 1e9:,.1f} in {self.dtype}\n"
            f"(FLOP by torch's counter on the plain model; time with input and logging, without evaluation and "
            f"checkpoints;\nthe peak is the highest rate of matrix products and a convolution, all ranks at once, of "
            f"{len(self.peaks)} times: {seen})"
        )


class TrainingReport:
    """Counts the samples of a run and their time; see `training_report`."""

    def __init__(
        self,
        flop_per_sample: float,
        dtype: str,
        measure: Callable[[], dict[str, float]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._flop, self._dtype, self._measure, self._clock = flop_per_sample, dtype, measure, clock
        self._peaks: list[float] = []
        self._samples, self._seconds = 0, 0.0
        self._began: float | None = None
        self._peaks.append(max(self._measure().values()))
        self._began = self._clock()

    @property
    def samples(self) -> int:
        """The number of samples that this rank has counted."""
        return self._samples

    def count(self, samples: int) -> None:
        """Count a step of `samples` samples of this rank."""
        self._samples += samples

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock within the block, for example for evaluation or checkpoints."""
        if self._began is None:
            raise StateError("training report: paused() within paused()")
        self._seconds += self._clock() - self._began
        self._began = None
        try:
            yield
        finally:
            self._began = self._clock()

    def measure_peak(self) -> None:
        """Measure the peak again, outside of the counted time. Every rank calls it."""
        with self.paused():
            self._peaks.append(max(self._measure().values()))

    def finish(self) -> Throughput:
        """Measure the peak a last time, and return the speed of all ranks.

        Every rank calls it.

        Raises:
            StateError: no rank has counted a sample.
        """
        self.measure_peak()
        with self.paused():
            own = (self._seconds, self._samples, self._peaks)
        every: list[Any] = allgather_object(own, name="training_report") if is_initialized() else [own]
        samples = sum(each[1] for each in every)
        if not samples:
            raise StateError("training report: no samples; call count(samples) after each step")
        peaks = tuple(map(sum, zip(*(each[2] for each in every), strict=True)))
        return Throughput(
            seconds=max(each[0] for each in every),
            samples=samples,
            flop=samples * self._flop,
            peak=max(peaks),
            peaks=peaks,
            ranks=len(every),
            dtype=self._dtype,
        )


def training_report(
    model: nn.Module,
    step: Callable[[nn.Module], Tensor],
    *,
    samples: int,
    dtype: str = "float32",
    measure: Callable[[], dict[str, float]] | None = None,
) -> TrainingReport:
    """Start to report the speed of a training run, and its share of the peak.

        report = mt.training_report(model, lambda plain: loss_of(plain(inputs), labels), samples=len(inputs))
        for inputs, labels in loader:
            ...
            report.count(len(inputs))
        with report.paused():
            evaluate(model)
        mt.print_once(report.finish())

    Every rank calls it, and measures its peak at the same time.

    Args:
        model: the model to train.
        step: a function that gets a copy of the model and returns the loss of `samples` samples.
        samples: number of samples in `step`'s loss.
        dtype: data type with which the peak is measured.
        measure: a function that measures the peak; by default `measured_peak`, which takes some seconds.

    Raises:
        ArgumentError: `samples` is below 1, or `training_flop` or `measured_peak` raises it.
    """
    samples = require_whole("training_report: samples", samples, 1)
    if measure is not None:
        require_function("training_report: measure", measure, "a function that measures the peak, or None")
    flop = training_flop(model, step) / samples
    return TrainingReport(flop, dtype, measure or (lambda: measured_peak(dtype)))
