"""Events: what every operation and every blocked call took, in one format."""

from dataclasses import dataclass

# The closed list of names; an event carries its index through the native core.
NAMES = (
    *("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier", "send", "recv"),
    *("subgroup", "counts", "measures"),
)

_KINDS = ("operation", "wait", "rail")  # as the native core counts them

# An operation of several steps (assuming the sizes, or else finding them, and then moving the bytes) takes one sequence
# number for each. All operations have as many, so that ranks that called different ones are not out of step afterwards.
STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One operation, one stretch of a thread's time spent waiting for one, or the loss of a rail.

    Times are seconds of this host's monotonic clock. `agreed_s` is when every rank of the group had
    arrived (None for a wait, and where they never did); `size_bytes` is the user's whole buffer. Of a rail, `name` says
    which, `peer` the rank it led to; it was given up at `start_s`.
    """

    kind: str  # "operation", "wait" or "rail"
    name: str
    group: int
    operation: int  # its place among the group's; counts at 1
    rank: int
    start_s: float
    agreed_s: float | None
    end_s: float
    size_bytes: int
    peer: int | None = None


def event_of(raw: tuple[int, int, int, int, int, int, int, int], rank: int) -> Event:
    """Return the Event of one row of the native recorder."""
    kind, name, group, sequence, size_bytes, start_ns, agreed_ns, end_ns = raw
    is_rail = _KINDS[kind] == "rail"
    return Event(
        kind=_KINDS[kind],
        name=f"rail {name}" if is_rail else NAMES[name],
        group=group,
        operation=0 if is_rail else sequence // STEPS,
        rank=rank,
        start_s=start_ns * 1e-9,
        agreed_s=agreed_ns * 1e-9 if agreed_ns else None,
        end_s=end_ns * 1e-9,
        size_bytes=size_bytes,
        peer=sequence if is_rail else None,
    )
