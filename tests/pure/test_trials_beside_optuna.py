"""Random studies, whose ranks are played: the parameters, prunes and states are those of Optuna alone."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from multiring.trials.holder import StudyHolder
from multiring.trials.messages import (
    ObjectiveOutcome,
    PruneAnswer,
    PruneQuestion,
    StudyEnd,
    TrialAssignment,
    TrialReport,
    TrialStop,
)
from multiring.trials.plan import StudyArguments, plan_of
from multiring.trials.results import StudyResult

pytestmark = [
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, when pruners compare reports of NaN
]
SIZE = 4  # ranks
NAME = "random study"  # Hyperband chooses a trial's bracket by it
SAMPLERS: dict[str, Callable[[int], Any]] = {
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "TPE": lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=4),
    "TPE of all": lambda seed: optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=4, multivariate=True, group=True, constant_liar=True
    ),
    "Halton": lambda seed: optuna.samplers.QMCSampler(seed=seed, qmc_type="halton", scramble=True),
    "genes": lambda seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=4),
    "fixed": lambda seed: optuna.samplers.PartialFixedSampler(
        {"ranks": 2}, optuna.samplers.TPESampler(seed=seed, n_startup_trials=4)
    ),
}
PRUNERS: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1),
    lambda: optuna.pruners.PercentilePruner(40.0, n_startup_trials=2, interval_steps=2),
    lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
    lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=6, reduction_factor=2),
    lambda: optuna.pruners.ThresholdPruner(upper=2.5),
    lambda: optuna.pruners.PatientPruner(optuna.pruners.MedianPruner(n_startup_trials=2), patience=1),
)


@dataclass
class Space:
    """A random space as `run` takes it, and how a program of Optuna asks for it."""

    wanted: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, Any] = field(default_factory=dict)  # by name, a function of Optuna's Trial

    def add(self, name: str, chance: Random) -> None:
        """Add a random parameter."""
        kind = chance.choice(
            ["float", "float log", "float step", "int", "int log", "int step", "choices", "one", "own"]
        )
        low, span = chance.choice([-3, 0, 1, 7]), chance.choice([1, 4, 30])
        wanted: Any
        options: dict[str, Any] = {}
        if kind == "choices":
            wanted = chance.choice([["a", "b", "c"], [16, 32, 64.5], [True, False], [None, "relu"], [1, "1", 1.5]])
            self.calls[name] = lambda trial: trial.suggest_categorical(name, wanted)
        elif kind == "own":
            wanted = optuna.distributions.FloatDistribution(float(low), float(low + span))
            self.calls[name] = lambda trial: trial.suggest_float(name, float(low), float(low + span))
        elif kind.startswith("int"):
            low = max(low, 1) if kind == "int log" else low
            if kind != "int":
                options = {"log": True} if kind == "int log" else {"step": 1 if span == 1 else 2}
            wanted = {"low": low, "high": low + span, **options}
            self.calls[name] = lambda trial: trial.suggest_int(name, low, low + span, **options)
        else:
            least, most = (1e-6, 0.1 * span) if kind == "float log" else (low / 2 - 0.25, low / 2 - 0.25 + span)
            most = least if kind == "one" else most
            if kind in ("float log", "float step"):
                options = {"log": True} if kind == "float log" else {"step": 0.25}
            wanted = {"low": least, "high": most, **options}
            self.calls[name] = lambda trial: trial.suggest_float(name, least, most, **options)
        self.wanted[name] = wanted


def random_space(chance: Random, choices: list[int]) -> Space:
    space = Space()
    for number in range(chance.randint(1, 5)):
        space.add(f"p{number}", chance)
    space.wanted["ranks"] = choices
    space.calls["ranks"] = lambda trial: trial.suggest_categorical("ranks", choices)
    return space


def loss_of(params: dict[str, Any]) -> float:
    return sum(float(each) if isinstance(each, int | float) else len(str(each)) for each in params.values()) / 10


@dataclass
class Step:
    """What one rank does next in a trial."""

    kind: str  # "report", "ask", "end"
    rank: int = 0
    step: int = 0
    value: float = 0.0
    state: str = ""


def script_of(number: int, params: dict[str, Any], ranks: int, seed: int) -> Iterator[Step]:
    """Return what a trial would do if nobody pruned or stopped it; both sides of a comparison use it."""
    chance = Random(1000 * seed + number)  # noqa: S311 -- no secret
    pace = chance.choice([1, 1, 1, 2])
    for step in range(0, pace * chance.randint(0, 6), pace):
        value = chance.choice([loss_of(params) + 1 / (step + 1)] * 8 + [math.nan, math.inf])
        yield Step("report", step=step, value=value)
        if chance.random() < 0.8:
            yield Step("ask", step=step)
    failing = chance.randrange(ranks) if chance.random() < 0.15 else None
    order = chance.sample(range(ranks), ranks)
    if failing is not None:  # the rank that fails is the first to end; the others are told
        order.remove(failing)
        order.insert(0, failing)
    for rank in order:
        yield Step("end", rank=rank, state="failed" if rank == failing else "complete", value=loss_of(params))


@dataclass
class Played:
    """A trial that runs on played ranks."""

    told: TrialAssignment
    rest: deque[Step]
    questions: int = 0
    is_stopped: bool = False


class PlayedRanks:
    """Stands for all ranks of a study, and for the queue from which its holder takes what they say.

    A random trial goes on whenever the holder waits. `log` has all that has happened, in the holder's order.
    """

    def __init__(self, seed: int, heeds: float) -> None:
        self._chance, self._seed, self._heeds = Random(seed), seed, heeds  # noqa: S311 -- no secret
        self._running: dict[int, Played] = {}
        self._asked: Played | None = None
        self._answer: bool | None = None
        self.log: list[tuple[Any, ...]] = []
        self.result: Any = None
        self.error = ""

    def send(self, to: int, message: Any) -> None:
        if isinstance(message, TrialAssignment) and to == message.ranks[0]:
            script = script_of(message.number, message.params, len(message.ranks), self._seed)
            self._running[message.serial] = Played(message, deque(script))
            self.log.append(("begin", message.number))
        elif isinstance(message, PruneAnswer):
            self._answer = message.prunes
        elif isinstance(message, TrialStop):
            self._running[message.serial].is_stopped = True
        elif isinstance(message, StudyEnd):
            self.result, self.error = message.result, message.error

    def put(self, item: Any) -> None:
        raise AssertionError(f"nobody else sends {item}")

    def get(self, timeout: float) -> tuple[int, Any]:
        """Return the next message of a random trial."""
        del timeout
        if self._asked is not None:
            self._heed(self._asked)
        serial = self._chance.choice(sorted(self._running))
        trial = self._running[serial]
        step = trial.rest.popleft()
        number, first = trial.told.number, trial.told.ranks[0]
        if step.kind == "report":
            self.log.append(("report", number, step.step, step.value))
            return first, TrialReport(serial=serial, step=step.step, value=step.value)
        if step.kind == "ask":
            trial.questions += 1
            self._asked = trial
            return first, PruneQuestion(serial=serial, question=trial.questions, step=step.step)
        if not trial.rest:
            del self._running[serial]
            self.log.append(("end", number, step.state if not trial.is_stopped else "failed", step.value))
        state = "stopped" if trial.is_stopped and step.state != "failed" else step.state
        value = step.value if state == "complete" else None
        return trial.told.ranks[step.rank], ObjectiveOutcome(serial=serial, state=state, value=value, reason="made up")

    def _heed(self, trial: Played) -> None:
        """Note the answer to the last question. Most programs end once they are pruned, on all ranks."""
        assert self._answer is not None
        prunes, self._answer, self._asked = self._answer, None, None
        self.log.append(("ask", trial.told.number, prunes))
        if prunes and self._chance.random() < self._heeds:
            ranks = len(trial.told.ranks)
            trial.rest = deque(
                Step("end", rank=rank, state="pruned") for rank in self._chance.sample(range(ranks), ranks)
            )


def played(space: Space, sampler: Any, pruner: Any, trials: int, ranks: Any, seed: int) -> tuple[PlayedRanks, Any]:
    """Run a study on played ranks; return them, and the study."""
    plan = plan_of(
        StudyArguments(
            space=space.wanted,
            trials=trials,
            ranks_per_trial=ranks,
            direction="minimize" if seed % 2 else "maximize",
            sampler=sampler,
            pruner=pruner,
            storage=None,
            name=NAME,
            time_limit_s=None,
        ),
        [range(SIZE)],
    )
    found = PlayedRanks(seed, heeds=0.8)
    holder = StudyHolder(plan, found)
    vars(holder)["_came"] = found
    holder.start()
    vars(holder)["_thread"].join(240.0)
    assert not vars(holder)["_thread"].is_alive()
    return found, plan.study


class Alone:
    """The same study with Optuna alone, which follows the log: trials begin as soon as enough ranks are free."""

    def __init__(self, space: Space, sampler: Any, pruner: Any, trials: int, ranks: Any, seed: int) -> None:
        self._space, self._left, self._ranks = space, trials, ranks
        self.study = optuna.create_study(
            sampler=sampler,
            pruner=optuna.pruners.NopPruner() if pruner is None else pruner,
            study_name=NAME,
            direction="minimize" if seed % 2 else "maximize",
        )
        self._free, self._waiting = SIZE, None  # type: tuple[int, Any]
        self._trials: dict[int, Any] = {}
        self.begun: list[int] = []

    def count_of(self, trial: Any) -> int:
        return int(trial.params["ranks"]) if self._ranks == "ranks" else int(self._ranks)

    def assign(self) -> None:
        least = 1 if self._ranks == "ranks" else self._ranks
        while True:
            if self._waiting is None:
                if self._left == 0 or self._free < least:
                    return
                self._left -= 1
                trial = self.study.ask()
                for call in self._space.calls.values():
                    call(trial)
                if self.count_of(trial) > SIZE:
                    self.study.tell(trial, state=TrialState.FAIL)
                    continue
                self._waiting = trial
            if self._free < self.count_of(self._waiting):
                return
            self._free -= self.count_of(self._waiting)
            self._trials[self._waiting.number] = self._waiting
            self.begun.append(self._waiting.number)
            self._waiting = None

    def follow(self, log: list[tuple[Any, ...]]) -> list[bool]:
        """Do what has happened; return what the pruner said."""
        answers = []
        self.assign()
        for what, number, *rest in log:
            trial = self._trials[number]
            if what == "report":
                trial.report(rest[1], rest[0])
            elif what == "ask":
                answers.append(trial.should_prune())
            elif what == "end":
                state, value = rest
                if state == "complete":
                    self.study.tell(trial, value)
                else:
                    self.study.tell(trial, state=TrialState.PRUNED if state == "pruned" else TrialState.FAIL)
                self._free += self.count_of(trial)
                self.assign()
        return answers


def facts(each: Any) -> Any:
    """Return what must be equal of a trial of Optuna; NaN is equal to NaN."""
    reports = {step: repr(value) for step, value in each.intermediate_values.items()}
    return each.number, repr(each.params), each.state.name, repr(each.values), reports, repr(each.system_attrs)


@pytest.mark.parametrize("name", SAMPLERS)
def test_random_studies_are_those_of_optuna_alone(name: str) -> None:
    seen: dict[str, int] = {}
    for seed in range(14):
        chance = Random(seed)  # noqa: S311 -- no secret
        ranks = chance.choice([1, 2, "ranks"])
        space = random_space(chance, [1, 2, 3, 9] if seed % 3 == 0 else [1, 2, 4])
        pruner = PRUNERS[seed % len(PRUNERS)]
        arguments = chance.randint(8, 22), ranks, seed
        ours, study = played(space, SAMPLERS[name](seed), pruner(), *arguments)
        assert ours.error == ""
        alone = Alone(space, SAMPLERS[name](seed), pruner(), *arguments)
        happened = [each for each in ours.log if each[0] != "begin"]
        answers = alone.follow(happened)
        assert alone.begun == [number for what, number, *_ in ours.log if what == "begin"]
        assert answers == [prunes for what, _, prunes, *_ in happened if what == "ask"]
        assert isinstance(ours.result, StudyResult)
        for each, trial in zip(ours.result.trials, alone.study.trials, strict=True):
            assert repr(each.params) == repr(trial.params), (seed, each, trial)
            seen[each.state] = seen.get(each.state, 0) + 1
        assert [facts(each) for each in study.trials] == [facts(each) for each in alone.study.trials], seed
    assert min(seen.get(state, 0) for state in ("complete", "pruned", "failed")) > 3, seen
