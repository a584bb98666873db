"""Direct ring: direct along the first axis, within hosts, and rings along the other axes, between hosts.

The cost is the sum of the costs of the axes, which direct.py and ring.py state.

Source: Cho et al., "PowerAI DDL", 2017, arXiv 1708.02188 (the mix of algorithms by link).
"""

from multiring._collectives import direct, ring
from multiring._collectives.axes import over_axes, refuse_coded
from multiring._schedule import Accumulation, Frame, Schedule


def direct_ring(frame: Frame, accumulation: Accumulation) -> Schedule:
    """Return the schedule that is direct along the first axis, and a ring along every other axis.

    Raises:
        ScheduleError: `accumulation` is not SAME, or an axis other than the first has a lossy wire.
    """
    ring.refuse_wide(accumulation)
    refuse_coded("a ring", frame, range(1, len(frame.grid)))
    first = (direct.REDUCE_SCATTER, direct.ALL_GATHER)
    rings = [(ring.REDUCE_SCATTER, ring.ALL_GATHER) for _ in frame.grid[1:]]
    return over_axes("direct_ring", frame, accumulation, [first, *rings])
