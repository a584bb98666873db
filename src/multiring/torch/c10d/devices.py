"""Tensors of other devices: `init_process_group("cpu:multiring,cuda:nccl")`.

Torch takes what its Python creators return for the whole process group, and then makes none for the other devices. So
this one makes them, when the first tensor of such a device comes, and hands its calls on to them.
"""

import functools
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

_HOST = torch.device("cpu")
_BETWEEN_TWO = {"send", "recv", "recv_anysource"}
_torch: Any = dist  # not all of it is in its types

# What a process group calls otherwise than a backend does.
_SPELLINGS = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
# What a backend has for one tensor only, as far as Python sees it.
_OF_ONE = {
    "all_gather_single_coalesced": "_allgather_base",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}


class Devices(GroupState):
    """The part of a process group that knows which backend serves which device."""

    _store: Any
    _name: str

    @functools.cached_property
    def _others(self) -> dict[str, Any]:
        """The backends of other devices that were needed so far."""
        return {}

    @property
    def _device_types(self) -> list[torch.device]:
        return [_HOST, *(torch.device(kind) for kind in self._wanted())]

    def _wanted(self) -> dict[str, str]:
        """Return the backends' names that the program asked for, by type of device, but for the host's."""
        try:
            config = _torch.get_backend_config(self)
        except (TypeError, ValueError):  # torch does not know this group: it was split off, or destroyed
            return {}
        pairs = (pair.split(":") for pair in config.split(","))
        return {kind: backend for kind, backend in pairs if kind != _HOST.type}

    def _get_backend(self, device: torch.device | str) -> Any:
        kind = torch.device(device).type
        if kind == _HOST.type:
            return self
        wanted = self._wanted().get(kind)
        if wanted is None:
            raise RuntimeError(f"No backend type associated with device type {kind}: multiring moves host memory only")
        if kind not in self._others:
            self._others[kind] = self._made(kind, wanted)
        return self._others[kind]

    def _made(self, kind: str, wanted: str) -> Any:
        store = PrefixStore(f"{kind}/", self._store)
        rank, size, timeout = self.group.rank, self.group.size, timedelta(seconds=self.default_timeout_s)
        ranks = _torch.get_process_group_ranks(self)
        if wanted == "nccl":
            options = _torch.ProcessGroupNCCL.Options()
            options._timeout = timeout  # noqa: SLF001 -- as torch itself sets it
            options.global_ranks_in_group, options.group_name = ranks, self._name
            made = _torch.ProcessGroupNCCL(store, rank, size, options)
            made._set_sequence_number_for_group()  # noqa: SLF001 -- as torch itself does
            return made
        if wanted == "gloo":
            return _torch.ProcessGroupGloo(store, rank, size, timeout=timeout)
        plugin = _torch.Backend._plugins.get(wanted.upper())  # noqa: SLF001 -- torch has no other way to them
        if plugin is None:
            raise RuntimeError(
                f"backend {wanted} for {kind} beside multiring: want nccl, gloo, or one that is registered"
            )
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, size, timeout)
        told = _DistributedBackendOptions()
        told.store, told.timeout, told.group_id = store, timeout, self._name
        told.group_rank, told.group_size, told.global_ranks_in_group = rank, size, ranks
        return plugin.creator_fn(told, None)

    def _decline(self, name: str, arguments: Sequence[Any], refusal: Exception) -> None:
        """Tell the other ranks of a collective that this one has refused it, so that they raise; it has not begun here.

        Args:
            name: of a method.
            arguments: of its call.
            refusal: what this rank raises.
        """
        # What has a cause of multiring's comes from an operation, of which the others know.
        if name in _BETWEEN_TWO or self._end is not None or isinstance(refusal.__cause__, MultiringError):
            return
        # Coalesced calls are as many operations as tensors on the ranks that make them.
        several = [each for each in arguments[:2] if isinstance(each, Sequence)] if "coalesced" in name else []
        with suppress(StateError):  # there is nobody to tell
            for _ in range(max((len(each) for each in several), default=1) or 1):
                self.calls.decline("", refusal)

    def _end_others(self, how: str) -> None:
        for each in self._others.values():
            if how == "was aborted":
                each.abort()
            else:
                each.shutdown()
        self._others.clear()


def hands_on(names: Sequence[str]) -> Callable[[type], type]:
    """Return what has the methods of these names of a process group hand tensors of other devices on."""

    def change(kind: type) -> type:
        for name in names:
            setattr(kind, name, _handing_on(name, getattr(kind, name)))
        return kind

    return change


def _handing_on(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return method(self, *arguments, **options)
        except ElsewhereError as refusal:  # before anything was begun
            if refusal.device.type not in self._wanted():
                self._decline(name, arguments, refusal)
                raise
            other = self._get_backend(refusal.device)
        except (RefusedError, TypeError) as refusal:
            self._decline(name, arguments, refusal)
            raise
        if name in _OF_ONE:
            return _one_by_one(other, _OF_ONE[name], *arguments)
        return getattr(other, _SPELLINGS.get(name, name))(*arguments, **options)

    return call


def _one_by_one(other: Any, name: str, outputs: Sequence[Any], sources: Sequence[Any], opts: Any) -> Any:
    """Call a collective of one tensor for each, and return the Work of all."""
    coalesces = other.supports_coalescing
    if coalesces:
        other._start_coalescing()  # noqa: SLF001 -- as torch itself does
    works = [getattr(other, name)(output, source, opts) for output, source in zip(outputs, sources, strict=True)]
    if coalesces:
        return other._end_coalescing()  # noqa: SLF001 -- as torch itself does
    for work in works[:-1]:
        work.wait()
    return works[-1]
