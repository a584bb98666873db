"""Divide the work of an optimizer's step among the ranks: who computes which results, and their exchange."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multiring._frontend.errors import internal_errors
from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of
from multiring._runtime import Group, is_initialized
from multiring.errors import MultiringError
from multiring.torch.gradients.device_buckets import on_host
from multiring.torch.parallelizing.held import held_by

_HOST = torch.device("cpu")


class Divided(torch.optim.Optimizer):
    """An optimizer whose ranks each compute some of a step's results.

    A copy of it, as by `copy.deepcopy`, divides its work among the same ranks.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], process_set: ProcessSet) -> None:
        """Optimize `params`; the ranks of `process_set` divide the work."""
        super().__init__(params, defaults)
        self._process_set = process_set
        self._twin: Group | None = None  # of the group of the members below; rejoining a job replaces both
        self._twin_of: object = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy keeps."""
        is_global = self._process_set is global_process_set  # known by identity, so its copy would be another set
        return {**super().__getstate__(), "_process_set": None if is_global else self._process_set}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make this a copy of another optimizer; torch also calls it with a part of the state."""
        if "_process_set" in state:
            state = {**state, "_process_set": state["_process_set"] or global_process_set}
            state.update(_twin=None, _twin_of=None)
        super().__setstate__(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, if each is one that this optimizer takes."""
        super().add_param_group(param_group)
        try:
            for each in self.param_groups[-1]["params"]:
                self._require(each)
        except MultiringError:
            del self.param_groups[-1]
            raise

    def _require(self, parameter: Tensor) -> None:
        """Raise an error if this optimizer does not take `parameter`."""
        raise NotImplementedError

    def _ranks(self) -> Group | None:
        """Return the group of the ranks that divide the work; None if this rank does all of it."""
        held = held_by(self)
        if not is_initialized() or not self._process_set.included() or (held is not None and held.stages is not None):
            return None  # the ranks of a pipeline have different matrices
        members = members_of(self._process_set).group
        if members.size == 1:
            return None
        if self._twin_of is not members:
            self._twin_of, self._twin = members, members.twin()
        return self._twin


def owners_of(costs: Sequence[float], load: list[float]) -> list[int]:
    """Return for each result the rank that computes it.

    The costliest is assigned first, each to the rank with the smallest load so far.

    Args:
        costs: the work of each result, in any unit.
        load: the work that each rank has already, to which the new is added.
    """
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners


@dataclass(frozen=True, slots=True)
class SharedResult:
    """One of the results that the ranks exchange: its owner, its number of elements, and where it is wanted."""

    owner: int
    elements: int
    device: torch.device


def exchanged(
    group: Group, own: Mapping[int, Tensor], results: Sequence[SharedResult], dtype: torch.dtype, *, what: str
) -> list[Tensor]:
    """Return all results, flat, each on its device; every rank of `group` calls it.

    Args:
        group: the ranks.
        own: this rank's results by their number, of any shape.
        results: of all ranks, the same on all ranks.
        dtype: the type of all results.
        what: who asks, for errors.
    """
    # Results of the host are gathered from the host; those of devices, from their first device.
    device = next((each.device for each in results if each.device.type != "cpu"), _HOST)
    mine = [i for i, each in enumerate(results) if each.owner == group.rank]
    sizes = [results[i].elements for i in mine]
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    for i, place in zip(mine, torch.split(flat, sizes), strict=True):
        place.copy_(own[i].reshape(-1))
    with internal_errors(what):
        # The data type does not matter to the allgather, so it sends bytes.
        whole = np.asarray(group.all_gather(on_host([flat])[0].view(torch.uint8).numpy()))
    order = sorted(range(len(results)), key=lambda i: (results[i].owner, i))  # the order of the gathered results
    gathered = torch.from_numpy(whole)
    if device.type != "cpu":
        gathered = gathered.pin_memory()
    parts = torch.split(gathered.view(dtype), [results[i].elements for i in order])
    found = dict(zip(order, parts, strict=True))
    return [found[i].to(each.device, non_blocking=True) for i, each in enumerate(results)]
