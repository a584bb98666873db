"""Tensors of other devices: `init_process_group("cpu:multiring,cuda:nccl")`, and multiring for CUDA devices too.

If a Python function creates a backend, torch uses its result as the whole process group and creates no backends for
other devices. This group therefore creates them itself, at the first tensor of such a device, and forwards the calls to
them. Where multiring is the backend of CUDA devices, as in `init_process_group("multiring")`, the group's own methods
run on copies of the tensors in host memory (staged.py).
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _DistributedBackendOptions

from multiring.errors import MultiringError, StateError
from multiring.torch.c10d.buffers import ElsewhereError
from multiring.torch.c10d.errors import RefusedError
from multiring.torch.c10d.group_state import GroupState
from multiring.torch.c10d.point_to_point import decline_message
from multiring.torch.c10d.staged import StagedTensors, has_started, is_on_device
from multiring.torch.device_staging import SERVED

_OURS = "multiring"
_HOST = torch.device("cpu")
_BETWEEN_TWO = {"send", "recv", "recv_anysource"}
_torch: Any = dist  # typed Any, because torch's stubs are incomplete

# Methods of a process group that a backend has under another name.
_SPELLINGS = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
# Methods for several tensors, for which a backend has a Python method for one tensor only.
_OF_ONE = {
    "all_gather_single_coalesced": "_allgather_base",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}


class OtherDevices:
    """The backends of a process group for devices other than the host."""

    def __init__(self, torch_group: Any) -> None:
        """Create the backends of `torch_group`, which owns this object, when they are needed."""
        self._group = weakref.proxy(torch_group)
        self._staged: StagedTensors | None = None  # None before the first tensor of a device that multiring serves
        self._made: dict[str, Any] = {}  # the backends created so far, by type of device
        self._inherited: dict[str, str] = {}

    @property
    def types(self) -> list[torch.device]:
        """The devices for which the group has backends, the host first."""
        found = self.wanted()
        # torch may use the devices of this list for its own small tensors.
        if found.get(SERVED) == _OURS and not torch.cuda.is_available():
            del found[SERVED]
        return [_HOST, *map(torch.device, found)]

    def wanted(self) -> dict[str, str]:
        """Return the names of the backends that the program asked for, by type of device, without the host's."""
        try:
            config = _torch.get_backend_config(self._group.itself())
        except (TypeError, ValueError):  # torch has no record of this group: it was split off, or destroyed
            return self._inherited
        pairs = (pair.split(":") for pair in config.split(","))
        return {kind: backend for kind, backend in pairs if kind != _HOST.type}

    def inherit(self, parent: "OtherDevices") -> None:
        """Serve the devices that multiring serves in the group from which this group was split off.

        A group that torch does not know has no other backends: they ask torch for the group's ranks.
        """
        self._inherited = {kind: backend for kind, backend in parent.wanted().items() if backend == _OURS}

    @property
    def served(self) -> bool:
        """Whether multiring is the backend of CUDA devices."""
        return self.wanted().get(SERVED) == _OURS

    @property
    def staged(self) -> StagedTensors:
        """The operations on tensors of CUDA devices; the first use creates their threads."""
        if self._staged is None:
            self._staged = StagedTensors(self._group, self._group.group)
        return self._staged

    def keep_order(self) -> None:
        """Wait until the operations on tensors of devices are issued, so that an operation on the host comes later."""
        if self._staged is not None:
            self._staged.wait_until_issued()

    def backend_of(self, device: torch.device) -> Any:
        """Return the backend for `device`, which is not the host.

        Raises:
            RuntimeError: the group has no backend for the device.
        """
        kind = device.type
        wanted = self.wanted().get(kind)
        if wanted is None:
            shown = ", ".join(each.type for each in self.types)
            raise RuntimeError(f"No backend type associated with device type {kind}: want one of {shown}")
        if wanted == _OURS:
            return self._group.itself()
        if kind not in self._made:
            self._made[kind] = _backend(self._group.itself(), kind, wanted)
        return self._made[kind]

    def end(self, how: str) -> None:
        """Abort or shut down all backends, as the group ends."""
        if self._staged is not None:
            self._staged.close()
        for each in self._made.values():
            if how == "was aborted":
                each.abort()
            else:
                each.shutdown()
        self._made.clear()


def _backend(group: Any, kind: str, wanted: str) -> Any:
    store = PrefixStore(f"{kind}/", group.get_group_store())
    rank, size, timeout = group.group.rank, group.group.size, timedelta(seconds=group.default_timeout_s)
    ranks = _torch.get_process_group_ranks(group)
    if wanted == "nccl":
        options = _torch.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 -- as torch itself sets it
        options.global_ranks_in_group, options.group_name = ranks, group.group_name
        made = _torch.ProcessGroupNCCL(store, rank, size, options)
        made._set_sequence_number_for_group()  # noqa: SLF001 -- as torch itself does
        return made
    if wanted == "gloo":
        return _torch.ProcessGroupGloo(store, rank, size, timeout=timeout)
    plugin = _torch.Backend._plugins.get(wanted.upper())  # noqa: SLF001 -- torch has no other way to them
    if plugin is None:
        raise RuntimeError(f"backend {wanted} for {kind} beside multiring: want nccl, gloo, or a registered backend")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    told = _DistributedBackendOptions()
    told.store, told.timeout, told.group_id = store, timeout, group.group_name
    told.group_rank, told.group_size, told.global_ranks_in_group = rank, size, ranks
    return plugin.creator_fn(told, None)


def _decline(state: GroupState, name: str, arguments: Sequence[Any], refusal: Exception) -> None:
    """Inform the other ranks that this rank has rejected an operation before its start, so that they raise an error.

    Args:
        state: the process group.
        name: the name of the method.
        arguments: the arguments of the call.
        refusal: the error that this rank raises.
    """
    if state.is_over:
        return
    if name in _BETWEEN_TWO:
        # An argument that is refused may be no part of any message: perhaps the other rank refuses its own, too.
        if not isinstance(refusal, RefusedError | TypeError):
            with suppress(MultiringError):  # no other rank can be reached
                decline_message(state, name, arguments, refusal)
        return
    # On ranks that accept a coalesced call, it starts one operation for each tensor.
    several = [each for each in arguments[:2] if isinstance(each, Sequence)] if "coalesced" in name else []
    with suppress(StateError):  # the group has ended
        for _ in range(max((len(each) for each in several), default=1) or 1):
            state.calls.decline("", refusal)


def handing_on(method: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Wrap a method of a process group to forward calls with tensors of other devices to their backend.

    Args:
        method: the method for tensors of the host.
        name: the name of the method of the other backend; by default, the method's own name.
    """
    name = name or method.__name__

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if is_on_device(arguments):
            self.require_state(name)  # torch no longer knows the backends of a group that has ended
        if is_on_device(arguments) and self.devices.served:
            refuse = functools.partial(_decline, self, name, arguments)
            work = self.devices.staged.call(name, functools.partial(method, self), refuse, arguments, options)
            return self.take_in(work)
        self.devices.keep_order()
        try:
            return method(self, *arguments, **options)
        except ElsewhereError as refusal:  # raised before the operation starts
            if refusal.device.type not in self.devices.wanted():
                _decline(self, name, arguments, refusal)
                raise
            other = self.devices.backend_of(refusal.device)
        except (RefusedError, TypeError, MultiringError) as refusal:
            if not has_started(refusal):
                _decline(self, name, arguments, refusal)
            raise
        if name in _OF_ONE:
            return _one_by_one(other, _OF_ONE[name], *arguments)
        return getattr(other, _SPELLINGS.get(name, name))(*arguments, **options)

    return call


def _one_by_one(other: Any, name: str, outputs: Sequence[Any], sources: Sequence[Any], opts: Any) -> Any:
    """Call a collective for one tensor with each tensor, and return a Work for all of them."""
    coalesces = other.supports_coalescing
    if coalesces:
        other._start_coalescing()  # noqa: SLF001 -- as torch itself does
    works = [getattr(other, name)(output, source, opts) for output, source in zip(outputs, sources, strict=True)]
    if coalesces:
        return other._end_coalescing()  # noqa: SLF001 -- as torch itself does
    for work in works[:-1]:
        work.wait()
    return works[-1]
