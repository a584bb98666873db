"""Reductions of buckets of torch tensors: those of `multiring._gradients`, and those with a compressor for tensors."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multiring._gradients.buckets import BucketLayout, GradientSpec
from multiring._gradients.choice import reductions_of
from multiring._gradients.compression_state import unpacked
from multiring._gradients.options import GradientOptions
from multiring._gradients.reductions import (
    ArrayReduction,
    CompressionState,
    Predivided,
    Reduction,
    Zeros,
    zeros_of_rank,
)
from multiring._runtime import Group
from multiring.torch.device_staging import staging_of
from multiring.torch.gradients.device_buckets import GatheredOnDevice, OnDevice, StagedOrder
from multiring.torch.gradients.nccl_buckets import OnNccl, problem_of
from multiring.torch.gradients.sparse_rows import Gathered
from multiring.torch.interop import allocate, dense_strides, dtype_name, dtype_of, tensor_of
from multiring.torch.path_agreement import DevicePath, agree_on_path, takes_nccl

_HOST = torch.device("cpu")
_DEVICES = "buckets of devices"


def specs_of(parameters: Sequence[Tensor]) -> list[GradientSpec]:
    """Return the type, shape, strides and device of each parameter's gradient.

    Ranks have different numbers for their devices. A device is therefore named by its place among the devices of the
    parameters.
    """
    names: dict[torch.device, str] = {_HOST: ""}
    for parameter in parameters:
        kind = parameter.device.type
        place = sum(device.type == kind for device in names)
        names.setdefault(parameter.device, kind if not place else f"{kind} (device {place + 1} of these parameters)")
    return [
        GradientSpec(dtype_name(each.dtype), tuple(each.shape), dense_strides(each), names[each.device])
        for each in parameters
    ]


class TensorReductions:
    """Makes the reductions of buckets of tensors, configured by options; see `reductions_of`.

    The buckets of devices have groups of their own: other threads start their operations.
    """

    def __init__(self, group: Group, second: Callable[[], Group], options: GradientOptions) -> None:
        """Record the groups and the options.

        Args:
            group: the group that reduces.
            second: a function that returns another group of the same ranks, for PowerSGD.
            options: the options.
        """
        self._options = options
        self._own = group
        self._on_host = _HostReductions(group, second, options, None)
        self._through_host: dict[torch.device, _HostReductions] = {}
        self._order: StagedOrder | None = None
        self._paths: dict[torch.device, DevicePath] = {}

    def dense(self, layout: BucketLayout, parameters: Sequence[Tensor]) -> Reduction:
        """Return the reduction of a bucket of gradients of one type and device."""
        device = parameters[0].device
        if device == _HOST:
            return self._on_host.of(layout, parameters)
        path = self._path(device)
        if path.uses_nccl and OnNccl.serves(layout) and self._takes_nccl(layout):
            return OnNccl(path, self._own.twin_for(f"flags of {_DEVICES}"), layout, parameters, self._options)
        inner = self._staged(device).of(layout, parameters)
        return OnDevice(inner, layout, parameters, staging_of(device), self._own_order())

    def rows(self, parameter: Tensor) -> Gathered:
        """Return the reduction of the rows of one parameter's sparse gradients."""
        if parameter.device == _HOST:
            return Gathered(self._own, self._options.op, parameter)
        group = self._own.twin_for(_DEVICES)
        return GatheredOnDevice(group, self._options.op, parameter, staging_of(parameter.device), self._own_order())

    def _path(self, device: torch.device) -> DevicePath:
        """Return the ranks' decision for a device; the first call decides, and all ranks must make it."""
        found = self._paths.get(device)
        if found is None:
            found = self._paths[device] = agree_on_path(
                self._own, device, "buckets", problem_of(self._options), has_wire=self._options.wire is not None
            )
        return found

    def _takes_nccl(self, layout: BucketLayout) -> bool:
        return takes_nccl(self._own, layout.flags_offset, dtype_of(layout.dtype), self._options.op, 0)

    def _own_order(self) -> StagedOrder:
        self._order = self._order or StagedOrder(self._own.twin_for(_DEVICES))
        return self._order

    def _staged(self, device: torch.device) -> "_HostReductions":
        found = self._through_host.get(device)
        if found is None:
            staging, group = staging_of(device), self._own.twin_for(_DEVICES)

            def zeros(over: Group, count: int, dtype: str) -> NDArray[Any]:
                array = staging.pinned(over, count, dtype_of(dtype)).array
                array.view(np.uint8).fill(0)
                return array

            second = partial(self._own.twin_for, f"second reductions of {_DEVICES}")
            found = self._through_host[device] = _HostReductions(group, second, self._options, zeros)
        return found


class _HostReductions:
    """Makes reductions whose places are in host memory."""

    def __init__(
        self, group: Group, second: Callable[[], Group], options: GradientOptions, zeros: Zeros | None
    ) -> None:
        self._group = group
        self._options = options
        self._zeros = zeros or zeros_of_rank  # for a compressor of the program
        self._in_arrays = reductions_of(group, second, options, zeros)

    def of(self, layout: BucketLayout, parameters: Sequence[Tensor]) -> Reduction:
        """Return the reduction of a bucket; only shapes and types of the `parameters` are used."""
        options = self._options
        op = "sum" if options.predivide != 1.0 else options.op
        found: Reduction
        if options.translates:
            found = Translated(self._group, op, options.compression, layout, parameters, self._zeros)
        else:
            found = InTensors(self._in_arrays(layout, specs_of(parameters)), layout, parameters)
        return found if options.predivide == 1.0 else Predivided(found, options.predivide, self._group.size)


def states_of(
    carried: Mapping[str, Any], has_residual: Sequence[bool], parameters: Sequence[Tensor], group: Group
) -> dict[int, CompressionState]:
    """Load the states `carried`, and return this rank's compression states by the parameters' `id`; see `unpacked`."""

    def zeros(index: int) -> Tensor:
        return torch.zeros_like(parameters[index].detach(), device=_HOST)

    shapes = [tuple(parameter.shape) for parameter in parameters]
    states = unpacked(carried, has_residual, shapes, group, zeros)
    return {id(parameter): state for parameter, state in zip(parameters, states, strict=True)}


class InTensors:
    """A reduction of arrays, with its places as tensors; see `Reduction`."""

    def __init__(self, reduction: ArrayReduction, layout: BucketLayout, parameters: Sequence[Tensor]) -> None:
        self._reduction = reduction
        self._form = layout, parameters
        self.places = places_in(tensor_of(reduction.memory, dtype_of(layout.dtype)), layout, parameters)
        self.flags = reduction.flags

    @property
    def sent_bytes(self) -> int:
        """The bytes that one reduction passes to collectives, in the form that travels between hosts."""
        return self._reduction.sent_bytes

    def start(self) -> Callable[[], object]:
        """Start to reduce; return a function that waits until `places` and `flags` hold the reduced values."""
        return self._reduction.start()

    def state(self, member: int) -> CompressionState:
        """Return a copy of `member`'s compression state, of tensors; call this only while no reduction runs."""
        found = self._reduction.state(member)
        return CompressionState(
            residual=None if found.residual is None else torch.from_numpy(found.residual),
            query=None if found.query is None else torch.from_numpy(found.query),
        )

    def load_state(self, member: int, state: CompressionState) -> None:
        """Replace `member`'s compression state by `state`, of tensors, as far as this reduction uses it."""
        self._reduction.load_state(
            member,
            CompressionState(
                residual=None if state.residual is None else state.residual.detach().cpu().numpy(),
                query=None if state.query is None else state.query.detach().cpu().numpy(),
            ),
        )

    def twin(self) -> "InTensors":
        """See `Reduction.twin`."""
        return InTensors(self._reduction.twin(), *self._form)


class Translated:
    """A reduction of gradients with a compressor of the caller; see `Reduction`."""

    def __init__(
        self,
        group: Group,
        op: str,
        compressor: Any,
        layout: BucketLayout,
        parameters: Sequence[Tensor],
        zeros: Zeros,
    ) -> None:
        self._group = group
        self._op = op
        self._compressor = compressor
        self._form = layout, parameters, zeros
        memory = tensor_of(zeros(group, layout.flags_offset, layout.dtype), dtype_of(layout.dtype))
        self.places = places_in(memory, layout, parameters)
        self._flags = allocate(group, layout.flags, torch.uint8)
        self.flags = self._flags.array
        self.sent_bytes = int(self.flags.nbytes) + sum(place.nbytes for place in self.places)

    def start(self) -> Callable[[], object]:
        """Start to reduce; return a function that waits until `places` and `flags` hold the reduced values."""
        with torch.no_grad():
            pairs = [self._compressor.compress(place) for place in self.places]
            # The compressed tensor may be the place itself, or a view of it.
            sent = [compressed.contiguous() for compressed, _ in pairs]
        self.sent_bytes = int(self.flags.nbytes) + sum(each.nbytes for each in sent)
        handles = [self._group.all_reduce_async(each, self._op) for each in sent]
        handles.append(self._group.all_reduce_async(self.flags, "max"))

        def wait() -> None:
            for handle in handles:
                handle.wait()
            with torch.no_grad():
                for place, each, (_, context) in zip(self.places, sent, pairs, strict=True):
                    place.copy_(self._compressor.decompress(each, context))

        return wait

    def state(self, _member: int) -> CompressionState:
        """Return an empty state: this reduction keeps nothing from step to step."""
        return CompressionState()

    def load_state(self, _member: int, _state: CompressionState) -> None:
        """Ignore the state: this reduction keeps nothing from step to step."""

    def twin(self) -> "Translated":
        """See `Reduction.twin`."""
        return Translated(self._group, self._op, self._compressor, *self._form)


def places_in(memory: Tensor, layout: BucketLayout, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the place of each member's gradient in the bucket's flat `memory`, with the parameter's stride order.

    Args:
        memory: a tensor of at least `layout.flags_offset` elements.
        layout: the bucket's layout.
        parameters: the bucket's members.
    """
    return [
        memory.as_strided(parameter.shape, dense_strides(parameter), offset)
        for parameter, offset in zip(parameters, layout.offsets, strict=True)
    ]
