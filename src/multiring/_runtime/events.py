"""Events: the times of every operation and every blocked call, in one format."""

from dataclasses import dataclass

# The complete list of operation names. The native core stores a name's index in each event.
NAMES = (
    *("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier", "send", "recv"),
    *("subgroup", "counts", "measures", "agreement"),
)

_KINDS = ("operation", "wait", "rail")  # in the order of the native core's numbers

# An operation may need up to three steps: an attempt with assumed sizes, a count of the sizes, and the transfer. Each
# step has its own sequence number. Every operation reserves this many numbers: then ranks that called different
# operations still use the same numbers afterwards.
STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An operation, a thread's wait for an operation, or the loss of a rail.

    Times are in seconds of this host's monotonic clock. `agreed_s` is the time at which all ranks of the group had
    arrived; it is None for a wait, and for an operation to which not all ranks came. `size_bytes` is the size of the
    caller's whole buffer. An "agreement" is a small reduction by which the ranks decide how an operation of the program
    runs, or when. If an engine carries an operation, its event ends when the engine may start, not when the data have
    moved. For a lost rail, `name` identifies the rail, `peer` is the rank at its other end, and
    `start_s` is the time at which this rank stopped using the rail.
    """

    kind: str  # "operation", "wait" or "rail"
    name: str
    group: int
    operation: int  # the operation's number in its group, counted from 1
    rank: int
    start_s: float
    agreed_s: float | None
    end_s: float
    size_bytes: int
    peer: int | None = None


def event_of(raw: tuple[int, int, int, int, int, int, int, int], rank: int) -> Event:
    """Convert one row of the native recorder into an Event."""
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
