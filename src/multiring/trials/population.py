"""Population based training: members train side by side, and bad ones go on from copies of good ones."""

from collections.abc import Callable, Mapping
from typing import Any

from multiring._runtime import Group
from multiring.errors import ArgumentError
from multiring.trials.copied_state import StateCopies
from multiring.trials.desk import TrialDesk
from multiring.trials.messages import ObjectiveOutcome, RoundValue, TrialAssignment
from multiring.trials.population_holder import PopulationArguments, PopulationHolder, PopulationPlan, population_of
from multiring.trials.results import PopulationResult
from multiring.trials.running import RunStart, StudyRun, begin_together, told_by_first
from multiring.trials.trial import number_in


class PopulationMember:
    """A member of a population, as its objective sees it.

    `number` counts members from 0, and `params` has the value of each parameter, which `exchange` changes. `rounds` is
    the number of rounds, and `ranks` has the numbers that the member's ranks have outside the objective. `group` is the
    group of its ranks.
    """

    def __init__(self, number: int, params: dict[str, Any], ranks: tuple[int, ...], group: Group) -> None:
        self.number, self.params, self.ranks, self.group = number, params, ranks, group
        self.rounds = 0
        self._round = 0
        self._serial = 0
        self._desk: TrialDesk | None = None
        self._copies: StateCopies | None = None

    def join(self, desk: TrialDesk, serial: int, copies: StateCopies, rounds: int) -> None:
        """Take part in a population; `run_population` calls it."""
        self._desk, self._serial, self._copies, self.rounds = desk, serial, copies, rounds

    def exchange(self, value: float, state: Mapping[str, Any]) -> bool:
        """End a round: report its value, and perhaps go on from a copy of a better member's state.

        Every rank of the member calls it, `rounds` times. The call waits until all members have ended the round. If
        this one is among the worst, the state of one of the best is copied into `state`, and `params` changes: set the
        learning rate and what else depends on it anew. Each rank copies from the rank of the same place in the other
        member, so each may have a part of the state of its own. After the last round nothing is copied.

        Args:
            value: what the round has reached, such as the loss on validation data. That of the first rank counts.
            state: by name, objects with `state_dict` and `load_state_dict`, as models and optimizers of torch have
                them; or NumPy arrays, which are overwritten. The same names and shapes in all members.

        Returns:
            Whether the state was copied from another member.

        Raises:
            ArgumentError: `value` is no number, or `state` has other objects.
            TrialStoppedError: the member was told to end.
            MultiringError: the other member's state did not come. This member fails with the reason.
        """
        if self._desk is None or self._copies is None:
            raise ArgumentError("exchange: want the member of a running population")
        found = number_in(value)
        if found is None:
            raise ArgumentError(f"exchange(value={value!r}): want a number")
        if self._round >= self.rounds:
            raise ArgumentError(
                f"exchange: this is call {self._round + 1}, and the population has {self.rounds} rounds"
            )
        self._copies.check(state)
        self._desk.tell(RoundValue(serial=self._serial, round=self._round, value=found))
        decision = self._desk.decision(self._serial, self._round)
        self._round += 1
        place = self.group.rank
        self._copies.send(state, [ranks[place] for ranks in decision.sends_to])
        if decision.receives_from is None:
            return False
        source = decision.receives_from[place]
        self._copies.receive(state, source, f"member {decision.source} (rank {source})")
        self.params = dict(decision.params)
        return True


def run_population(  # noqa: PLR0913 -- all but two by name
    objective: Callable[[PopulationMember], Any],
    space: Any,
    *,
    rounds: int,
    ranks_per_member: int = 1,
    direction: str = "minimize",
    sampler: Any = None,
    seed: int = 0,
    quantile: float = 0.25,
    resample: float = 0.25,
) -> PopulationResult:
    """Train a population on all ranks of the job, and return what it has found.

    Every rank calls it. The ranks are cut into members of `ranks_per_member` ranks. Each calls `objective`, which
    trains `rounds` rounds and calls `member.exchange` after each. Model and optimizer states go from member to member
    over the job's own connections; nothing is written to files. With the same arguments, every run makes the same
    choices as long as the trainings give the same values.

    A member that raises an error, or ends before its last round, is left out, and the others go on. They may then copy
    its earlier states no more.

    Args:
        objective: called with a PopulationMember.
        space: as for `run`; the first parameters are drawn from it, and later ones stay in it.
        rounds: the number of rounds of each member.
        ranks_per_member: a divisor of the number of ranks. There are at least two members.
        direction: "minimize" or "maximize".
        sampler: a sampler of Optuna that draws the first parameters; by default a random one with `seed`.
        seed: of all choices.
        quantile: the share of members that copy others after each round: above 0, and at most 0.5.
        resample: the probability that a changed parameter is drawn anew. Otherwise numbers are multiplied by 0.8 or
            1.25, and choices stay.

    Raises:
        ArgumentError: on every rank: an argument of rank 0 is wrong; those of the other ranks do not count.
        ImportError: on every rank: Optuna, or a package that the sampler needs, is not installed on rank 0's host.
        PeerLostError: a rank died or left, which ends the population, also in a job with --min-ranks.
        StateError: the sampler raised an error, or the call is inside a trial.
    """
    wanted = PopulationArguments(
        space=space,
        rounds=rounds,
        ranks_per_member=ranks_per_member,
        direction=direction,
        sampler=sampler,
        seed=seed,
        quantile=quantile,
        resample=resample,
    )
    start, plan = begin_together(objective, "run_population", lambda hosts: population_of(wanted, hosts))
    # Only rank 0's arguments count: a member whose ranks had other numbers of rounds would wait without end.
    rounds = told_by_first(start.group, None if plan is None else plan.rounds)
    found: PopulationResult = _PopulationRun(start, rounds, plan).result()
    return found


class _PopulationRun(StudyRun):
    """One call of `run_population` on this rank."""

    def __init__(self, start: RunStart, rounds: int, plan: PopulationPlan | None) -> None:
        super().__init__(start)
        self._rounds = rounds
        self._copies = StateCopies(start.group)
        if plan is not None:
            self._holder = PopulationHolder(plan, self._messages)

    def _trial(self, told: TrialAssignment, group: Group) -> PopulationMember:
        member = PopulationMember(told.number, dict(told.params), told.ranks, group)
        member.join(self._desk, told.serial, self._copies, self._rounds)
        return member

    def _ended(self, trial: PopulationMember, serial: int, value: Any) -> ObjectiveOutcome:
        del trial, value  # the last round has told it
        self._copies.finish()
        return ObjectiveOutcome(serial=serial, state="complete")
