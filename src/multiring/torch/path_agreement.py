"""How the CUDA tensors of some ranks are reduced: by NCCL on their GPUs, or staged in host memory.

All ranks decide together, before the first reduction. docs/gpu.md describes the choice for users.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of, world_now
from multiring._runtime import Group
from multiring._runtime.engines.nccl import NcclEngine, told_by_all
from multiring._runtime.engines.nccl_library import find_nccl, shown_version
from multiring._runtime.group.handles import told_apart
from multiring._runtime.job.job import current, is_rank
from multiring.errors import (
    MismatchError,
    MultiringError,
    PeerLostError,
    StallError,
    StateError,
    UnsupportedError,
)
from multiring.torch.device_staging import staging_of

_log = logging.getLogger("multiring")
NCCL_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""The floating-point types that NCCL reduces."""


class DevicePath:
    """The way that some ranks have agreed on."""

    def __init__(self, on_device: Group | None, reason: str) -> None:
        """Record the decision.

        Args:
            on_device: the group whose operations NCCL carries; None if the ranks stage tensors in host memory.
            reason: why the ranks do not use NCCL; "" if they do.
        """
        self._on_device = on_device
        self._lock = threading.Lock()  # of the order of the operations
        self._last: Callable[[], Any] = _nothing  # returns the handle of the last operation, which keeps its tensor
        self.reason = reason

    @property
    def is_nccl(self) -> bool:
        """Whether NCCL reduces tensors."""
        return self._on_device is not None

    def all_reduce(self, tensor: Tensor, op: str, label: str) -> Any:
        """Start to reduce a tensor of the device in place, behind the caller's current stream; return the handle.

        Raises:
            UnsupportedError: the current stream is capturing a graph.
        """
        staging_of(tensor.device).require_no_capture()
        assert self._on_device is not None  # noqa: S101
        # multiring's calls of the driver make the device current, and torch would take it for the program's choice.
        with torch.cuda.device(tensor.device), self._lock:
            handle = self._on_device.all_reduce_async(tensor, op, label=label)
        self._last = weakref.ref(handle)
        return handle

    def decline(self, error: Exception) -> None:
        """Take part in the next operation so that it fails on all ranks, because of `error`."""
        assert self._on_device is not None  # noqa: S101
        with self._lock:
            self._on_device.calls.decline("", error)

    @property
    def posted(self) -> int:
        """How many operations this rank has posted."""
        return 0 if self._on_device is None else self._on_device.calls.last

    def settle(self) -> None:
        """Wait for the operations that have started.

        A stream goes on when an operation fails later, so a program that keeps its results calls this first.

        Raises:
            CollectiveError: an operation has failed.
        """
        if self._on_device is None:
            return
        last, engine = self._last(), self._on_device.calls.engine
        if last is not None:
            last.wait()
        if isinstance(engine, NcclEngine):
            engine.settle()


def _nothing() -> None:
    """Return no handle."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank tells the others.

    setting: its MULTIRING_DEVICE_PATH.
    problem: why it cannot use NCCL; "" if it can.
    gpu: the address of its GPU on the host's PCI bus, which parts of one GPU (MIG) share.
    version: its version of NCCL; 0 if it has none.
    """

    setting: str
    problem: str = ""
    gpu: str = ""
    version: int = 0


@dataclass(slots=True)
class _Decisions:
    """This generation's decisions.

    reasons: the reason of the last decision for each purpose, by the ranks that have decided.
    paths: the decisions for NCCL that are in use.
    """

    reasons: dict[tuple[int, ...], dict[str, str]] = field(default_factory=dict)
    paths: "weakref.WeakSet[DevicePath]" = field(default_factory=weakref.WeakSet)


def agree_on_path(group: Group, device: torch.device, purpose: str, problem: str = "") -> DevicePath:
    """Decide with the other ranks how tensors on `device` are reduced. All ranks of `group` call it, and wait.

    Args:
        group: the ranks, in host memory.
        device: this rank's CUDA device.
        purpose: which tensors the decision is for.
        problem: why NCCL cannot do this rank's reductions, whatever the hosts have; "" if it can.

    Raises:
        UnsupportedError: on all ranks: MULTIRING_DEVICE_PATH is nccl, and NCCL cannot be used on some rank.
        MismatchError: on all ranks: they have different values of MULTIRING_DEVICE_PATH.
        CollectiveError: a rank is gone.
    """
    return path_by(group, device, purpose, agree_on_reason(group, device, problem))


def agree_on_reason(group: Group, device: torch.device, problem: str = "") -> str:
    """Return why these ranks cannot use NCCL; "" if they can. Arguments and errors are those of `agree_on_path`."""
    facts = _facts(group.calls.services.device_path, device, problem)
    told = [RankFacts(**each) for each in told_by_all(group.twin_for("facts of devices"), asdict(facts))]
    reason = reason_against(told, group.topology.host_of(), group.ranks)
    if reason and not problem:
        _require_no_wish(group, reason)
    return reason


def path_by(group: Group, device: torch.device, purpose: str, reason: str) -> DevicePath:
    """Start NCCL if `reason` is empty, and return the way. The other arguments are those of `agree_on_path`."""
    path = DevicePath(None, reason)
    if not reason:
        try:
            path = DevicePath(group.twin_for("device path").on_device(device.index), "")
        except (PeerLostError, StallError):
            raise
        except MultiringError as error:  # NCCL refuses on some rank, so all ranks come here
            path = DevicePath(None, f"NCCL cannot be started: {error}")
            _require_no_wish(group, path.reason)
    with suppress(StateError):  # the job has ended
        decisions = current().job_objects.made(_Decisions, _Decisions)
        decisions.reasons.setdefault(group.ranks, {})[purpose] = path.reason
        decisions.paths.add(path)
    if group.rank == 0:
        _log.info("%s on devices of ranks %s: %s", purpose, list(group.ranks), _shown(path.reason))
    return path


def _require_no_wish(group: Group, reason: str) -> None:
    if group.calls.services.device_path == "nccl":
        raise UnsupportedError(
            f"MULTIRING_DEVICE_PATH=nccl, but ranks {list(group.ranks)} cannot use NCCL: {reason}; give each rank of a "
            "host a GPU and an NCCL library, or use MULTIRING_DEVICE_PATH=auto"
        )


def device_path(process_set: ProcessSet = global_process_set) -> str:
    """Return how the CUDA tensors of a process set are reduced: "nccl", or "staged: " and the reason.

    If gradient buckets and collectives differ, the text names both. The result is "undecided" before the first
    reduction of CUDA tensors. The call is local.

    Raises:
        ArgumentError: this rank is not in the set.
    """
    decided = world_now().job_objects.made(_Decisions, _Decisions).reasons
    reasons = decided.get(members_of(process_set).group.ranks, {})
    shown = {purpose: _shown(reason) for purpose, reason in sorted(reasons.items())}
    if len(set(shown.values())) > 1:
        return "; ".join(f"{purpose}: {text}" for purpose, text in shown.items())
    return next(iter(shown.values()), "undecided")


def settle_reductions() -> None:
    """Wait until the reductions that NCCL has started so far have ended well, before their results are kept.

    Raises:
        CollectiveError: one of them has failed, so that the program's tensors may hold wrong values.
    """
    found = current().job_objects.get(_Decisions) if is_rank() else None
    for path in [] if found is None else list(found.paths):
        path.settle()


def _shown(reason: str) -> str:
    return f"staged: {reason}" if reason else "nccl"


def _facts(setting: str, device: torch.device, problem: str) -> RankFacts:
    if problem or setting == "staged":
        return RankFacts(setting, problem or "MULTIRING_DEVICE_PATH=staged")
    try:
        version = find_nccl().version
    except UnsupportedError as error:
        return RankFacts(setting, str(error))
    return RankFacts(setting, gpu=_gpu_of(device), version=version)


def _gpu_of(device: torch.device) -> str:
    found: Any = torch.cuda.get_device_properties(device)
    if not hasattr(found, "pci_bus_id"):  # an older torch
        return str(found.uuid)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"


def reason_against(told: Sequence[RankFacts], host_of: Sequence[int], ranks: Sequence[int]) -> str:
    """Return why these ranks cannot use NCCL; "" if they can.

    Args:
        told: each rank's facts.
        host_of: the number of each rank's host.
        ranks: the ranks' numbers in the job.

    Raises:
        MismatchError: the ranks have different settings.
    """
    if len({each.setting for each in told}) > 1:
        settings = {rank: f"MULTIRING_DEVICE_PATH={each.setting}" for rank, each in zip(ranks, told, strict=True)}
        raise MismatchError(f"the ranks differ: {told_apart(settings)}; set the same value on all ranks")
    for rank, each in zip(ranks, told, strict=True):
        if each.problem:
            return each.problem if len({other.problem for other in told}) == 1 else f"rank {rank}: {each.problem}"
    if len(told) == 1:
        return "there is a single rank"
    if len(set(host_of)) > 1:
        return f"the ranks are on {len(set(host_of))} hosts"
    versions = {rank: f"NCCL {shown_version(each.version)}" for rank, each in zip(ranks, told, strict=True)}
    if len(set(versions.values())) > 1:
        return f"the versions of NCCL differ: {told_apart(versions)}"
    owners: dict[tuple[int, str], int] = {}
    for rank, host, each in zip(ranks, host_of, told, strict=True):
        first = owners.setdefault((host, each.gpu), rank)
        if first != rank:
            return (
                f"ranks {first} and {rank} share the GPU {each.gpu} of their host, and NCCL needs a GPU for each rank"
            )
    return ""
