"""The frame of a schedule: the position of every rank and the cuts of the buffers, independent of the algorithm.

On a grid (p1, ..., pk) of p ranks every channel's share is cut into p blocks, one per rank. The blocks are
numbered so that each axis cuts into contiguous parts: the rank with coordinates (i1, ..., ik) owns
block i1 * p2 * ... * pk + i2 * p3 * ... * pk + ... + ik.

If hosts have unequal numbers of ranks, the surplus ranks have no position on the grid. Each of them joins a rank of the
grid, which adds its contribution before the first axis and sends it the result after the last axis.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from multiring._schedule.kinds import Collective, Wire, names_of
from multiring._topology import coordinates_of, strides_of
from multiring.errors import ScheduleError


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The collective, the positions of its ranks on a grid, and its channels.

    `order` gives the rank at each grid position. `shares` are the relative weights of the channels: rails
    of unequal speed carry unequal shares. `root` is 0 except for a broadcast. `wires` has the wire type of each axis;
    it is empty if all axes are exact. `joined` pairs each rank outside the grid with the grid rank that it joins. Only
    an all_reduce can have lossy wires or joining ranks.

    Raises:
        ScheduleError: the grid is empty, `order` and `joined` do not name each rank once, `order` does not fill the
            grid, a rank joins a rank that is not on the grid, the root is not a rank, or a share is not a positive
            integer. Also if `wires` does not have one type per axis, or has an exact axis after a lossy axis.
    """

    collective: Collective
    grid: tuple[int, ...]
    order: tuple[int, ...]
    root: int = 0
    shares: tuple[int, ...] = (1,)
    wires: tuple[Wire, ...] = ()
    joined: tuple[tuple[int, int], ...] = ()
    # `order` as an array, and its inverse, for fast look-ups on long lines. -1: the rank is not on the grid.
    _ranks_at: NDArray[np.int32] = field(init=False, repr=False, compare=False)
    _position: NDArray[np.int32] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.grid) == 0 or any(size < 1 for size in self.grid):
            raise ScheduleError(f"grid={self.grid}: want at least one axis, each of at least one rank")
        beyond = [rank for rank, _ in self.joined]
        if len(self.order) != self.blocks or sorted([*self.order, *beyond]) != list(range(self.ranks)):
            joined = f", without the joining ranks {beyond}" if beyond else ""
            raise ScheduleError(
                f"order={self.order}: want each of the {self.blocks} ranks of grid {self.grid} once{joined}"
            )
        if self.joined:
            self._check_joined()
        if not 0 <= self.root < self.ranks or (self.root and self.collective is not Collective.BROADCAST):
            raise ScheduleError(f"root={self.root}: want a rank below {self.ranks}, and 0 unless this is a broadcast")
        if not self.shares or any(share < 1 or share != int(share) for share in self.shares):
            raise ScheduleError(f"shares={self.shares}: want a positive integer for every channel")
        self._check_wires()
        ranks_at = np.asarray(self.order, np.int32)
        position = np.full(self.ranks, -1, np.int32)
        position[ranks_at] = np.arange(self.blocks)
        for name, array in (("_ranks_at", ranks_at), ("_position", position)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def _check_joined(self) -> None:
        strange = sorted({partner for _, partner in self.joined}.difference(self.order))
        if strange:
            raise ScheduleError(f"joined={self.joined}: want ranks of grid {self.grid} to join, got {strange[0]}")
        if self.collective is not Collective.ALL_REDUCE:
            raise ScheduleError(f"joined={self.joined} for {self.collective.value}: only an all_reduce can be joined")

    def _check_wires(self) -> None:
        known = all(isinstance(wire, Wire) for wire in self.wires)
        if self.wires and (len(self.wires) != len(self.grid) or not known):
            raise ScheduleError(f"wires={self.wires}: want one Wire for each of the {len(self.grid)} axes, or none")
        if self.is_coded and self.collective is not Collective.ALL_REDUCE:
            raise ScheduleError(
                f"wires={names_of(self.wires)} for {self.collective.value}: only an all_reduce can be coded"
            )
        coded = [self.wire_of(axis) is not Wire.NONE for axis, size in enumerate(self.grid) if size > 1]
        if coded != sorted(coded):
            # A lossy axis overwrites the chunks that it gathers, and peers on a later exact axis may still read them.
            raise ScheduleError(
                f"wires={names_of(self.wires)} on grid {self.grid}: an axis after a coded axis must be coded too;"
                " use lossy wires on the slowest axes"
            )

    @property
    def ranks(self) -> int:
        """The number of ranks, including the ranks outside the grid."""
        return self.blocks + len(self.joined)

    @property
    def blocks(self) -> int:
        """The number of blocks in a share: one for each rank of the grid."""
        return math.prod(self.grid)

    @property
    def channels(self) -> int:
        """The number of channels."""
        return len(self.shares)

    @property
    def is_coded(self) -> bool:
        """Whether any axis has a lossy wire type."""
        return any(self.wires)

    def wire_of(self, axis: int) -> Wire:
        """Return the wire type of `axis`."""
        return self.wires[axis] if self.wires else Wire.NONE

    def position_of(self, rank: int) -> int:
        """Return the grid position of `rank`.

        Raises:
            ScheduleError: there is no such rank, or the rank is outside the grid.
        """
        self.refuse_other(rank)
        if self._position[rank] < 0:
            raise ScheduleError(f"rank={rank}: it joins rank {self.joins(rank)}, and has no position of its own")
        return int(self._position[rank])

    def refuse_other(self, rank: int) -> None:
        """Raise ScheduleError unless `rank` is a rank of this frame."""
        if not 0 <= rank < self.ranks:
            raise ScheduleError(f"rank={rank}: want 0 to {self.ranks - 1}")

    def joins(self, rank: int) -> int:
        """Return the grid rank that `rank` joins, or `rank` itself if it is on the grid."""
        return next((partner for joining, partner in self.joined if joining == rank), rank)

    def joined_to(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that join `rank`."""
        return tuple(joining for joining, partner in self.joined if partner == rank)

    def coordinates_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of `rank`, fastest axis first."""
        return coordinates_of(self.grid, self.position_of(rank))

    def line_of(self, rank: int, axis: int) -> NDArray[np.int32]:
        """Return the ranks on the line through `rank` along `axis`, ordered by coordinate: shape (grid[axis],)."""
        stride, position = strides_of(self.grid)[axis], self.position_of(rank)
        first = position - position // stride % self.grid[axis] * stride
        return self._ranks_at[first : first + stride * self.grid[axis] : stride]

    def width_of(self, axis: int) -> int:
        """Return the number of blocks in one part along `axis`."""
        return math.prod(self.grid[axis + 1 :])

    def owners(self) -> NDArray[np.int32]:
        """Return the rank that owns each block: shape (blocks,)."""
        # Grid positions count the first axis fastest; block numbers count the last axis fastest.
        owners: NDArray[np.int32] = self._ranks_at.reshape(self.grid[::-1]).T.ravel()
        return owners
