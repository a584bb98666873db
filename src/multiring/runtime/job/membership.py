"""Who is in the job: a value that everything else asks, one for each generation of the job's ranks."""

from collections.abc import Collection
from dataclasses import dataclass

from multiring.errors import ArgumentError
from multiring.topology import Topology


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A process of the job, and where it is reached; the same for as long as it lives."""

    number: int  # what the native core calls it: its rank in the first generation
    host: str  # its name


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """The ranks of one generation of the job, as one of them sees it.

    Everything that is agreed on, or named, in a generation is so by `number` and the ranks' order; what a process is
    called by the core stays what it was, `ids`.
    """

    job: str
    number: int  # of the generation: 0 is that of init
    rank: int  # this process's
    endpoints: tuple[Endpoint, ...]  # by rank
    topology: Topology

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.endpoints) or len(self.endpoints) != self.topology.ranks:
            raise ArgumentError(
                f"rank {self.rank} of {len(self.endpoints)} endpoints on a topology of {self.topology.ranks} ranks"
            )

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.endpoints)

    @property
    def ids(self) -> tuple[int, ...]:
        """What the native core calls each rank."""
        return tuple([endpoint.number for endpoint in self.endpoints])

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this process's host."""
        return next(ranks for ranks in self.topology.hosts if self.rank in ranks)

    @property
    def key(self) -> str:
        """What names this generation of the job."""
        return self.job if self.number == 0 else f"{self.job}|generation {self.number}"

    def without(self, lost: Collection[int]) -> "Membership":
        """Return the next generation: these ranks but for `lost`, in their order, numbered anew.

        Raises:
            ArgumentError: this process's is among the lost, or one that is not in the job.
        """
        if self.rank in lost or not set(lost) <= set(range(self.size)):
            raise ArgumentError(f"lost={sorted(lost)}: want ranks of {self.size}, and not this one, {self.rank}")
        left = [rank for rank in range(self.size) if rank not in lost]
        return Membership(
            job=self.job,
            number=self.number + 1,
            rank=left.index(self.rank),
            endpoints=tuple(self.endpoints[rank] for rank in left),
            topology=self.topology.restricted(left),
        )
