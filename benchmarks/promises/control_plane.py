"""Count the messages and steps of a group that agrees on the order of operations.

    python benchmarks/promises/control_plane.py [--ranks N,...] [--radix R] [--operations N] [--processes | --job]

All ranks announce the same operations, each in its own order. By default this process simulates the ranks, and all
messages of a step arrive together. With --processes, each rank is a process, and sockets connect neighbours in the
tree. With --job, they are the ranks of a job. Their orders differ first; then come rounds with one named all_reduce
each (control_plane_rank.py).

The counts are compared with a flat coordinator, as in Horovod 0.28.1 (common/controller.cc). There, rank 0 receives
from each other rank the operations that are ready, and tells each rank what to run. Here, each of these is one message.
For known names, Horovod's response cache replaces them by a bitwise all_reduce, which is not counted here.
"""

import argparse
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from multiring._agreement import AgreementOutcome, Decision, Member, Ready
from multiring._agreement.tree import place_of
from multiring._runtime.named.order_switch import RADIX

TIMEOUT_S = 300
ROUNDS = 10  # the number of rounds in a job
WIDTHS = (7, 6, 8, 8, 8, 11, 7, 7, 7, 9)
_LONGEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of one round for a rank, or the maximum over a group's ranks."""

    messages: int = 0
    most_sent: int = 0
    most_taken: int = 0
    steps: int = 0  # the length of the longest chain of messages
    longest_bytes: int = 0

    def beside(self, other: "Counted") -> "Counted":
        """Return the counts of two ranks combined."""
        return Counted(
            messages=self.messages + other.messages,
            most_sent=max(self.most_sent, other.most_sent),
            most_taken=max(self.most_taken, other.most_taken),
            steps=max(self.steps, other.steps),
            longest_bytes=max(self.longest_bytes, other.longest_bytes),
        )


def levels(ranks: int, radix: int) -> int:
    """Return ceil(log_radix ranks), computed in integers."""
    found = 0
    while radix**found < ranks:
        found += 1
    return found


class Rank:
    """A member of the agreement, with counts of its messages."""

    def __init__(self, rank: int, ranks: int, radix: int, operations: int) -> None:
        self.member = Member(rank, ranks, radix)
        self.decisions: list[Decision] = []
        self.counted = Counted()
        self._operations = operations

    def announce(self) -> list[tuple[int, bytes]]:
        """Announce all operations; each rank starts at a different operation.

        Returns:
            The messages to send, with their receivers.
        """
        turn = self.member.rank % self._operations
        names = self._names()
        announced = [(name, "allreduce of float32 (64, 3, 7, 7), average") for name in names[turn:] + names[:turn]]
        return self._count(self.member.announce_all(announced))

    def take(self, sender: int, step: int, message: bytes) -> list[tuple[int, bytes]]:
        """Handle a received message, which is number `step` of a chain of messages.

        Returns:
            The messages to send, with their receivers.
        """
        was = self.counted
        self.counted = replace(was, most_taken=was.most_taken + 1, steps=max(was.steps, step))
        return self._count(self.member.receive(sender, message))

    def is_done(self) -> bool:
        """Return whether all operations are decided, and check the decisions."""
        if len(self.decisions) < self._operations:
            return False
        decided = sorted(decision.name for decision in self.decisions if isinstance(decision, Ready))
        assert decided == sorted(self._names())
        return True

    def _names(self) -> list[str]:
        return [f"DistributedOptimizer.gradient.{number}" for number in range(self._operations)]

    def _count(self, outcome: AgreementOutcome) -> list[tuple[int, bytes]]:
        self.decisions += outcome.decisions
        was, sent = self.counted, len(outcome.messages)
        longest = max((len(message) for _, message in outcome.messages), default=0)
        self.counted = replace(
            was,
            messages=was.messages + sent,
            most_sent=was.most_sent + sent,
            longest_bytes=max(was.longest_bytes, longest),
        )
        return outcome.messages


def count(*, ranks: int, radix: int, operations: int) -> Counted:
    """Simulate ranks that announce all operations at once; check that they agree."""
    group = [Rank(rank, ranks, radix, operations) for rank in range(ranks)]
    under_way = [(rank, to, message) for rank, each in enumerate(group) for to, message in each.announce()]
    step = 0
    while under_way:
        step += 1
        arriving, under_way = under_way, []
        for sender, to, message in arriving:
            under_way += ((to, onward, sent) for onward, sent in group[to].take(sender, step, message))
    assert all(rank.is_done() and rank.decisions == group[0].decisions for rank in group)
    return total(rank.counted for rank in group)


def count_processes(*, ranks: int, radix: int, operations: int) -> Counted:
    """Run a group of processes that agree on the operations; check the agreement."""
    links: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
    for rank in range(1, ranks):
        parent = place_of(rank, ranks, radix).parent
        assert parent is not None
        links[rank][parent], links[parent][rank] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    sys.stdout.flush()
    for rank in range(ranks):
        if os.fork() == 0:
            _be(Rank(rank, ranks, radix, operations), links, write)
    os.close(write)
    for link in (link for row in links for link in row.values()):
        link.close()
    with os.fdopen(read, encoding="utf-8") as results:
        lines = [json.loads(line) for line in results]
    assert len(lines) == ranks, f"{ranks - len(lines)} of {ranks} ranks have failed or not ended"
    assert len({line.pop("decisions") for line in lines}) == 1
    for _ in range(ranks):
        os.wait()
    return total(Counted(**line) for line in lines)


def _be(rank: Rank, links: list[dict[int, socket.socket]], results: int) -> None:
    """Run one rank, and exit this process."""
    try:
        signal.alarm(TIMEOUT_S)
        mine = links[rank.member.rank]
        for link in (link for row in links for link in row.values() if row is not mine):
            link.close()
        sender_of = {link.fileno(): sender for sender, link in mine.items()}
        poll = select.poll()
        for number in sender_of:
            poll.register(number, select.POLLIN)
        _send(mine, rank, rank.announce())
        while not rank.is_done():
            for number, _ in poll.poll():
                sender = sender_of[number]
                step, message = mine[sender].recv(_LONGEST_BYTES).split(b" ", 1)
                _send(mine, rank, rank.take(sender, int(step), message))
        digest = hashlib.sha256(repr(rank.decisions).encode()).hexdigest()
        line = json.dumps({"decisions": digest, **asdict(rank.counted)}) + "\n"
        os.write(results, line.encode())  # shorter than PIPE_BUF, so the write is atomic
        os._exit(0)
    except BaseException:  # noqa: BLE001 -- a forked child must always exit here
        traceback.print_exc()
        os._exit(1)


def _send(links: dict[int, socket.socket], rank: Rank, messages: list[tuple[int, bytes]]) -> None:
    for to, message in messages:
        links[to].send(b"%d %s" % (rank.counted.steps + 1, message))


def count_job(*, ranks: int, radix: int, operations: int) -> Counted:
    """Run a job whose ranks agree on the operations and check the results."""
    assert radix == RADIX, f"the ranks of a job agree by a tree of radix {RADIX}, not {radix}"
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "counted"
        rank = [sys.executable, str(Path(__file__).with_name("control_plane_rank.py"))]
        command = [sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--", *rank]
        command += [str(counted), str(operations), str(ROUNDS)]
        subprocess.run(command, check=True)  # noqa: S603 -- our own
        return Counted(**json.loads(counted.read_text(encoding="utf-8")))


def total(counted: Iterable[Counted]) -> Counted:
    """Return the combined counts of all ranks."""
    found = Counted()
    for each in counted:
        found = found.beside(each)
    return found


def main() -> None:
    """Print a line for each number of ranks; fail if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="256,27360", help="numbers of ranks, separated by commas (%(default)s)")
    parser.add_argument("--radix", type=int, default=16, help="children of a rank (%(default)s)")
    parser.add_argument("--operations", type=int, default=4, help="operations in one round (%(default)s)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--processes", action="store_true", help="run each rank as a process")
    kinds.add_argument("--job", action="store_true", help="run the ranks as a job of multiring")
    args = parser.parse_args()
    columns = ("ranks", "radix", "sent", "limit", "taken", "flat", "steps", "limit", "flat", "longest")
    print(f"{'':13}{'messages of the busiest rank':^35}{'steps':^21}{'bytes':>9}")
    print("".join(f"{name:>{width}}" for name, width in zip(columns, WIDTHS, strict=True)))
    for ranks in map(int, args.ranks.split(",")):
        counting = count_job if args.job else count_processes if args.processes else count
        start = time.monotonic()
        counted = counting(ranks=ranks, radix=args.radix, operations=args.operations)
        limit, most_steps = args.radix + 1, 2 * levels(ranks, args.radix)
        assert counted.most_sent <= limit
        assert counted.most_taken <= limit
        assert counted.steps <= most_steps
        values = [ranks, args.radix, counted.most_sent, limit, counted.most_taken, 2 * (ranks - 1)]
        values += [counted.steps, most_steps, 2, counted.longest_bytes]
        print("".join(f"{value:>{width}}" for value, width in zip(values, WIDTHS, strict=True)), flush=True)
        kind = "processes" if args.processes or args.job else "simulated ranks, one after the other"
        print(f"{'':13}{time.monotonic() - start:.1f} s for {ranks} {kind}", file=sys.stderr)


if __name__ == "__main__":
    main()
