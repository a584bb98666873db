"""Group: a set of ranks that run collectives together.

The class gives access to its members, memory, plans and subgroups.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from multiring._runtime.arrays import numpy_dtype
from multiring._runtime.engines.contract import Engine
from multiring._runtime.group.collectives import Collectives
from multiring._runtime.group.compile import Request, task_of
from multiring._runtime.group.engine_calls import EngineCalls
from multiring._runtime.group.known_sizes import KnownSizes
from multiring._runtime.group.posting import Calls, ProcessServices
from multiring._runtime.group.starting import agree_on_ranks, number, rank_of
from multiring._schedule import Collective
from multiring._topology import Topology
from multiring.errors import ArgumentError
from multiring.planner import DevicePlan, Plan, Task, device_plans

if TYPE_CHECKING:
    import numpy as np


class Group(Collectives):
    """A set of ranks that run collectives together.

    All of them must call the same operations in the same order. The ranks of a group are numbered from 0; `ranks` gives
    their ranks in the world. The operations of one group start in the order of the calls. Different groups do not wait
    for each other.
    """

    def __init__(
        self,
        services: ProcessServices,
        ranks: tuple[int, ...],
        topology: Topology,
        key: bytes,
        engine: Engine | None = None,
    ) -> None:
        """Create this process's end of the group.

        Every rank of the group must pass equal arguments.

        Args:
            services: the objects that all groups of this process share.
            ranks: the group's ranks by their numbers in the native core, in the group's order, including this process.
            topology: the hosts of the ranks and the links between them.
            key: the group's unique name.
            engine: the engine that transfers the group's data; None uses the native core.
        """
        if engine is None:
            super().__init__(Calls(services, ranks, topology, key))
        else:
            super().__init__(EngineCalls(services, ranks, topology, key, engine))
        self._ranks = ranks
        self._own = self._calls.own
        self._topology = topology
        self._twins: dict[str, Group] = {}
        self._twins_lock = threading.Lock()
        self._known_sizes: KnownSizes | None = None

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._own

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The world rank of each rank of the group."""
        ranks = self._calls.services.rank_of_id
        return self._ranks if ranks is None else tuple([ranks[number] for number in self._ranks])

    @property
    def grid(self) -> tuple[int, ...]:
        """The lengths of the axes of the topology's grid, fastest links first."""
        return self._calls.grid

    @property
    def topology(self) -> Topology:
        """The ranks' hosts and the costs of their links, as the planner uses them."""
        return self._topology

    @property
    def calls(self) -> Calls:
        """The machinery that posts the group's operations, for code that builds on groups."""
        return self._calls

    @property
    def known_sizes(self) -> KnownSizes:
        """The collectives for a caller that knows the sizes of every rank's data.

        Such a caller also lays out the memory.
        """
        # Python 3.11's `cached_property` has one lock for all groups, which a fork could find taken, without an end.
        if self._known_sizes is None:
            self._known_sizes = KnownSizes(self._calls, self._row_calls)
        return self._known_sizes

    @property
    def plans(self) -> dict[Task, Plan]:
        """The plans this group has made so far, by task.

        `multiring.planner.pins_text` makes a plan file of them.
        """
        return self._calls.plans

    def plan_of(self, collective: str, elements: int, dtype: Any = "float32", op: str = "sum", root: int = 0) -> Plan:
        """Return the plan with which this group runs `collective` on `elements` elements.

        The call is local. Every rank computes the same plan and keeps it.

        Args:
            collective: the collective's name, such as "all_reduce".
            elements: the number of elements in the longer of the two buffers, which holds the blocks of all ranks.
            dtype: the element type.
            op: the reduction, as for `all_reduce`.
            root: the root's rank in this group.

        Raises:
            ArgumentError: the collective, type or reduction does not exist.
        """
        known = {each.value: each for each in Collective}
        if collective not in known:
            raise ArgumentError(f"collective={collective!r}: want one of {', '.join(known)}")
        count = number("elements", elements, 0)
        request = Request(
            known[collective], numpy_dtype(dtype).name, count, count, op, rank_of(self._calls, "root", root)
        )
        return self._calls.plan_of(request)

    def device_plans(self, elements: int, dtype: Any = "float32", op: str = "sum") -> list[DevicePlan]:
        """Return the ways of an all_reduce of device tensors among these ranks, cheapest first, with their prices.

        The call is local, and asks no device: the devices and their costs are those of the topology file. Every rank
        gets the same result.

        Args:
            elements: the number of elements.
            dtype: the element type.
            op: the reduction, as for `all_reduce`.

        Raises:
            ArgumentError: the type or reduction does not exist.
        """
        count = number("elements", elements, 0)
        request = Request(Collective.ALL_REDUCE, numpy_dtype(dtype).name, count, count, op)
        return device_plans(task_of(request), self._topology)

    def pin(self, task: Task, plan: Plan) -> None:
        """Use `plan` for `task` from now on.

        The call is local. Every rank must pin the same plan, between the same two operations.

        Raises:
            ScheduleError: the plan's schedule does not compute the collective that it declares.
        """
        self._calls.use(task, plan)

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}, ranks={self.ranks})"

    # ---- memory ----

    def allocate(self, shape: int | Sequence[int], dtype: Any) -> "np.ndarray[Any, Any]":
        """Return a new, uninitialized array in shared memory.

        The other ranks of this host can read it directly. The call is local: no other rank takes part. The memory is
        freed with the last array that views it, even after `shutdown`.

        Raises:
            ArgumentError: a dimension is negative, the type is unknown, or this rank's shared memory is full.
        """
        dims = tuple(number("shape", dim, 0) for dim in (shape if isinstance(shape, Iterable) else (shape,)))
        found: np.ndarray[Any, Any] = self._calls.allocate(dims, numpy_dtype(dtype).name)  # or an engine's array
        return found

    # ---- groups ----

    def subgroup(self, ranks: Sequence[int]) -> "Group | None":
        """Return a new group of some ranks of this group.

        On ranks outside the new group the result is None. Every rank of this group must call this method with equal
        arguments.

        Args:
            ranks: ranks of this group, in the order they will have in the new group.

        Raises:
            ArgumentError: `ranks` is empty, or contains a rank twice or a rank that is not in this group.
        """
        chosen, key = agree_on_ranks(self._calls, ranks)
        if self._own not in chosen:
            return None
        return self._group_of(chosen, key)

    def subgroup_named(self, ranks: Sequence[int], name: str) -> "Group":
        """Return a new group of `ranks`, which must include this rank, under a name.

        The call is local. Each of `ranks` must make the call once, with equal arguments; the other ranks of this group
        do not take part.

        Args:
            ranks: ranks of this group, in the order they will have in the new group.
            name: a name that no other group of the same ranks has.

        Raises:
            ArgumentError: `ranks` contains a rank twice, contains a rank outside this group, or lacks this rank.
        """
        chosen = tuple(rank_of(self._calls, "ranks", rank) for rank in ranks)
        if self._own not in chosen or len(set(chosen)) != len(chosen):
            raise ArgumentError(f"ranks={list(chosen)}: want rank {self._own} among them, and no rank twice")
        key = self._calls.purpose_key(f"ranks {list(chosen)} by the name {name}")
        return self._group_of(chosen, key)

    def _group_of(self, ranks: tuple[int, ...], key: bytes) -> "Group":
        members = tuple(self._ranks[rank] for rank in ranks)
        return self._related(members, self._topology.restricted(ranks), key)

    def twin(self) -> "Group":
        """Return a new group of the same ranks.

        The new group's operations are ordered independently of this group's. The call is local. The k-th twin that a
        rank makes is the same group as the k-th twin of every other rank.
        """
        return self._related(self._ranks, self._topology, self._calls.twin_key())

    def twin_for(self, purpose: str) -> "Group":
        """Return the group of the same ranks that is reserved for `purpose`.

        The first call creates it. Its operations are ordered independently of this group's. The call is local; the
        ranks may make it at different times and still get the same group.
        """
        with self._twins_lock:
            found = self._twins.get(purpose)
            if found is None:
                key = self._calls.purpose_key(purpose)
                found = self._twins[purpose] = self._related(self._ranks, self._topology, key)
            return found

    def _related(self, ranks: tuple[int, ...], topology: Topology, key: bytes) -> "Group":
        """Return a group of `ranks` whose collectives run on this group's engine."""
        services, engine = self._calls.services, self._calls.engine
        if engine is not None:
            engine = engine.on(Group(services, ranks, topology, key + b" in host memory"))
        return Group(services, ranks, topology, key, engine)

    def on_engine(self, engine: Engine) -> "Group":
        """Return a group of the same ranks whose collectives run on `engine`.

        The collectives use the engine's own arrays. The call is local; each rank must make it once. Messages and
        barriers still run in the native core.
        """
        key = self._calls.purpose_key(f"engine {engine.name}")
        return Group(self._calls.services, self._ranks, self._topology, key, engine)

    def on_device(self, device: int | str) -> "Group":
        """Return a group of the same ranks whose arrays lie on CUDA devices.

        Every rank of this group must make the call. `allocate` of the new group returns arrays in the device's memory,
        with `put`, `get`, DLPack and `__cuda_array_interface__`. The collectives also take other libraries' arrays on
        that device. The handles have a method `order(stream)`, which makes a stream of the program wait for the result
        in place of the host. After a MismatchError, the contents of the arrays may be undefined; its text says so. The
        group stays usable. Messages and barriers work as in any group.

        NCCL carries the collectives if each rank has a device of its own and all have NCCL. It refuses averages of
        integers, 16-bit integers and wire types. Otherwise, or with MULTIRING_DEVICE_PATH=staged, arrays travel through
        pinned host memory. Several ranks: verified without GPUs only.

        Args:
            device: this rank's device as "cuda:N" or N, as this process sees it.

        Raises:
            ArgumentError: there is no such device, or this group's own arrays lie on devices.
            UnsupportedError: the device is of another kind, or this host has no driver that works; or
                MULTIRING_DEVICE_PATH asks for NCCL, and this host has no NCCL that works.
            CollectiveError: this happened on another rank; or MULTIRING_DEVICE_PATH asks for NCCL, and two ranks have
                the same device.
        """
        # Few programs have a device, and CUDA's declarations take time to import.
        from multiring._runtime.engines.device_choice import engine_on_device  # noqa: PLC0415

        if self._calls.engine is not None:
            raise ArgumentError(f"{self} has its arrays on devices already; call on_device of a group in host memory")
        twin = self.twin()
        return twin.on_engine(engine_on_device(twin, device))
