"""A communication hook for DistributedDataParallel: buckets in the arena, and multiring's wire types.

    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    model.register_comm_hook(mt.BucketSharing(compression=mt.Compression.bf16), mt.share_bucket)

With gradient_as_bucket_view, gradients are views of their bucket. The first time such a bucket is reduced it moves into
the arena, gradients and all; from then on they are made, reduced and read there, and nothing is copied. Buckets that
gradients are copied into are reduced where they are.

What a lossy compression carries from step to step belongs to parameters, as DistributedDataParallel lays its buckets
out anew after the first step.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed's own, which its stubs leave out there
from torch.futures import Future

from multiring.errors import ArgumentError
from multiring.gradients.buckets import lay_out_one
from multiring.gradients.compression_state import packed
from multiring.gradients.options import Options
from multiring.gradients.reductions import CompressionState
from multiring.runtime import Group, Handle
from multiring.runtime.group.handles import SteppedHandle
from multiring.torch.c10d.group_state import Ready
from multiring.torch.c10d.process_group import ProcessGroup
from multiring.torch.compression import Compression, option_of
from multiring.torch.gradients.bucket_tensors import TensorReductionOf, specs_of, states_of, tensor_reductions_of
from multiring.torch.interop import allocate, buffer_from, dtype_name, refuse_elsewhere


class BucketSharing:
    """How the gradients of a DistributedDataParallel are averaged over the ranks: the state of `share_bucket`.

    Args:
        compression: in what form gradients travel: Compression.none, .fp16, .bf16 or .int8 between hosts, PowerSGD
            anywhere, or a compressor of your own.
        error_feedback: whether what a wire type loses goes along with the next gradient.
        process_group: the model's; by default the default one.

    Raises:
        ArgumentError: error feedback without anything lost, or no such compression.
    """

    def __init__(
        self,
        compression: Any = Compression.none,
        *,
        error_feedback: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._options = Options(op="average", compression=option_of(compression), error_feedback=error_feedback)
        self._given = process_group
        self._known_group: ProcessGroup | None = None  # that the following is of
        self._in_arena: dict[int, int] = {}  # by a bucket's index, where it lies
        self._stateful: dict[tuple[int, ...], _Bucket] = {}  # by the `id` of its parameters
        self._states: dict[int, CompressionState] = {}  # of parameters that are in none of these yet
        self._known: list[Tensor] = []  # those parameters: as long as they live, nothing else has their identity
        self._reduction_of: TensorReductionOf | None = None

    def start(self, bucket: GradBucket) -> Future[Tensor]:
        """Start to average `bucket`; see `share_bucket`."""
        buffer = bucket.buffer()
        refuse_elsewhere(buffer, f"gradient bucket {bucket.index()}")
        group = self.group  # what is kept is of this one
        if self._options.is_lossy or self._options.translates:
            return self._reduce(bucket, buffer)
        self._move(bucket, buffer)
        wire = self._options.wire if buffer.dtype is torch.float32 else None
        memory = buffer_from(buffer)
        return self._issue(buffer, lambda: group.all_reduce_async(memory, "average", wire=wire))

    @property
    def group(self) -> Group:
        """The ranks that share gradients.

        Raises:
            ArgumentError: their process group is of another backend.
        """
        return self._process_group.group

    @property
    def _process_group(self) -> ProcessGroup:
        """The process group as it is now: the default one may have been destroyed, and made anew."""
        found = dist.group.WORLD if self._given is None else self._given
        if isinstance(found, ProcessGroup) and found is self._known_group:
            return found
        if not isinstance(found, ProcessGroup):
            raise ArgumentError(
                f"process group {found!r}: want one of multiring's, as init_process_group('multiring') makes it"
            )
        self._known_group, self._reduction_of = found, None
        self._in_arena.clear()
        for bucket in self._stateful.values():
            self._states |= bucket.states()
            self._known += bucket.parameters
        self._stateful.clear()
        return found

    def _issue(
        self, buffer: Tensor, start: Callable[[], Handle], settle: Callable[[], None] | None = None
    ) -> Future[Tensor]:
        """Return a future of `buffer`: once what `start` starts has ended, and `settle` has run."""
        over = self._process_group
        work = over.issue("share_bucket", Ready(lambda _waits: start(), settle), over.options_of(None), (buffer,))
        made: Future[Tensor] = work.get_future().then(lambda ended: ended.value()[0])
        return made

    # ---- in place ----

    def _move(self, bucket: GradBucket, buffer: Tensor) -> None:
        """Move a bucket into the arena, once, where all its gradients are views of it and the arena has room."""
        if self._in_arena.get(bucket.index()) == buffer.data_ptr():
            return
        storage = buffer.untyped_storage().data_ptr()
        gradients = [parameter.grad for parameter in bucket.parameters()]
        views = [each for each in gradients if each is not None and each.untyped_storage().data_ptr() == storage]
        if len(views) < len(gradients):
            return
        try:
            memory = allocate(self.group, buffer.numel(), buffer.dtype).tensor
        except ArgumentError:  # no room: it is reduced where it lies
            return
        memory.copy_(buffer)
        # The very tensors that DistributedDataParallel holds: its next gradients go into the new memory.
        for view in views:
            offset = view.storage_offset() - buffer.storage_offset()
            view.data = memory.as_strided(view.shape, view.stride(), offset)
        buffer.data = memory
        self._in_arena[bucket.index()] = memory.data_ptr()

    # ---- by a reduction that has a state, or memory of its own ----

    def _reduce(self, bucket: GradBucket, buffer: Tensor) -> Future[Tensor]:
        if self._options.is_lossy and buffer.dtype is not torch.float32:
            raise ArgumentError(
                f"gradient bucket {bucket.index()} is {dtype_name(buffer.dtype)}, and {self._options} takes float32 "
                "gradients only: use model.float(), or leave the option out"
            )
        found = self._bucket_of(bucket.parameters())
        found.copy_in(buffer)
        # Given up by the group's own time-outs only: what is carried on is not to be left half way.
        return self._issue(buffer, lambda: SteppedHandle(found.reduction.start()), partial(found.copy_out, buffer))

    def _bucket_of(self, parameters: list[Tensor]) -> "_Bucket":
        key = tuple(map(id, parameters))
        found = self._stateful.get(key)
        if found is None:
            if self._reduction_of is None:
                second = partial(self.group.twin_for, "second reductions of buckets")
                self._reduction_of = tensor_reductions_of(self.group, second, self._options)
            for other in [each for each in self._stateful if not set(each).isdisjoint(key)]:
                former = self._stateful.pop(other)
                self._states |= former.states()
                self._known += former.parameters
            found = self._stateful[key] = _Bucket(parameters, self._reduction_of)
            found.load_states(self._states)
        return found

    # ---- what is carried on ----

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return what this rank carries from step to step for the parameters of `model`: each rank's own; or nothing.

        Not while a backward is going on.
        """
        states = self._states.copy()
        for bucket in self._stateful.values():
            states |= bucket.states()
        return packed([states.get(id(parameter)) for parameter in model.parameters()], self.group)

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Carry on what `state_dict` returned on this rank, of a model with the same parameters.

        Raises:
            ArgumentError: `state` is another model's.
        """
        parameters = list(model.parameters())
        has_residual = [True] * len(parameters)  # all have use for one
        self._states = states_of(state, has_residual, parameters, self.group) if state else {}
        self._known = list(parameters)
        for bucket in self._stateful.values():
            bucket.load_states(self._states)


def share_bucket(state: BucketSharing, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket of gradients over the ranks: a communication hook of DistributedDataParallel.

    Args:
        state: how.
        bucket: its buffer is flat, of floating-point or complex numbers, in host memory.

    Returns:
        A future of the buffer, set when every rank's gradients are in it. Where that fails, so does the backward.

    Raises:
        ArgumentError: the process group is not multiring's, or gradients are of a type that `state` does not take.
        UnsupportedError: the buffer is not in host memory, or sparse.
    """
    return state.start(bucket)


class _Bucket:
    """A bucket of DistributedDataParallel's, and a reduction of the same parameters with places of its own."""

    def __init__(self, parameters: list[Tensor], reduction_of: TensorReductionOf) -> None:
        self.parameters = parameters
        self.reduction = reduction_of(lay_out_one(specs_of(parameters)), parameters)

    def copy_in(self, buffer: Tensor) -> None:
        """Put the gradients of `buffer` into the reduction's places."""
        with torch.no_grad():
            for place, part in self._pairs(buffer):
                place.copy_(part)
        flags = self.reduction.flags
        flags[:] = 0
        flags[: len(self.parameters)] = 1

    def copy_out(self, buffer: Tensor) -> None:
        """Put what is in the places into `buffer`."""
        with torch.no_grad():
            for place, part in self._pairs(buffer):
                part.copy_(place)

    def _pairs(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each place beside its part of `buffer`, both as they lie in memory."""
        places = [place.as_strided((place.numel(),), (1,)) for place in self.reduction.places]
        return list(zip(places, torch.split(buffer, [place.numel() for place in places]), strict=True))

    def states(self) -> dict[int, CompressionState]:
        """Return what is carried on, by the parameters' `id`."""
        return {id(each): self.reduction.state(member) for member, each in enumerate(self.parameters)}

    def load_states(self, states: Mapping[int, CompressionState]) -> None:
        """Carry on what `states` has for these parameters."""
        for member, each in enumerate(self.parameters):
            if id(each) in states:
                self.reduction.load_state(member, states[id(each)])
