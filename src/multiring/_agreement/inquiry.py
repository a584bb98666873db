"""Inquiries about missing ranks.

The answers are merged on their way up the tree, and the root draws conclusions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from multiring._agreement.messages import Answer, deadlock_row, missing_row
from multiring._agreement.pending import PendingRecord
from multiring._agreement.runs import Runs, add_run, add_runs, ranks_in, runs_of


@dataclass(frozen=True, slots=True)
class Own:
    """A rank's own answer to a question."""

    rank: int
    pending: Mapping[str, PendingRecord]
    joined: int  # the places (see `Book`) that have joined
    blocked: str | None
    waits: Sequence[str] = ()  # announced operations for which a thread waits, even if only for a short time


@dataclass(slots=True)
class Gathering:
    """The answers to one question that a rank has received."""

    question: int
    children: Sequence[range]
    answers: dict[int, Answer] = field(default_factory=dict)  # the answers by child
    decided: set[str] = field(default_factory=set)  # names of operations decided since the question was asked
    is_outdated: bool = False  # whether all ranks have joined since the question was asked

    def is_complete(self) -> bool:
        """Return whether every child has answered."""
        return len(self.answers) == len(self.children)

    def merged(self, own: Own) -> Answer:
        """Return the combined answer of the rank and its subtree.

        A child that has not answered is listed as silent.
        """
        found = Answer(names={}, blocked={}, held={}, unjoined=[], joined=own.joined & 1, silent=[])
        if not own.joined & 1:
            add_run(found.unjoined, own.rank, own.rank + 1)
        if own.blocked is not None:
            pending = own.pending.get(own.blocked)
            waits = found.blocked if pending is not None and pending.come & 1 else found.held
            waits[own.blocked] = [own.rank, own.rank + 1]
        for name in own.waits:
            found.waits[name] = [own.rank, own.rank + 1]
        for child in self.children:
            answer = self.answers.get(child.start)
            if answer is None:
                found.silent.append(child.start)
                continue
            add_runs(found.unjoined, answer.unjoined)
            found.joined += answer.joined
            found.silent += answer.silent
            kinds = (found.blocked, answer.blocked), (found.held, answer.held), (found.waits, answer.waits)
            for into, told in kinds:
                for name, runs in told.items():
                    add_runs(into.setdefault(name, []), runs)
        names = {name for answer in self.answers.values() for name in answer.names}
        for name in sorted(names | own.pending.keys()):
            pending = own.pending.get(name)
            if pending is None or not pending.is_told:
                found.names[name] = self._missing(name, own, pending.come if pending is not None else 0)
        return found

    def _missing(self, name: str, own: Own, come: int) -> Runs:
        """Return the ranks of the subtree that have not announced the operation."""
        come |= own.joined
        runs: Runs = []
        if not come & 1:
            add_run(runs, own.rank, own.rank + 1)
        for number, child in enumerate(self.children, 1):
            if come >> number & 1:
                continue
            answer = self.answers.get(child.start)
            if answer is None:
                add_run(runs, child.start, child.start + 1)
            else:
                # If no rank below the child has announced the operation, all unjoined ranks there are missing.
                add_runs(runs, answer.names.get(name, answer.unjoined))
        return runs

    def verdict(self, answer: Answer) -> list[list[object]]:
        """Return the decisions that follow from the whole group's answer.

        The decisions have the form in which they are sent.
        """
        names = {name: runs for name, runs in answer.names.items() if name not in self.decided}
        blocked = _by_rank(answer.blocked)
        sets = {tuple(runs): frozenset(ranks_in(runs)) for runs in names.values()}
        missing = {name: sets[tuple(runs)] for name, runs in names.items()}
        concerned = frozenset[int]().union(*sets.values())
        shown = {rank: name for rank, name in {**_by_rank(answer.held), **blocked}.items() if rank in concerned}
        unjoined = answer.unjoined if answer.joined else []
        rows = [missing_row(names, _by_name(shown), unjoined, sorted(answer.silent))]
        stuck = stuck_names(missing, blocked)
        if stuck:
            # The decision also lists waiting ranks that have not yet waited long enough to count as blocked.
            waits = _by_rank({name: runs for name, runs in answer.waits.items() if name in stuck})
            waiting = waits | {rank: name for rank, name in blocked.items() if name in stuck}
            rows.append(deadlock_row(_by_name(waiting), {name: runs for name, runs in names.items() if name in stuck}))
        return rows


def stuck_names(missing: Mapping[str, frozenset[int]], blocked: Mapping[int, str]) -> set[str]:
    """Return the operations that cannot complete.

    Each of them waits for a rank that is blocked on one of these operations. The ranks need not have answered at the
    same time. If `missing` has the operation on which a rank is blocked, the operation has not been decided since the
    rank's answer. So the rank is still blocked.

    Args:
        missing: by operation, the ranks that have not announced it.
        blocked: by rank, the announced operation on which the rank is blocked.
    """
    waits = {ranks: {blocked[rank] for rank in ranks & blocked.keys()} for ranks in set(missing.values())}
    stuck = set(missing)
    while True:
        free = {name for name in stuck if not waits[missing[name]] & stuck}
        if not free:
            return stuck
        stuck -= free


def _by_rank(runs_by_name: Mapping[str, Runs]) -> dict[int, str]:
    return {rank: name for name, runs in runs_by_name.items() for rank in ranks_in(runs)}


def _by_name(names: Mapping[int, str]) -> dict[str, Runs]:
    by_name: dict[str, list[int]] = {}
    for rank, name in sorted(names.items()):
        by_name.setdefault(name, []).append(rank)
    return {name: runs_of(ranks) for name, ranks in by_name.items()}
