"""Buckets of gradients on a device, reduced by NCCL on the device.

The bucket's memory never leaves the GPU. The flags, which the host sets and reads, are reduced in host memory at the
same time. This small reduction is also where the ranks notice that their buckets differ, or that a rank is gone. The
caller waits for it, and never for the device: its stream waits for NCCL.

All operations start on the caller's thread, in the order of the calls. This order is the same on all ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multiring._gradients.buckets import BucketLayout
from multiring._gradients.options import GradientOptions
from multiring._gradients.reductions import CompressionState
from multiring._runtime import Group, Handle
from multiring._runtime.group.declining import declining
from multiring._runtime.group.starting import start_agreement
from multiring._schedule import encoded_bytes, wire_of
from multiring.torch.gradients.device_buckets import DeviceBucket
from multiring.torch.interop import allocate, dense_strides, dtype_of
from multiring.torch.path_agreement import NCCL_TYPES, DevicePath


def problem_of(options: GradientOptions) -> str:
    """Return why NCCL cannot reduce gradients with these options; "" if it can."""
    if options.op not in ("average", "sum"):
        return f"NCCL has no reduction {options.op!r}"
    if options.translates or options.is_lossy:
        return "gradients are compressed on the host"
    return ""


class OnNccl(DeviceBucket):
    """The reduction of a bucket of a device by NCCL; see `Reduction`."""

    def __init__(
        self,
        path: DevicePath,
        group: Group,
        layout: BucketLayout,
        parameters: Sequence[Tensor],
        options: GradientOptions,
    ) -> None:
        """Make a bucket.

        Args:
            path: the ranks' way for buckets only.
            group: a group of the same ranks in host memory, for the flags of buckets only.
            layout: the bucket's layout.
            parameters: the bucket's members, on the device.
            options: the operation, and the part of an average's divisor that is applied before the sum.
        """
        dtype = dtype_of(layout.dtype)
        super().__init__(path.padded(layout.flags_offset, dtype), parameters, dtype)
        self._shares = path.memory(self._memory.numel(), dtype, self._device)
        self._wire = options.wire if layout.dtype == "float32" else None
        # In a wire type of blocks, a NaN between gradients would make its block NaN in all later steps.
        self._gaps = _between(self._memory, layout, parameters) if self._wire is not None else []
        self._form = path, group, layout, parameters, options
        self._path, self._on_host = path, group
        is_split = options.predivide != 1.0
        self._op = "sum" if is_split else options.op
        self._before = 1.0 / options.predivide
        self._after = options.predivide / self._on_host.size if is_split else 1.0
        self._kept_flags = allocate(self._on_host, layout.flags, torch.uint8)
        self.flags = self._kept_flags.array
        self.flags[:] = 0
        self._label = f"bucket of {layout.flags_offset} elements of {layout.dtype}, {layout.flags} flags, {self._op}"
        self.places = [
            self._memory.as_strided(parameter.shape, dense_strides(parameter), offset)
            for parameter, offset in zip(parameters, layout.offsets, strict=True)
        ]
        sent = self._memory.nbytes if self._wire is None else encoded_bytes(wire_of(self._wire), self._memory.numel())
        self.sent_bytes = int(sent + self.flags.nbytes)

    @staticmethod
    def serves(layout: BucketLayout) -> bool:
        """Return whether NCCL reduces the bucket's type."""
        return dtype_of(layout.dtype) in NCCL_TYPES

    def post(self) -> "_Reducing":
        """Start to reduce; see `DeviceBucket`."""
        with declining(self._on_host, label=self._label), self._path.declining():
            self.come_behind()
            self._await_writers()
            if self._before != 1.0:
                self._memory.mul_(self._before)
            if self._gaps:
                torch._foreach_zero_(self._gaps)
            reduced = self._path.all_reduce(self._memory, self._op, self._label, self._shares, wire=self._wire)
        # A late rank is late for both; the thread of the engine warns.
        flags = start_agreement(self._on_host.calls, self.flags, "max", self._label, waits=False, warns=False)
        return _Reducing(flags, reduced)

    def come_after(self, reduced: Any) -> None:
        """Make the caller's current stream wait for NCCL."""
        with self._module.device(self._device):
            reduced.order(self._module.current_stream(self._device).cuda_stream)
        if self._after != 1.0:
            self._memory.mul_(self._after)

    def state(self, _member: int) -> CompressionState:
        """Return an empty state: this reduction keeps nothing from step to step."""
        return CompressionState()

    def load_state(self, _member: int, _state: CompressionState) -> None:
        """Ignore the state: this reduction keeps nothing from step to step."""

    def twin(self) -> "OnNccl":
        """See `Reduction.twin`."""
        return OnNccl(*self._form)


def _between(memory: Tensor, layout: BucketLayout, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a bucket's memory in which no gradient lies."""
    ends = [0, *(at + each.numel() for at, each in zip(layout.offsets, parameters, strict=True))]
    gaps = zip(ends, (*layout.offsets, memory.numel()), strict=True)
    return [memory[end:begin] for end, begin in gaps if begin > end]


class _Reducing:
    """A bucket in flight."""

    __slots__ = ("_flags", "_reduced")

    def __init__(self, flags: Handle, reduced: Any) -> None:
        self._flags, self._reduced = flags, reduced

    def result(self) -> Any:
        """Wait until the flags are reduced, and return NCCL's handle."""
        self._flags.wait()
        return self._reduced
