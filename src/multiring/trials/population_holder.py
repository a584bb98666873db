"""The population, on rank 0: waits for the ends of rounds, and decides which members copy which others."""

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from multiring._arguments import require_number, require_whole
from multiring._limits.processes import start_thread
from multiring.errors import ArgumentError
from multiring.trials.breeding import BreedingRules, MemberChange, changes_after
from multiring.trials.copies import SendsMessages
from multiring.trials.holder import chosen_ranks, log_end
from multiring.trials.messages import (
    Message,
    ObjectiveOutcome,
    RankLoss,
    RoundDecision,
    RoundValue,
    StudyEnd,
    TrialAssignment,
    TrialStop,
)
from multiring.trials.plan import checked_direction, checked_sampler, imported_optuna
from multiring.trials.results import PopulationResult, RoundResult
from multiring.trials.space import distributions_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_log = logging.getLogger("multiring")
_END_S = 5.0  # how long an interrupted population waits for its thread


@dataclass(frozen=True, kw_only=True, slots=True)
class PopulationArguments:
    """The arguments of `run_population`, as they came; see there."""

    space: Any
    rounds: Any
    ranks_per_member: Any
    direction: Any
    sampler: Any
    seed: Any
    quantile: Any
    resample: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PopulationPlan:
    """What to run."""

    space: "Mapping[str, BaseDistribution]"
    first: Sequence[dict[str, Any]]  # the first parameters of each member
    ranks: Sequence[tuple[int, ...]]  # of each member
    rounds: int
    seed: int
    rules: BreedingRules


def population_of(wanted: PopulationArguments, hosts: Sequence[Sequence[int]]) -> PopulationPlan:
    """Check the arguments of `run_population`, and draw the first parameters.

    Args:
        wanted: the arguments.
        hosts: the ranks of each host.

    Raises:
        ArgumentError: an argument is wrong.
        ImportError: Optuna is not installed.
    """
    optuna = imported_optuna()
    size = sum(map(len, hosts))
    count = require_whole("ranks_per_member", wanted.ranks_per_member, 1)
    rounds = require_whole("rounds", wanted.rounds, 1)
    seed = require_whole("seed", wanted.seed, 0)
    if size % count or size // count < 2:
        raise ArgumentError(
            f"ranks_per_member={count}: {size} ranks make {size // count} members, and {size % count} ranks would "
            f"never work; want a divisor of {size} that makes at least two members"
        )
    checked_direction(wanted.direction)
    quantile = require_number("quantile", wanted.quantile, above=True, most=0.5)
    resample = require_number("resample", wanted.resample, most=1.0)
    checked_sampler(wanted.sampler)
    space = distributions_of(wanted.space)
    sampler = optuna.samplers.RandomSampler(seed=seed) if wanted.sampler is None else wanted.sampler
    study = optuna.create_study(sampler=sampler, direction=wanted.direction)
    free, ranks = {rank for each in hosts for rank in each}, []
    while free:
        ranks.append(chosen_ranks(free, count, hosts))
        free -= set(ranks[-1])
    return PopulationPlan(
        space=space,
        first=[dict(study.ask(space).params) for _ in ranks],
        ranks=sorted(ranks),
        rounds=rounds,
        seed=seed,
        rules=BreedingRules(
            is_minimized=wanted.direction == "minimize",
            quantile=quantile,
            resample=resample,
        ),
    )


@dataclass(slots=True)
class _KnownMember:
    """A member as rank 0 knows it."""

    number: int
    params: dict[str, Any]
    ranks: tuple[int, ...]
    rounds: int = 0  # how many it has ended
    arrived: dict[int, float] = field(default_factory=dict)  # by rank, the value of the round that it has ended
    outcomes: dict[int, ObjectiveOutcome] = field(default_factory=dict)  # by rank
    reason: str = ""  # why it failed

    @property
    def serial(self) -> int:
        """The number of its assignment."""
        return self.number + 1

    @property
    def is_over(self) -> bool:
        """Whether all its ranks have ended."""
        return len(self.outcomes) == len(self.ranks)

    @property
    def has_arrived(self) -> bool:
        """Whether all its ranks have ended the round."""
        return len(self.arrived) == len(self.ranks)


class PopulationHolder:
    """Runs a population on a thread of its own.

    Args:
        plan: what to run.
        messages: to and from all ranks.
    """

    def __init__(self, plan: PopulationPlan, messages: SendsMessages) -> None:
        self._plan, self._messages = plan, messages
        self._came: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._members = [
            _KnownMember(number, dict(params), ranks)
            for number, (params, ranks) in enumerate(zip(plan.first, plan.ranks, strict=True))
        ]
        self._rounds: list[RoundResult] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="multiring study", daemon=True)

    def start(self) -> None:
        """Start the population."""
        start_thread(self._thread, "rank 0 cannot start the thread that holds the population")

    def receive(self, sender: int, message: Message) -> None:
        """Take a message. The call does not block."""
        self._came.put((sender, message))

    def give_up(self) -> None:
        """End the population without a word. The call does not block."""
        self._is_over.set()
        self._came.put((0, None))

    def close(self, *, is_interrupted: bool) -> None:
        """End the population."""
        del is_interrupted
        self.give_up()
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    # ---- on the thread ----

    def _run(self) -> None:
        error = ""
        try:
            for each in self._members:
                told = TrialAssignment(serial=each.serial, number=each.number, params=each.params, ranks=each.ranks)
                for rank in each.ranks:
                    self._messages.send(rank, told)
            while not self._is_over.is_set() and not all(each.is_over for each in self._members):
                self._handle(*self._came.get())
        except Exception as found:  # noqa: BLE001 -- all ranks must hear of it
            log_end("trials: the population cannot go on", found)
            error = f"{type(found).__name__}: {found}"
        if self._is_over.is_set():
            return
        result = PopulationResult(
            direction="minimize" if self._plan.rules.is_minimized else "maximize",
            rounds=tuple(self._rounds),
            failures={each.number: each.reason for each in self._members if each.reason},
            members=len(self._members),
        )
        for rank in range(sum(len(each.ranks) for each in self._members)):
            self._messages.send(rank, StudyEnd(error, result))

    def _handle(self, sender: int, message: Message) -> None:
        if isinstance(message, RankLoss):
            self._is_over.set()  # each rank has heard of it itself
            return
        member = next((each for each in self._members if each.serial == getattr(message, "serial", -1)), None)
        if member is None or sender not in member.ranks:
            return
        if isinstance(message, RoundValue):
            member.arrived[sender] = message.value
        elif isinstance(message, ObjectiveOutcome):
            self._end_on(member, sender, message)
        live = [each for each in self._members if not each.reason and each.rounds < self._plan.rounds]
        if live and all(each.has_arrived for each in live):
            self._decide(live)

    def _end_on(self, member: _KnownMember, rank: int, outcome: ObjectiveOutcome) -> None:
        member.outcomes[rank] = outcome
        reason = f"rank {rank}: {outcome.reason}" if outcome.state == "failed" else ""
        if outcome.state == "complete" and member.rounds < self._plan.rounds:
            reason = f"rank {rank} ended after {member.rounds} of {self._plan.rounds} rounds"
        if outcome.state == "pruned":
            reason = f"rank {rank}: TrialPruned: a population prunes no members"
        if not reason or member.reason:
            return
        member.reason = reason
        _log.warning("trials: member %d failed: %s; the others go on", member.number, reason)
        for each in set(member.ranks) - set(member.outcomes):
            self._messages.send(each, TrialStop(serial=member.serial, why=reason))

    def _decide(self, live: Sequence[_KnownMember]) -> None:
        """Tell the members that go on how, after a round that all of them have ended."""
        plan, number = self._plan, live[0].rounds
        values = {each.number: each.arrived[each.ranks[0]] for each in live}
        changes: dict[int, MemberChange] = {}
        if number < plan.rounds - 1 and len(live) > 1:
            changes = changes_after(
                values,
                {each.number: each.params for each in live},
                plan.space,
                Random(f"{plan.seed} {number}"),  # noqa: S311 -- no secret
                plan.rules,
            )
        for each in live:
            change = changes.get(each.number)
            source = None if change is None else change.source
            value, params = values[each.number], dict(each.params)
            self._rounds.append(
                RoundResult(member=each.number, round=number, params=params, value=value, source=source)
            )
            decision = RoundDecision(
                serial=each.serial,
                round=number,
                sends_to=tuple(plan.ranks[to] for to, one in changes.items() if one.source == each.number),
                receives_from=None if source is None else plan.ranks[source],
                source=source,
                params=each.params if change is None else change.params,
            )
            each.rounds, each.arrived, each.params = number + 1, {}, decision.params
            for rank in each.ranks:
                self._messages.send(rank, decision)
