"""Group: ranks that do collectives together; who they are, their memory and plans, and the groups made of them."""

import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from multiring.errors import ArgumentError
from multiring.planner import Plan, Task
from multiring.runtime.arrays import numpy_dtype
from multiring.runtime.engines.contract import Engine
from multiring.runtime.group.collectives import Collectives
from multiring.runtime.group.compile import Request
from multiring.runtime.group.engine_calls import EngineCalls
from multiring.runtime.group.known_sizes import KnownSizes
from multiring.runtime.group.posting import Calls, ProcessServices
from multiring.runtime.group.starting import agree_on_ranks, number, rank_of
from multiring.schedule import Collective
from multiring.topology import Topology

if TYPE_CHECKING:
    import numpy as np


class Group(Collectives):
    """Ranks that do collectives together; every one of them calls the same operations in the same order.

    Ranks of a group are numbered from 0; `ranks` gives their ranks in the world. Operations of one group start in the
    order of the calls; different groups do not wait for each other.
    """

    def __init__(
        self,
        services: ProcessServices,
        ranks: tuple[int, ...],
        topology: Topology,
        key: bytes,
        engine: Engine | None = None,
    ) -> None:
        """Be these ranks of the world; every one of them gives the same.

        Args:
            services: what all groups of this process share.
            ranks: as the native core calls them, in the group's order; this process is among them.
            topology: where they are.
            key: names the group.
            engine: what carries its bytes, other than the native core.
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

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._own

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The world rank of each rank of the group."""
        ranks = self._calls.services.rank_of_id
        return self._ranks if ranks is None else tuple([ranks[number] for number in self._ranks])

    @property
    def grid(self) -> tuple[int, ...]:
        """The grid the topology lays the ranks on, fastest links first."""
        return self._calls.grid

    @property
    def topology(self) -> Topology:
        """Where the ranks are, and what the links between them cost, as the planner sees it."""
        return self._topology

    @property
    def calls(self) -> Calls:
        """What the group's operations have in common; for what is built on groups."""
        return self._calls

    @cached_property
    def known_sizes(self) -> KnownSizes:
        """The collectives on memory that the caller has laid out, where every rank knows what the others bring."""
        return KnownSizes(self._calls, self._row_calls)

    @property
    def plans(self) -> dict[Task, Plan]:
        """What this group has planned so far, and how; `multiring.planner.pins_text` makes a plan file of them."""
        return self._calls.plans

    def plan_of(self, collective: str, elements: int, dtype: Any = "float32", op: str = "sum", root: int = 0) -> Plan:
        """Return the plan by which `collective` runs on so many elements: those of the longer side, all ranks' blocks.

        Local: every rank comes to the same plan, and keeps it.

        Raises:
            ArgumentError: there is no such collective, type or operation.
        """
        known = {each.value: each for each in Collective}
        if collective not in known:
            raise ArgumentError(f"collective={collective!r}: want one of {', '.join(known)}")
        count = number("elements", elements, 0)
        request = Request(
            known[collective], numpy_dtype(dtype).name, count, count, op, rank_of(self._calls, "root", root)
        )
        return self._calls.plan_of(request)

    def pin(self, task: Task, plan: Plan) -> None:
        """Run `plan` for `task` from now on. Local: every rank pins the same between the same two operations.

        Raises:
            ScheduleError: the plan's schedule does not do what it promises.
        """
        self._calls.use(task, plan)

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}, ranks={self.ranks})"

    # ---- memory ----

    def allocate(self, shape: int | Sequence[int], dtype: Any) -> "np.ndarray[Any, Any]":
        """Return an array in the arena, which the ranks of this host read in place. Its contents are undefined.

        Local: no other rank takes part. The memory is given back with the last array that views it,
        also after `shutdown`.

        Raises:
            ArgumentError: a negative dimension, an unknown type, or the rank's segment is full.
        """
        dims = tuple(number("shape", dim, 0) for dim in (shape if isinstance(shape, Iterable) else (shape,)))
        found: np.ndarray[Any, Any] = self._calls.allocate(dims, numpy_dtype(dtype).name)  # or the engine's
        return found

    # ---- groups ----

    def subgroup(self, ranks: Sequence[int]) -> "Group | None":
        """Return the group of these ranks, or None on ranks that do not belong to it.

        Args:
            ranks: ranks of this group, in the order they have in the new one; every rank of this group passes the same.

        Raises:
            ArgumentError: `ranks` is empty, names a rank twice, or one that is not in this group.
        """
        chosen, key = agree_on_ranks(self._calls, ranks)
        if self._own not in chosen:
            return None
        return self._group_of(chosen, key)

    def subgroup_named(self, ranks: Sequence[int], name: str) -> "Group":
        """Return the group of these ranks that goes by `name`; this rank is one of them.

        Local: it is one group on all of them, who name it alike, each once; the other ranks have no part in it.

        Args:
            ranks: of this group, in the order they have in the new one.
            name: another one than for every other group of the same ranks.

        Raises:
            ArgumentError: `ranks` names a rank twice, or one that is not in this group, or not this one.
        """
        chosen = tuple(rank_of(self._calls, "ranks", rank) for rank in ranks)
        if self._own not in chosen or len(set(chosen)) != len(chosen):
            raise ArgumentError(f"ranks={list(chosen)}: want rank {self._own} among them, and none twice")
        key = self._calls.purpose_key(f"ranks {list(chosen)} by the name {name}")
        return self._group_of(chosen, key)

    def _group_of(self, ranks: tuple[int, ...], key: bytes) -> "Group":
        members = tuple(self._ranks[rank] for rank in ranks)
        return Group(self._calls.services, members, self._topology.restricted(ranks), key, self._calls.engine)

    def twin(self) -> "Group":
        """Return another group of the same ranks, whose operations have an order of their own.

        Local: the k-th twin that one rank makes belongs together with the k-th of every other.
        """
        return Group(self._calls.services, self._ranks, self._topology, self._calls.twin_key(), self._calls.engine)

    def twin_for(self, purpose: str) -> "Group":
        """Return the group of the same ranks for `purpose`, whose operations have an order of their own.

        Local: it is one group on all ranks, whenever each of them asks for it.
        """
        with self._twins_lock:
            found = self._twins.get(purpose)
            if found is None:
                key = self._calls.purpose_key(purpose)
                services, engine = self._calls.services, self._calls.engine
                found = self._twins[purpose] = Group(services, self._ranks, self._topology, key, engine)
            return found

    def on_engine(self, engine: Engine) -> "Group":
        """Return the group of the same ranks whose collectives `engine` carries out, on arrays of its own.

        Local: it is one group on all ranks, which each make it once. Messages and barriers stay the host's.
        """
        key = self._calls.purpose_key(f"engine {engine.name}")
        return Group(self._calls.services, self._ranks, self._topology, key, engine)
