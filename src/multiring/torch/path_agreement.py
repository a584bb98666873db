"""How the CUDA tensors of some ranks are reduced: by NCCL, by NCCL inside each host only, or staged in host memory.

All ranks decide together, before the first reduction. docs/gpu.md describes the choice for users.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from multiring._frontend.process_sets import ProcessSet, global_process_set, members_of, world_now
from multiring._runtime import Group
from multiring._runtime.engines.device_choice import group_by_nccl
from multiring._runtime.engines.nccl import NcclEngine
from multiring._runtime.engines.nccl_library import find_nccl, shown_version
from multiring._runtime.engines.told import told_by_all
from multiring._runtime.group.compile import Request, task_of
from multiring._runtime.group.declining import UNTOLD
from multiring._runtime.group.handles import told_apart
from multiring._runtime.job.job import current, is_rank
from multiring._schedule import Collective
from multiring._topology import Topology
from multiring._topology.device_paths import HIERARCHICAL, NCCL, STAGED, Hosts, device_paths
from multiring.errors import (
    CollectiveError,
    MismatchError,
    MultiringError,
    PeerLostError,
    StallError,
    StateError,
    UnsupportedError,
)
from multiring.planner import DeviceRoute, auto_path, auto_route, problem_of_route
from multiring.torch.device_staging import staging_of
from multiring.torch.hierarchical_path import HierarchicalReduction, ShareMemory
from multiring.torch.interop import dtype_name

_log = logging.getLogger("multiring")
NCCL_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""The floating-point types that NCCL reduces."""
FORCED = (NCCL, HIERARCHICAL)
"""The values of MULTIRING_DEVICE_PATH that are an error where NCCL is impossible."""


class DevicePath:
    """The way that some ranks have agreed on."""

    def __init__(self, by: Group | HierarchicalReduction | None, choice: "PathChoice") -> None:
        """Record the decision.

        Args:
            by: the group whose operations NCCL carries, or this rank's end of the reductions of several hosts; None if
                the ranks stage tensors in host memory.
            choice: the decision.
        """
        self._by = by
        self._lock = threading.Lock()  # of the order of the operations
        self._last: Callable[[], Any] = _nothing  # returns the handle of the last operation, which keeps its tensor
        self.choice = choice

    @property
    def uses_nccl(self) -> bool:
        """Whether NCCL takes part in reductions."""
        return self._by is not None

    def padded(self, count: int, dtype: torch.dtype) -> int:
        """Return how many elements the memory of a tensor of `count` elements must have for `all_reduce`."""
        return self._by.padded(count, dtype) if isinstance(self._by, HierarchicalReduction) else count

    def memory(self, padded: int, dtype: torch.dtype, device: torch.device) -> ShareMemory | None:
        """Return the further memory that `all_reduce` of a tensor of `padded` elements needs, or None.

        The memory on the device is the current stream's. Reductions in flight need memory of their own.

        Raises:
            torch.OutOfMemoryError: the device has no memory.
            ArgumentError: the rank's segment is full, or CUDA cannot pin the memory.
        """
        return self._by.memory(padded, dtype, device) if isinstance(self._by, HierarchicalReduction) else None

    def all_reduce(
        self, tensor: Tensor, op: str, label: str, memory: ShareMemory | None, *, wire: str | None = None
    ) -> Any:
        """Start to reduce a tensor of the device in place, behind the caller's current stream; return the handle.

        Args:
            tensor: has as many elements as `padded` returns.
            op: the operation.
            label: the operation's name.
            memory: what `memory` returned.
            wire: the wire type between hosts, for float32. The ranks have agreed on the path with `has_wire` then.

        Raises:
            UnsupportedError: the current stream is capturing a graph.
        """
        staging_of(tensor.device).require_no_capture()
        # multiring's calls of the driver make the device current, and torch would take it for the program's choice.
        with torch.cuda.device(tensor.device), self._lock:
            if isinstance(self._by, HierarchicalReduction):
                assert memory is not None  # noqa: S101
                handle: Any = self._by.all_reduce(tensor, op, label, memory, wire=wire)
            else:
                assert self._by is not None  # noqa: S101
                handle = self._by.all_reduce_async(tensor, op, label=label)  # inside a host nothing is rounded
        self._last = weakref.ref(handle)
        return handle

    @property
    def starts_ahead(self) -> bool:
        """Whether an operation may start before the ranks agree on it, since they can take it back."""
        return isinstance(self._by, Group)

    def decline(self, error: Exception) -> None:
        """Take part in the next operation so that it fails on all ranks, because of `error`."""
        assert self._by is not None  # noqa: S101
        with self._lock:
            if isinstance(self._by, HierarchicalReduction):
                self._by.decline(error)
            else:
                self._by.calls.decline("", error)

    @property
    def posted(self) -> int:
        """How many operations this rank has posted."""
        if isinstance(self._by, HierarchicalReduction):
            return self._by.posted
        return self._by.calls.last if self._by is not None else 0

    @contextmanager
    def declining(self) -> Iterator[None]:
        """Decline the next operation if the block, which starts it, raises an error before it has posted it."""
        before = self.posted
        try:
            yield
        except UNTOLD:
            raise
        except Exception as error:
            if self.posted == before:
                with suppress(MultiringError):
                    self.decline(error)
            raise

    def settle(self) -> None:
        """Wait for the operations that have started.

        A stream goes on when an operation fails later, so a program that keeps its results calls this first.

        Raises:
            CollectiveError: an operation has failed.
        """
        if self._by is None:
            return
        last = self._last()
        if last is not None:
            last.wait()
        for group in self._by.groups if isinstance(self._by, HierarchicalReduction) else (self._by,):
            engine = group.calls.engine
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


@dataclass(frozen=True, slots=True)
class PathChoice:
    """Which path the ranks take, one of `device_paths`.

    reason: why it is not the one that they want; "" if it is.
    """

    path: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.reason else self.path


@dataclass(slots=True)
class _Decisions:
    """This generation's decisions.

    shown: the last decision for each purpose in words, by the ranks that have decided.
    paths: the decisions for NCCL that are in use.
    """

    shown: dict[tuple[int, ...], dict[str, str]] = field(default_factory=dict)
    paths: "weakref.WeakSet[DevicePath]" = field(default_factory=weakref.WeakSet)


def agree_on_path(
    group: Group, device: torch.device, purpose: str, problem: str = "", *, has_wire: bool = False
) -> DevicePath:
    """Decide with the other ranks how tensors on `device` are reduced. All ranks of `group` call it, and wait.

    Args:
        group: the ranks, in host memory.
        device: this rank's CUDA device.
        purpose: which tensors the decision is for.
        problem: why NCCL cannot do this rank's reductions, whatever the hosts have; "" if it can.
        has_wire: the reductions have a wire type between hosts, which NCCL does not know.

    Raises:
        UnsupportedError: on all ranks: MULTIRING_DEVICE_PATH asks for NCCL, and NCCL cannot be used on some rank.
        MismatchError: on all ranks: they have different values of MULTIRING_DEVICE_PATH.
        CollectiveError: a rank is gone.
    """
    return path_by(group, device, purpose, agree_on_choice(group, device, problem, has_wire=has_wire))


def agree_on_choice(group: Group, device: torch.device, problem: str = "", *, has_wire: bool = False) -> PathChoice:
    """Return the path that these ranks can take. Arguments and errors are those of `agree_on_path`."""
    hosts, wish, auto = group.topology.hosts, group.calls.services.device_path, auto_choice(group.topology)
    if has_wire and not problem and len(hosts) > 1 and _wanted(wish, hosts, auto) == NCCL:
        problem = "NCCL has no wire types between hosts"
    facts = _facts(wish, device, problem)
    told = [RankFacts(**each) for each in told_by_all(group.twin_for("facts of devices"), asdict(facts))]
    choice = choice_by(told, hosts, group.ranks, auto)
    if choice.path == STAGED and not problem:
        _require_no_wish(group, choice.reason)
    return choice


def path_by(group: Group, device: torch.device, purpose: str, choice: PathChoice) -> DevicePath:
    """Start NCCL if `choice` needs it, and return the way. The other arguments are those of `agree_on_path`."""
    path = DevicePath(None, choice)
    if choice.path != STAGED:
        try:
            over = group.twin_for("device path")
            by = _on_hosts(over.twin(), device) if choice.path == HIERARCHICAL else group_by_nccl(over, device.index)
            path = DevicePath(by, choice)
        except (PeerLostError, StallError):
            raise
        except MultiringError as error:  # NCCL refuses on some rank, so all ranks come here
            path = DevicePath(None, PathChoice(STAGED, f"NCCL cannot be started: {error}"))
            _require_no_wish(group, path.choice.reason)
    with suppress(StateError):  # the job has ended
        decisions = current().job_objects.made(_Decisions, _Decisions)
        decisions.shown.setdefault(group.ranks, {})[purpose] = str(path.choice)
        decisions.paths.add(path)
    if group.rank == 0:
        untried = "; NCCL between GPUs is verified without GPUs only" if path.uses_nccl else ""
        _log.info("%s on devices of ranks %s: %s%s", purpose, list(group.ranks), path.choice, untried)
    return path


def _on_hosts(group: Group, device: torch.device) -> HierarchicalReduction:
    """Start NCCL inside the hosts. All ranks raise the same error if one of them cannot.

    Raises:
        CollectiveError: NCCL cannot be started on some host; or a rank is gone.
    """
    made, problem = None, ""
    try:
        made = HierarchicalReduction.open(group, device)
    except (MultiringError, RuntimeError) as error:  # the ranks of the other hosts do not know
        problem = str(error)
    for rank, each in zip(group.ranks, told_by_all(group, {"problem": problem}), strict=True):
        if each["problem"]:
            text = each["problem"]
            raise CollectiveError(text if text.startswith("rank ") else f"rank {rank}: {text}")
    assert made is not None  # noqa: S101
    return made


def _require_no_wish(group: Group, reason: str) -> None:
    if (wish := group.calls.services.device_path) in FORCED:
        raise UnsupportedError(
            f"MULTIRING_DEVICE_PATH={wish}, but ranks {list(group.ranks)} cannot use NCCL: {reason}; give each rank of "
            "a host a GPU and an NCCL library, or use MULTIRING_DEVICE_PATH=auto"
        )


def device_path(process_set: ProcessSet = global_process_set) -> str:
    """Return how the CUDA tensors of a process set are reduced: "nccl", "hierarchical", or "staged: " and the reason.

    On the path "hierarchical", NCCL reduces inside each host, and the host's collectives between hosts.

    If gradient buckets and collectives differ, the text names both. The result is "undecided" before the first
    reduction of CUDA tensors. The call is local.

    Raises:
        ArgumentError: this rank is not in the set.
    """
    decided = world_now().job_objects.made(_Decisions, _Decisions).shown
    shown = decided.get(members_of(process_set).group.ranks, {})
    if len(set(shown.values())) > 1:
        return "; ".join(f"{purpose}: {text}" for purpose, text in sorted(shown.items()))
    return next(iter(shown.values()), "undecided")


def settle_reductions() -> None:
    """Wait until the reductions that NCCL has started so far have ended well, before their results are kept.

    Raises:
        CollectiveError: one of them has failed, so that the program's tensors may hold wrong values.
    """
    found = current().job_objects.get(_Decisions) if is_rank() else None
    for path in [] if found is None else list(found.paths):
        path.settle()


def _facts(setting: str, device: torch.device, problem: str) -> RankFacts:
    if problem or setting == "staged":
        return RankFacts(setting, problem or "MULTIRING_DEVICE_PATH=staged")
    try:
        version = find_nccl().version
    except UnsupportedError as error:
        return RankFacts(setting, str(error))
    try:
        return RankFacts(setting, gpu=_gpu_of(device), version=version)
    except RuntimeError as error:  # of CUDA
        return RankFacts(setting, f"{device} does not tell which GPU it is: {error}")


def _gpu_of(device: torch.device) -> str:
    found: Any = torch.cuda.get_device_properties(device)
    if not hasattr(found, "pci_bus_id"):  # an older torch
        return str(found.uuid)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}"


def auto_choice(topology: Topology) -> PathChoice:
    """Return the planner's choice for these ranks, which they take if the program has no wish and NCCL works."""
    path, usual = auto_path(topology), DeviceRoute(device_paths(topology.hosts)[0])
    if path is not DeviceRoute.STAGED or usual is path:
        return PathChoice(path.value)
    return PathChoice(STAGED, problem_of_route(usual, topology) or "it is cheaper, by the topology's measured costs")


def takes_nccl(group: Group, elements: int, dtype: torch.dtype, op: str, least_bytes: int) -> bool:
    """Return whether a reduction takes the ranks' path by NCCL, if they have one: the same on all ranks.

    Args:
        group: the ranks.
        elements: the number of elements.
        dtype: their type, which NCCL reduces.
        op: the operation.
        least_bytes: the least size that NCCL reduces while the costs of devices are not measured.
    """
    wish = group.calls.services.device_path
    if wish != "auto":
        return wish in FORCED
    task = task_of(Request(Collective.ALL_REDUCE, dtype_name(dtype), elements, elements, op))
    return auto_route(task, group.topology, least_bytes) is not DeviceRoute.STAGED


def choice_by(
    told: Sequence[RankFacts], hosts: Hosts, ranks: Sequence[int], auto: PathChoice | None = None
) -> PathChoice:
    """Return the path that these ranks take.

    Args:
        told: each rank's facts.
        hosts: each host's ranks of the group.
        ranks: the ranks' numbers in the job.
        auto: what they take without a wish, if NCCL works; None: the default of `hosts`.

    Raises:
        MismatchError: the ranks have different settings.
    """
    if len({each.setting for each in told}) > 1:
        settings = {rank: f"MULTIRING_DEVICE_PATH={each.setting}" for rank, each in zip(ranks, told, strict=True)}
        raise MismatchError(f"the ranks differ: {told_apart(settings)}; set the same value on all ranks")
    for rank, each in zip(ranks, told, strict=True):
        if each.problem:
            is_common = len({other.problem for other in told}) == 1
            return PathChoice(STAGED, each.problem if is_common else f"rank {rank}: {each.problem}")
    auto = auto or PathChoice(device_paths(hosts)[0])
    path = _wanted(told[0].setting, hosts, auto)
    if path == STAGED and auto.reason:
        return auto
    reason = _reason_against(path, told, hosts, ranks)
    return PathChoice(STAGED, reason) if reason else PathChoice(path)


def _wanted(setting: str, hosts: Hosts, auto: PathChoice) -> str:
    """Return the path that ranks on these hosts take, by the value of MULTIRING_DEVICE_PATH, if NCCL works."""
    if setting == HIERARCHICAL and len(hosts) == 1:
        return device_paths(hosts)[0]  # NCCL inside the only host
    return setting if setting in FORCED else auto.path


def _reason_against(path: str, told: Sequence[RankFacts], hosts: Hosts, ranks: Sequence[int]) -> str:
    """Return why the ranks cannot take `path`, or why it is no use to want another; "" if they take it."""
    if len(told) == 1:
        return "there is a single rank"
    if path not in device_paths(hosts) or path == STAGED:
        return f"each of the {len(hosts)} hosts has one rank"
    for members in hosts if path == HIERARCHICAL else [range(len(told))]:
        versions = {ranks[each]: f"NCCL {shown_version(told[each].version)}" for each in members}
        if len(set(versions.values())) > 1:
            return f"the versions of NCCL differ: {told_apart(versions)}"
    for members in hosts:
        owners: dict[str, int] = {}
        for each in members:
            rank, gpu = ranks[each], told[each].gpu
            first = owners.setdefault(gpu, rank)
            if first != rank:
                return f"ranks {first} and {rank} share the GPU {gpu} of their host, and NCCL needs a GPU for each rank"
    return ""
