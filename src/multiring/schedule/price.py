"""What a schedule costs: the only pricing there is.

The model is alpha-beta with one port per rank, direction and axis; docs/algorithms.md has its closed forms. A
message of b bytes occupies its sender's port for overhead + b / bandwidth, arrives latency later, and occupies its
receiver's port as long. A SEND costs its rank nothing else, a receive waits, and what a REDUCE or a local
COPY writes costs b / reduce bandwidth more.

On a grid without a root every rank does the same up to a turn of each axis, so what the peer at offset -d sends is
what the rank itself sends to offset +d: one rank's moves are enough.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from multiring.errors import ScheduleError
from multiring.schedule.expand import expand
from multiring.schedule.kinds import Collective, Kind
from multiring.schedule.model import Schedule
from multiring.schedule.moves import Move, Moves
from multiring.schedule.pattern import Phase
from multiring.topology import Link

# (rank, peer) -> (axis, queue of what rank sends, queue of what it takes)
Routing = Callable[[int, int], tuple[int, object, object]]


def price(schedule: Schedule, size_bytes: float, links: Sequence[Link]) -> float:
    """Return the seconds that `schedule` takes.

    Args:
        schedule: what to price; not its size, which it does not know.
        size_bytes: the whole buffer, the longer side: all ranks' blocks.
        links: one for every axis; several channels share it in proportion to their weights.

    Raises:
        ScheduleError: `links` does not have one link for every axis.
    """
    if len(links) != len(schedule.grid):
        raise ScheduleError(f"{len(links)} links for grid {schedule.grid}: want one for every axis")
    if schedule.collective is Collective.BROADCAST:
        # A rank goes on to the next axis as soon as it has the data; the last of each axis is the last of the next.
        return sum(
            _price_line(phase, schedule.grid[phase.axis], size_bytes, links[phase.axis]) for phase in schedule.phases
        )
    frame = replace(schedule.frame, shares=(1,))
    rank = schedule.order[0]
    offsets = _offsets_of(schedule, rank)

    def turn(_: int, peer: int) -> tuple[int, object, object]:
        axis, offset = offsets[peer]
        return axis, (axis, offset), (axis, schedule.grid[axis] - offset)

    return finish_time({rank: expand(frame, schedule.phases, rank)}, size_bytes / schedule.ranks, links, turn)


def _price_line(phase: Phase, ranks: int, size_bytes: float, link: Link) -> float:
    programs = {at: phase.pattern.program(ranks, at) for at in range(ranks)}
    return finish_time(programs, size_bytes, [link], lambda at, peer: (0, (at, peer), (peer, at)))


def _offsets_of(schedule: Schedule, rank: int) -> dict[int, tuple[int, int]]:
    """Return, for every peer on a line through `rank`, the axis and how far ahead the peer is."""
    found = {}
    for axis, at in enumerate(schedule.frame.coordinates_of(rank)):
        line = schedule.frame.line_of(rank, axis).tolist()
        found.update({peer: (axis, (q - at) % len(line)) for q, peer in enumerate(line) if q != at})
    return found


def finish_time(programs: Mapping[int, Moves], chunk_bytes: float, links: Sequence[Link], routing: Routing) -> float:
    """Return when the last of `programs` (rank: its moves) is done, all chunks being of one size.

    `routing` names the axis between a rank and a peer, and the two queues of messages between them.
    """
    clocks = {rank: _Clock(rank, links, routing) for rank in programs}
    arrivals: dict[object, deque[float]] = {}
    waiting = {rank: deque(moves.rows()) for rank, moves in programs.items()}
    ready = deque(programs)
    while ready:
        rank = ready.popleft()
        moves = waiting[rank]
        while moves and clocks[rank].execute(moves[0], moves[0].span * chunk_bytes, arrivals):
            ready.extend(peer for peer in moves[0].peers if peer in waiting and peer != rank)
            moves.popleft()
    return max(clock.now for clock in clocks.values())


class _Clock:
    """One rank's time, and when its ports are free again."""

    def __init__(self, rank: int, links: Sequence[Link], routing: Routing) -> None:
        self.rank = rank
        self.links = links
        self.routing = routing
        self.now = 0.0
        self.out_free = [0.0] * len(links)
        self.in_free = [0.0] * len(links)

    def execute(self, move: Move, size_bytes: float, arrivals: dict[object, deque[float]]) -> bool:
        """Account for `move`; return False, having done nothing, if its messages were not sent yet."""
        peers = [(peer, *self.routing(self.rank, peer)) for peer in move.peers if peer != self.rank]
        if move.kind is Kind.SEND:
            for _, axis, sent, _ in peers:
                link = self.links[axis]
                start = max(self.now, self.out_free[axis])
                self.out_free[axis] = start + link.overhead_s + size_bytes / link.bandwidth_bytes_per_s
                arrivals.setdefault(sent, deque()).append(self.out_free[axis] + link.latency_s)
            return True
        if not all(arrivals.get(taken) for *_, taken in peers):
            return False
        for arrival, axis in sorted((arrivals[taken].popleft(), axis) for _, axis, _, taken in peers):
            link = self.links[axis]
            busy = self.in_free[axis] + link.overhead_s + size_bytes / link.bandwidth_bytes_per_s
            self.in_free[axis] = max(arrival, busy)
            self.now = max(self.now, self.in_free[axis])
        if move.kind is Kind.REDUCE or not peers:
            self.now += size_bytes / self.links[peers[0][1] if peers else 0].reduce_bytes_per_s
        return True
