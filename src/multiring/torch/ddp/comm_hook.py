"""A communication hook for DistributedDataParallel: buckets in the arena, and multiring's wire types.

    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    model.register_comm_hook(mt.BucketSharing(compression=mt.Compression.bf16), mt.allreduce_hook)

With gradient_as_bucket_view, gradients are views of their bucket. At its first reduction, such a bucket moves into the
arena together with its gradients. From then on, gradients are computed, reduced and read there without a copy. Without
gradient_as_bucket_view, buckets are reduced in their own memory.

The state of a lossy compression is kept by parameter, because DistributedDataParallel rearranges its buckets after the
first step.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed has it too, but not in its stubs
from torch.futures import Future

from multiring._gradients.buckets import lay_out_one
from multiring._gradients.compression_state import packed
from multiring._gradients.options import GradientOptions
from multiring._gradients.reductions import CompressionState
from multiring._runtime import Group, Handle
from multiring._runtime.group.handles import SteppedHandle
from multiring.errors import ArgumentError
from multiring.torch.c10d.group_state import ReadyOperation
from multiring.torch.c10d.process_group import ProcessGroup
from multiring.torch.compression import Compression, option_of
from multiring.torch.gradients.bucket_tensors import TensorReductions, specs_of, states_of
from multiring.torch.gradients.device_buckets import DeviceBucket
from multiring.torch.interop import allocate, buffer_from, dtype_name, refuse_unserved


class BucketSharing:
    """The state of the hook `allreduce_hook`, which averages gradients over the ranks.

    Args:
        compression: the form in which gradients travel: a member of Compression such as Compression.bf16, which is
            used between hosts, PowerSGD everywhere, or the program's own compressor.
        error_feedback: whether the compression error is added to the next gradient.
        process_group: the model's process group; by default torch's default group.

    Raises:
        ArgumentError: `compression` is unknown; or `error_feedback` is set, and `compression` is neither a wire type
            nor PowerSGD.
    """

    def __init__(
        self,
        compression: Any = Compression.none,
        *,
        error_feedback: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._options = GradientOptions(op="average", compression=option_of(compression), error_feedback=error_feedback)
        self._given = process_group
        self._known_group: ProcessGroup | None = None  # the group to which the following attributes belong
        self._in_arena: dict[int, int] = {}  # the address of each bucket in the arena, by the bucket's index
        self._stateful: dict[tuple[int, ...], _Bucket] = {}  # buckets with a state, by the `id` of their parameters
        self._states: dict[int, CompressionState] = {}  # the states of parameters that no such bucket contains yet
        self._known: list[Tensor] = []  # these parameters, kept alive so that no other object gets their `id`
        self._reductions: TensorReductions | None = None

    def start(self, bucket: GradBucket) -> Future[Tensor]:
        """Start to average `bucket`; see `allreduce_hook`."""
        buffer = bucket.buffer()
        refuse_unserved(buffer, f"gradient bucket {bucket.index()}")
        group = self.group  # this also discards the state of a former group
        is_on_host = buffer.device.type == "cpu"
        if self._options.is_lossy or self._options.translates or not is_on_host:
            return self._reduce(bucket, buffer)
        self._move(bucket, buffer)
        wire = self._options.wire if buffer.dtype is torch.float32 else None
        memory = buffer_from(buffer)
        return self._issue(buffer, lambda: group.all_reduce_async(memory, "average", wire=wire))

    @property
    def group(self) -> Group:
        """The ranks that share gradients.

        Raises:
            ArgumentError: the process group has another backend.
        """
        return self._process_group.group

    @property
    def _process_group(self) -> ProcessGroup:
        """The current process group; torch's default group may have been destroyed and made anew."""
        found = dist.group.WORLD if self._given is None else self._given
        if isinstance(found, ProcessGroup) and found is self._known_group:
            return found
        if not isinstance(found, ProcessGroup):
            raise ArgumentError(
                f"process group {found!r}: want a group of multiring, made by init_process_group('multiring')"
            )
        self._known_group, self._reductions = found, None
        self._in_arena.clear()
        for bucket in self._stateful.values():
            self._states |= bucket.states()
            self._known += bucket.parameters
        self._stateful.clear()
        return found

    def _issue(
        self, buffer: Tensor, start: Callable[[], Handle], settle: Callable[[], None] | None = None
    ) -> Future[Tensor]:
        """Start an operation; return a future that is set to `buffer` after the operation and `settle` have ended."""
        over = self._process_group
        work = over.issue(
            "allreduce_hook", ReadyOperation(lambda _waits: start(), settle), over.options_of(None), (buffer,)
        )
        made: Future[Tensor] = work.get_future().then(lambda ended: ended.value()[0])
        return made

    # ---- in place ----

    def _move(self, bucket: GradBucket, buffer: Tensor) -> None:
        """Move a bucket into the arena, once, if all its gradients are views of it and the arena has room."""
        if self._in_arena.get(bucket.index()) == buffer.data_ptr():
            return
        storage = buffer.untyped_storage().data_ptr()
        gradients = [parameter.grad for parameter in bucket.parameters()]
        views = [each for each in gradients if each is not None and each.untyped_storage().data_ptr() == storage]
        if len(views) < len(gradients):
            return
        try:
            memory = allocate(self.group, buffer.numel(), buffer.dtype).tensor
        except ArgumentError:  # the arena is full: the bucket is reduced in its own memory
            return
        memory.copy_(buffer)
        # These are the tensor objects that DistributedDataParallel holds, so its next gradients go to the new memory.
        for view in views:
            offset = view.storage_offset() - buffer.storage_offset()
            view.data = memory.as_strided(view.shape, view.stride(), offset)
        buffer.data = memory
        self._in_arena[bucket.index()] = memory.data_ptr()

    # ---- by a reduction with a state or separate memory ----

    def _reduce(self, bucket: GradBucket, buffer: Tensor) -> Future[Tensor]:
        if self._options.is_lossy and buffer.dtype is not torch.float32:
            raise ArgumentError(
                f"gradient bucket {bucket.index()} is {dtype_name(buffer.dtype)}, and {self._options} takes float32 "
                "gradients only: use model.float(), or leave the option out"
            )
        found = self._bucket_of(bucket.parameters())
        found.copy_in(buffer)
        if isinstance(found.reduction, DeviceBucket):
            return self._reduce_on_device(found, found.reduction, buffer)
        # Only the group's own time-outs may abort this operation, because the compression state must stay complete.
        return self._issue(buffer, lambda: SteppedHandle(found.reduction.start()), partial(found.copy_out, buffer))

    def _reduce_on_device(self, bucket: "_Bucket", reduction: DeviceBucket, buffer: Tensor) -> Future[Tensor]:
        posted = reduction.post()
        over = self._process_group
        work = over.issue(
            "allreduce_hook",
            ReadyOperation(lambda _waits: SteppedHandle(posted.result)),
            over.options_of(None),
            (buffer,),
        )

        def hand_out(_ended: "Future[Any]") -> Tensor:
            """Copy the averages to the buffer on the future's own stream, whose end the future's caller waits for."""
            work.wait()
            reduction.come_after(posted.result())
            bucket.copy_out(buffer)
            return buffer

        ended: Future[Any] = Future(devices=[buffer.device])
        made: Future[Tensor] = ended.then(hand_out)
        work.get_future().add_done_callback(lambda _work: ended.set_result(None))
        return made

    def _bucket_of(self, parameters: list[Tensor]) -> "_Bucket":
        key = tuple(map(id, parameters))
        found = self._stateful.get(key)
        if found is None:
            if self._reductions is None:
                second = partial(self.group.twin_for, "second reductions of buckets")
                self._reductions = TensorReductions(self.group, second, self._options)
            for other in [each for each in self._stateful if not set(each).isdisjoint(key)]:
                former = self._stateful.pop(other)
                self._states |= former.states()
                self._known += former.parameters
            found = self._stateful[key] = _Bucket(parameters, self._reductions)
            found.load_states(self._states)
        return found

    # ---- compression state ----

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return this rank's compression state for the parameters of `model`; it differs between ranks.

        The result is empty without a lossy compression. Do not call this while a backward runs.
        """
        states = self._states.copy()
        for bucket in self._stateful.values():
            states |= bucket.states()
        return packed([states.get(id(parameter)) for parameter in model.parameters()], self.group)

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Restore the state that `state_dict` returned on this rank for a model with the same parameters.

        Raises:
            ArgumentError: `state` is of another model.
        """
        parameters = list(model.parameters())
        has_residual = [True] * len(parameters)  # any parameter may have a residual
        self._states = states_of(state, has_residual, parameters, self.group) if state else {}
        self._known = list(parameters)
        for bucket in self._stateful.values():
            bucket.load_states(self._states)


def allreduce_hook(state: BucketSharing, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket of gradients over the ranks.

    This is a communication hook for DistributedDataParallel.

    Args:
        state: the configuration and the state of the hook.
        bucket: a bucket of gradients. Its buffer is a flat tensor of floating-point or complex numbers, in host
            memory or on a CUDA device.

    Returns:
        A future of the buffer, set when the buffer holds the averages. If the reduction fails, the backward fails.

    Raises:
        ArgumentError: the process group has another backend, or `state` does not support the gradients' type.
        UnsupportedError: the buffer is on another kind of device, or sparse.
    """
    return state.start(bucket)


class _Bucket:
    """A reduction with its own memory for the parameters of one bucket of DistributedDataParallel."""

    def __init__(self, parameters: list[Tensor], reductions: TensorReductions) -> None:
        self.parameters = parameters
        self.reduction = reductions.dense(lay_out_one(specs_of(parameters)), parameters)

    def copy_in(self, buffer: Tensor) -> None:
        """Copy the gradients of `buffer` to the reduction's places."""
        if isinstance(self.reduction, DeviceBucket):
            self.reduction.come_behind()
        with torch.no_grad():
            for place, part in self._pairs(buffer):
                place.copy_(part)
        flags = self.reduction.flags
        flags[:] = 0
        flags[: len(self.parameters)] = 1

    def copy_out(self, buffer: Tensor) -> None:
        """Copy the reduced gradients to `buffer`."""
        with torch.no_grad():
            for place, part in self._pairs(buffer):
                part.copy_(place)

    def _pairs(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each place with its part of `buffer`, both flat in memory order."""
        places = [place.as_strided((place.numel(),), (1,)) for place in self.reduction.places]
        return list(zip(places, torch.split(buffer, [place.numel() for place in places]), strict=True))

    def states(self) -> dict[int, CompressionState]:
        """Return the compression states, by the parameters' `id`."""
        return {id(each): self.reduction.state(member) for member, each in enumerate(self.parameters)}

    def load_states(self, states: Mapping[int, CompressionState]) -> None:
        """Load the compression states of this bucket's parameters."""
        for member, each in enumerate(self.parameters):
            if id(each) in states:
                self.reduction.load_state(member, states[id(each)])
