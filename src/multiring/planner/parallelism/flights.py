"""Time operations that are in flight together, as the buckets of gradients are.

All ranks start each operation as soon as its buffer is complete, and none waits for the one before. The operations
share ports and links. An operation that no other is beside takes what its plan takes.
"""

from collections.abc import Sequence

from multiring._schedule import MOST_MESSAGES, busy_s, ends_of, messages_of, timed_operation
from multiring.planner.plan import PlannedOperation


def ends_in_flight(operations: Sequence[PlannedOperation], starts_s: Sequence[float]) -> list[float]:
    """Return when each operation ends, in seconds on the clock of `starts_s`.

    Args:
        operations: the operations, the oldest first.
        starts_s: when all ranks start each of them; not descending.
    """
    ends: list[float] = []
    while len(ends) < len(operations):
        rest, rest_starts_s = operations[len(ends) :], starts_s[len(ends) :]
        count, found = 1, _together(rest[:1], rest_starts_s[:1])
        # Operations that start before the earlier ones have ended are timed together with them.
        while count < len(rest) and rest_starts_s[count] < max(found):
            count = _overlapping(rest, rest_starts_s, count + 1)
            found = _together(rest[:count], rest_starts_s[:count])
        ends += found
    return ends


def _overlapping(operations: Sequence[PlannedOperation], starts_s: Sequence[float], least: int) -> int:
    """Return how many of the first operations follow each other without a pause, by their bounds; at least `least`."""
    for count in range(least, len(operations)):
        if starts_s[count] >= max(_bounds(operations[:count], starts_s[:count])):
            return count
    return len(operations)


def _together(operations: Sequence[PlannedOperation], starts_s: Sequence[float]) -> list[float]:
    if len(operations) == 1:
        return [starts_s[0] + operations[0].seconds]
    if sum(each.segments * messages_of(each.schedule) for each in operations) > MOST_MESSAGES:
        return _bounds(operations, starts_s)
    return ends_of(
        [
            timed_operation(each.schedule, each.size_bytes, each.ways, each.segments, start_s + each.before_moves_s)
            for each, start_s in zip(operations, starts_s, strict=True)
        ]
    )


def _bounds(operations: Sequence[PlannedOperation], starts_s: Sequence[float]) -> list[float]:
    """Return nearly the same without events, by the resources that the operations occupy one after the other.

    An operation alone occupies a resource at the latest until it ends. If it finds the resource occupied, it ends as
    much later. If ranks join the grid, they wait for their partners, and operations are taken to follow each other.
    """
    is_joined = any(each.schedule.frame.joined for each in operations)
    until: dict[str, float] = {}
    ends = []
    for each, start_s in zip(operations, starts_s, strict=True):
        occupied = {"all": each.seconds} if is_joined else _occupied(each)
        for resource, seconds in occupied.items():
            until[resource] = max(until.get(resource, 0.0), start_s + each.seconds - seconds) + seconds
        ends.append(max(until[resource] for resource in occupied))
    return ends


def _occupied(operation: PlannedOperation) -> dict[str, float]:
    return busy_s(operation.schedule, operation.size_bytes, operation.ways, operation.segments)
