"""Which engine carries the collectives of a group on CUDA devices."""

import logging
from typing import TYPE_CHECKING

from multiring._runtime.engines.nccl import NcclEngine
from multiring._runtime.engines.staged import StagedEngine
from multiring._runtime.engines.told import told_by_all
from multiring.errors import MismatchError, MultiringError, PeerLostError, StallError, UnsupportedError

if TYPE_CHECKING:
    from multiring._runtime.group.group import Group

_log = logging.getLogger("multiring")
_STAGED, _HIERARCHICAL, _FORCED = "staged", "hierarchical", ("nccl", "hierarchical")


def engine_on_device(group: "Group", device: int | str) -> NcclEngine | StagedEngine:
    """Return this rank's end of the engine nccl, or of the engine staged if NCCL is impossible on some rank.

    All ranks of the group call it. MULTIRING_DEVICE_PATH decides if it is set. Arguments and errors are those of
    `Group.on_device`.
    """
    wish = group.calls.services.device_path
    told = {
        rank: each["setting"] for rank, each in zip(group.ranks, told_by_all(group, {"setting": wish}), strict=True)
    }
    if len(set(told.values())) > 1:
        shown = "; ".join(f"rank {rank}: {each}" for rank, each in told.items())
        raise MismatchError(f"the ranks have different values of MULTIRING_DEVICE_PATH: {shown}; set the same one")
    if wish == _HIERARCHICAL and len(group.topology.hosts) > 1:
        raise UnsupportedError(
            "MULTIRING_DEVICE_PATH=hierarchical on several hosts is not served by Group.on_device: use auto, nccl or "
            "staged"
        )
    if wish == _STAGED:
        return StagedEngine.open(group, device)
    try:
        return NcclEngine.open(group, device)
    except (PeerLostError, StallError):
        raise
    except MultiringError as error:  # all ranks come here
        if wish in _FORCED:
            raise
        opened = StagedEngine.open(group, device)
        if group.rank == 0:
            _log.info("arrays on devices of ranks %s are staged through host memory: %s", list(group.ranks), error)
        return opened


def group_by_nccl(group: "Group", device: int | str) -> "Group":
    """Return a group of the same ranks on the engine nccl. All ranks of the group call it.

    Arguments and errors are those of `NcclEngine.open`.
    """
    twin = group.twin()
    return twin.on_engine(NcclEngine.open(twin, device))
