"""Membership: the ranks of one generation of the job, as an immutable value."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from multiring._topology import Topology
from multiring.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A process of the job. It stays the same for as long as the process lives."""

    number: int  # the process's number in the native core: its rank in the first generation
    host: str  # the host's name


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """The ranks of one generation of the job, from the view of one rank.

    The names of groups and agreements of a generation depend on `number` and the order of the ranks. The processes'
    numbers in the native core, `ids`, stay the same in all generations.
    """

    job: str
    number: int  # the generation's number; `init` makes generation 0
    rank: int  # this process's rank
    endpoints: tuple[Endpoint, ...]  # the processes, by rank
    topology: Topology

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.endpoints) or len(self.endpoints) != self.topology.ranks:
            raise ArgumentError(
                f"rank {self.rank} of {len(self.endpoints)} endpoints on a topology of {self.topology.ranks} ranks: "
                "want a rank below the number of endpoints, and equally many endpoints and ranks"
            )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.endpoints)

    @property
    def ids(self) -> tuple[int, ...]:
        """The number of each rank in the native core."""
        return tuple([endpoint.number for endpoint in self.endpoints])

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this process's host."""
        return next(ranks for ranks in self.topology.hosts if self.rank in ranks)

    @property
    def key(self) -> str:
        """The unique name of this generation of the job."""
        return self.job if self.number == 0 else f"{self.job}|generation {self.number}"

    def without(self, lost: Collection[int]) -> "Membership":
        """Return the next generation: the ranks without `lost`, with new numbers.

        Their order stays the same.

        Raises:
            ArgumentError: `lost` contains this process's rank, or a rank that is not in the job.
        """
        if self.rank in lost or not set(lost) <= set(range(self.size)):
            raise ArgumentError(f"lost={sorted(lost)}: want ranks below {self.size} other than this rank, {self.rank}")
        return self._of([rank for rank in range(self.size) if rank not in lost], self.number + 1)

    def following(self, number: int, ids: Sequence[int]) -> "Membership":
        """Return generation `number`, whose processes have these numbers, by rank.

        Raises:
            ArgumentError: `ids` contains a process that is not in this generation, or lacks this one.
        """
        known = {each: rank for rank, each in enumerate(self.ids)}
        if not set(ids) <= set(known) or self.ids[self.rank] not in ids:
            raise ArgumentError(f"processes {list(ids)}: want some of {list(self.ids)}, with {self.ids[self.rank]}")
        return self._of([known[each] for each in ids], number)

    def _of(self, left: Sequence[int], number: int) -> "Membership":
        return Membership(
            job=self.job,
            number=number,
            rank=left.index(self.rank),
            endpoints=tuple(self.endpoints[rank] for rank in left),
            topology=self.topology.restricted(left),
        )
