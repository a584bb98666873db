"""The Schedule: a collective as a value that is built, proven, priced, interpreted, executed and printed."""

import hashlib
from dataclasses import dataclass

import numpy as np

from multiring._schedule import layout
from multiring._schedule.expand import expand
from multiring._schedule.frame import Frame
from multiring._schedule.kinds import Accumulation, Collective, Wire, names_of
from multiring._schedule.layout import Counts, Extents
from multiring._schedule.moves import NOWHERE, Moves
from multiring._schedule.pattern import Phase
from multiring.errors import ScheduleError


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The phases of a collective over a frame.

    Its size is independent of the number of moves.

    Raises:
        ScheduleError: a phase names an axis that the grid does not have, or lossy wires would carry 16-bit sums.
    """

    algorithm: str
    frame: Frame
    phases: tuple[Phase, ...]
    accumulation: Accumulation = Accumulation.SAME

    def __post_init__(self) -> None:
        for phase in self.phases:
            if not 0 <= phase.axis < len(self.grid):
                raise ScheduleError(f"{phase.pattern.name} along axis {phase.axis}: grid {self.grid} has no such axis")
        if self.frame.is_coded and self.accumulation is not Accumulation.SAME:
            raise ScheduleError(f"{self}: wire types code float32 sums, so the accumulation must be 'same'")

    @property
    def collective(self) -> Collective:
        """The collective operation."""
        return self.frame.collective

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.frame.ranks

    @property
    def grid(self) -> tuple[int, ...]:
        """The sizes of the axes, fastest links first."""
        return self.frame.grid

    @property
    def order(self) -> tuple[int, ...]:
        """The rank at each grid position; ranks outside the grid are not listed."""
        return self.frame.order

    @property
    def root(self) -> int:
        """The rank from which a broadcast starts; 0 for other collectives."""
        return self.frame.root

    @property
    def shares(self) -> tuple[int, ...]:
        """The channels' relative weights."""
        return self.frame.shares

    @property
    def wires(self) -> tuple[Wire, ...]:
        """The wire type of each axis."""
        return self.frame.wires or (Wire.NONE,) * len(self.grid)

    def moves_of(self, rank: int) -> Moves:
        """Return the moves of `rank`, in order.

        Raises:
            ScheduleError: there is no such rank.
        """
        return expand(self.frame, self.phases, rank)

    def extents_of(self, rank: int, counts: Counts) -> Extents:
        """Return the memory of `rank`'s chunks for buffers of the given sizes, in elements.

        Args:
            rank: the rank.
            counts: elements of the whole buffer (all_reduce, broadcast), of every rank's block (reduce_scatter,
                all_gather), or `Splits` (all_to_all).

        Raises:
            ScheduleError: there is no such rank, or `counts` does not fit the collective.
        """
        moves = self.moves_of(rank)
        used = np.zeros(len(layout.layout_of(self.frame).slot) + 1, np.int64)
        writes = moves.dst != NOWHERE
        np.add.at(used, moves.dst[writes], 1)
        np.add.at(used, moves.dst[writes] + moves.span[writes], -1)
        return layout.extents_of(self.frame, rank, counts, np.cumsum(used)[:-1] > 0)

    def digest(self) -> bytes:
        """Return 16 bytes that identify the schedule.

        They are the same in all processes and versions.
        """
        return hashlib.blake2b(self._identity().encode(), digest_size=16).digest()

    def _identity(self) -> str:
        phases = ",".join(f"{phase.axis}:{phase.pattern.name}" for phase in self.phases)
        words = [self.collective.value, self.algorithm, phases, self.accumulation.name.lower(), str(self.root)]
        columns = [",".join(map(str, each)) for each in (self.grid, self.order, self.shares)]
        columns += [names_of(self.wires)] if self.frame.is_coded else []
        columns += [f"joined {self.frame.joined}"] if self.frame.joined else []
        return "|".join([*words, *columns])

    def describe(self) -> str:
        """Return several lines that describe the schedule phase by phase."""
        lines = [str(self)]
        if self.frame.joined:
            pairs = ", ".join(f"{rank} joins {partner}" for rank, partner in self.frame.joined)
            lines.append(f"  before the first axis, and after the last: {pairs}")
        for phase in self.phases:
            size = self.grid[phase.axis]
            wire = self.wires[phase.axis]
            coded = f", {wire.name.lower()} on the wire" if wire else ""
            where = f"on {self.frame.blocks // size} lines of {size} ranks{coded}"
            lines.append(f"  axis {phase.axis + 1}: {phase.pattern.name} {where}")
        return "\n".join(lines)

    def __str__(self) -> str:
        extras = [f"root {self.root}"] if self.collective is Collective.BROADCAST else []
        extras += [f"channels {':'.join(map(str, self.shares))}"] if len(self.shares) > 1 else []
        extras += [f"wires {names_of(self.wires)}"] if self.frame.is_coded else []
        extras += [f"{self.accumulation.name.lower()} accumulation"] if self.accumulation else []
        grid = " x ".join(map(str, self.grid))
        joined = f" and {len(self.frame.joined)} that join them" if self.frame.joined else ""
        return ", ".join([f"{self.algorithm} {self.collective.value} on {grid} ranks{joined}", *extras])
