"""Assign lanes: rows of a picture in which nothing overlaps."""

import heapq
from collections.abc import Sequence


def lanes(stretches: Sequence[tuple[int, int]]) -> list[int]:
    """Return a lane for each (start, end). Stretches of one lane do not overlap, and the number of lanes is minimal.

    Each stretch gets the lowest lane that is free at its start. Stretches have to be sorted by start.
    """
    busy: list[tuple[int, int]] = []  # (end, lane)
    free: list[int] = []
    chosen: list[int] = []
    for start, end in stretches:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        chosen.append(lane)
    return chosen
