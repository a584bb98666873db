"""What it takes a group to agree on the order of operations: messages and steps of the tree, and of a flat coordinator.

    python benchmarks/control_plane.py [--ranks N,...] [--radix R] [--operations N]

All ranks are simulated in this process: they announce the same operations, each rank in an order of its own, and all
messages of a step arrive together. A flat coordinator is what Horovod 0.28.1 has (common/controller.cc): rank 0 hears
from each of the others what is ready there, and tells each what to do; here each such word is one message. Its
response cache replaces that, for names it knows, by a bitwise all_reduce, which this does not count.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from multiring.agreement import Decision, Member, Outcome, Ready


@dataclass(frozen=True, slots=True)
class Counted:
    """What one round of a group took."""

    messages: int
    most_sent: int  # messages, by one rank
    most_taken: int
    steps: int  # messages one after the other
    longest_bytes: int
    seconds: float  # of one processor: every rank's part, one after the other


def levels(ranks: int, radix: int) -> int:
    """Return ceil(log_radix ranks), in integers."""
    found = 0
    while radix**found < ranks:
        found += 1
    return found


def count(*, ranks: int, radix: int, operations: int) -> Counted:
    """Let a group agree on operations that all its ranks announce at once; check that it does."""
    members = [Member(rank, ranks, radix) for rank in range(ranks)]
    names = [f"DistributedOptimizer.gradient.{number}" for number in range(operations)]
    decisions: list[list[Decision]] = [[] for _ in members]
    sent, taken = Counter[int](), Counter[int]()
    steps = longest = 0

    def posted(rank: int, outcome: Outcome) -> Iterable[tuple[int, int, bytes]]:
        decisions[rank] += outcome.decisions
        return ((rank, to, message) for to, message in outcome.messages)

    start = time.process_time()
    under_way: list[tuple[int, int, bytes]] = []
    for member in members:
        turn = member.rank % operations
        announced = [(name, "allreduce of float32 (64, 3, 7, 7), average") for name in names[turn:] + names[:turn]]
        under_way += posted(member.rank, member.announce_all(announced))
    while under_way:
        steps += 1
        arriving, under_way = under_way, []
        for sender, to, message in arriving:
            sent[sender] += 1
            taken[to] += 1
            longest = max(longest, len(message))
            under_way += posted(to, members[to].receive(sender, message))
    seconds = time.process_time() - start
    assert sorted(decision.name for decision in decisions[0] if isinstance(decision, Ready)) == sorted(names)
    assert all(decided == decisions[0] for decided in decisions)
    return Counted(
        messages=sent.total(),
        most_sent=max(sent.values(), default=0),
        most_taken=max(taken.values(), default=0),
        steps=steps,
        longest_bytes=longest,
        seconds=seconds,
    )


def main() -> None:
    """Print a line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="256,27360", help="how many, several with commas (%(default)s)")
    parser.add_argument("--radix", type=int, default=16, help="children of a rank (%(default)s)")
    parser.add_argument("--operations", type=int, default=4, help="in one round (%(default)s)")
    args = parser.parse_args()
    columns = ("ranks", "radix", "sent", "limit", "taken", "flat", "steps", "limit", "flat", "longest", "us/message")
    print(f"{'':13}{'messages of the busiest rank':^35}{'steps':^21}")
    print("".join(f"{name:>{width}}" for name, width in zip(columns, WIDTHS, strict=True)))
    for ranks in map(int, args.ranks.split(",")):
        counted = count(ranks=ranks, radix=args.radix, operations=args.operations)
        values = (
            *(ranks, args.radix, counted.most_sent, args.radix + 1, counted.most_taken, 2 * (ranks - 1)),
            *(counted.steps, 2 * levels(ranks, args.radix), 2, counted.longest_bytes),
            f"{counted.seconds / max(counted.messages, 1) * 1e6:.1f}",
        )
        print("".join(f"{value:>{width}}" for value, width in zip(values, WIDTHS, strict=True)))


WIDTHS = (7, 6, 8, 8, 8, 11, 7, 7, 7, 9, 12)

if __name__ == "__main__":
    main()
