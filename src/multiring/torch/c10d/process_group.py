"""The process group of the backend "multiring" for torch.distributed."""

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend, PrefixStore

from multiring._runtime import Group
from multiring.errors import MultiringError
from multiring.torch.c10d import allgather as gathers
from multiring.torch.c10d import allreduce as reductions
from multiring.torch.c10d import alltoall as all_to_alls
from multiring.torch.c10d import point_to_point, rooted
from multiring.torch.c10d.arguments import timeout_of
from multiring.torch.c10d.devices import OtherDevices, handing_on
from multiring.torch.c10d.errors import torch_error
from multiring.torch.c10d.group_state import GroupState
from multiring.torch.c10d.monitored import monitored_barrier_of
from multiring.torch.interop import tensor_of

_HOST = torch.device("cpu")
_TorchGroup: Any = dist.ProcessGroup  # typed Any, because its overloads do not match the signatures here


class ProcessGroup(GroupState, _TorchGroup):  # type: ignore[misc] # see _TorchGroup
    """A process group for the `group` argument of torch.distributed's functions.

    The object is also its own Backend, torch's term for the implementation for one kind of device. torch lets Python
    classes inherit from ProcessGroup only.
    """

    def __init__(
        self,
        group: Group,
        *,
        store: Any,
        name: str,
        timeout_s: float,
        on_end: Callable[[str], None] = lambda _how: None,
    ) -> None:
        """Create the process group of the ranks of `group`.

        Args:
            group: the ranks, numbered as in torch, in a group that only this object uses.
            store: torch's store for these ranks.
            name: torch's name of the group.
            timeout_s: the timeout in seconds of operations that are called without a timeout.
            on_end: called once when the group ends, with "was destroyed" or "was aborted".
        """
        _TorchGroup.__init__(self, group.rank, group.size)
        super().__init__(group, timeout_s)
        self.devices = OtherDevices(self)
        self._store = store
        self._name = name
        self._description = ""
        self._on_end: Callable[[str], None] | None = on_end
        self._splits = itertools.count()
        self._first = self.calls.last

    def __repr__(self) -> str:
        return f"<multiring process group {self._name!r}: rank {self.group.rank} of {self.group.size}>"

    # ---- communication ----

    allreduce = handing_on(reductions.allreduce)
    allreduce_coalesced = handing_on(reductions.allreduce_coalesced)
    reduce = handing_on(reductions.reduce)
    reduce_scatter = handing_on(reductions.reduce_scatter)
    reduce_scatter_single = handing_on(reductions.reduce_scatter_single)
    _reduce_scatter_base = handing_on(reductions.reduce_scatter_single, "_reduce_scatter_base")
    reduce_scatter_single_coalesced = handing_on(reductions.reduce_scatter_single_coalesced)
    reduce_scatter_tensor_coalesced = handing_on(
        reductions.reduce_scatter_single_coalesced, "reduce_scatter_tensor_coalesced"
    )
    broadcast = handing_on(gathers.broadcast)
    allgather = handing_on(gathers.allgather)
    allgather_coalesced = handing_on(gathers.allgather_coalesced)
    all_gather_single = handing_on(gathers.all_gather_single)
    _allgather_base = handing_on(gathers.all_gather_single, "_allgather_base")
    all_gather_single_coalesced = handing_on(gathers.all_gather_single_coalesced)
    allgather_into_tensor_coalesced = handing_on(gathers.all_gather_single_coalesced, "allgather_into_tensor_coalesced")
    all_to_all_single = handing_on(all_to_alls.all_to_all_single)
    alltoall_base = handing_on(all_to_alls.all_to_all_single, "alltoall_base")
    alltoall = handing_on(all_to_alls.alltoall)
    gather = handing_on(rooted.gather)
    scatter = handing_on(rooted.scatter)
    send = handing_on(point_to_point.send)
    recv = handing_on(point_to_point.recv)
    recv_anysource = handing_on(point_to_point.recv_anysource)
    barrier = handing_on(gathers.barrier)
    monitored_barrier = monitored_barrier_of

    # ---- identity ----

    def itself(self) -> "ProcessGroup":
        """Return this group, so that the holder of a weak proxy gets a strong reference."""
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return self.devices.types

    def _get_backend(self, device: torch.device | str) -> Any:
        found = torch.device(device)
        return self if found.type == _HOST.type else self.devices.backend_of(found)

    def name(self) -> str:
        """Return the backend's name."""
        return "multiring"

    getBackendName = _get_backend_name = name  # noqa: N815 -- torch's

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """A description of the group's purpose."""
        return self._description

    # torch's C++ code calls these methods by the following names.

    def getGroupName(self) -> str:  # noqa: N802
        """Return torch's name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set torch's name of the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description of the group's purpose."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the description of the group's purpose."""
        self._description = description

    def get_group_store(self) -> Any:
        """Return the store of the group's ranks."""
        return self._store

    # ---- as a Backend ----

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether `allocate_tensor` can allocate memory of `device`."""
        return device.type == _HOST.type

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device = _HOST) -> Tensor:
        """Return a flat tensor of undefined contents in the arena, which other ranks of this host can read in place.

        Raises:
            RuntimeError: `device` is not the host.
        """
        self._get_backend(device)
        try:
            return tensor_of(self.group.allocate(size * dtype.itemsize, "uint8"), dtype, (size,))
        except MultiringError as error:
            raise torch_error("allocate_tensor", error) from error

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations that are called without a timeout."""
        self.default_timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Restart the count of operations; every rank must call this after the same operation."""
        self._first = self.calls.last

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of the group's operations that this rank has started; equal on ranks that are in step."""
        return self.calls.last - self._first

    @property
    def options(self) -> "Backend.Options":  # torch 2.4 has no Backend.Options
        """The group's name, timeout and ranks as torch's Backend.Options."""
        made = Backend.Options("multiring", timedelta(seconds=self.default_timeout_s))
        named: Any = made
        named.global_ranks_in_group, named.group_name = list(self.group.ranks), self._name
        return made

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Do nothing: the ranks are connected already."""

    def perform_nocolor_split(self, device: torch.device | None = None) -> None:
        """Do nothing: ranks outside of a smaller group take no part in its creation."""

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Do nothing: there are no hooks."""

    # ---- smaller groups, and the end ----

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> "ProcessGroup | None":
        """Create a group of some ranks of this group; every rank must call this. Other ranks get None.

        Args:
            new_ranks: the ranks of the new group, as numbered in this group.
            timeout: the timeout of operations that are called without a timeout; by default this group's timeout.
            opts: None, or a Backend.Options whose timeout is used if `timeout` is None.
            group_name: a name that no other group has; by default, it is derived from this group's name.
            group_desc: a description of the group's purpose.
            device_types: None, or a list of the host device.

        Raises:
            RefusedError: `new_ranks` is empty or has ranks outside of this group, or `opts` are of another backend.
            RuntimeError: `device_types` has a device without a backend.
        """
        self.require_state("split_group")
        name = f"{self._name}:split:{next(self._splits)}" if group_name is None else group_name
        ranks = sorted(new_ranks)
        given_s = timeout_of("split_group: opts", opts)
        for device in device_types or ():
            self._get_backend(device)
        try:
            group = self.group.subgroup_named(ranks, f"torch {name}") if self.group.rank in ranks else None
        except MultiringError as error:
            raise torch_error("split_group", error) from error
        if group is None:
            return None
        timeout_s = timeout.total_seconds() if timeout is not None else given_s or self.default_timeout_s
        part = ProcessGroup(group, store=PrefixStore(f"{name}/", self._store), name=name, timeout_s=timeout_s)
        part.devices.inherit(self.devices)
        part.setGroupDesc(f"{self._description}:split" if group_desc is None else group_desc)
        return part

    splitGroup = split_group  # noqa: N815 -- the name in torch's C++ code

    def shutdown(self) -> None:
        """Destroy the group: new operations raise an error. A job that the backend joined for the group is left."""
        self._close("was destroyed")

    def abort(self) -> None:
        """Destroy the group; operations in flight, and later operations of other ranks, fail on all ranks."""
        self._aborts.tell()  # first, so that the other ranks can report the reason
        self._abort_in_flight(self.calls.services.world_rank)
        self._close("was aborted")

    def _close(self, how: str) -> None:
        self._fall(how)
        self.devices.end(how)
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(how)
