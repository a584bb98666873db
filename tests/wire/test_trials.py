"""Studies on several ranks: the same parameters as Optuna's, failures, prunes, deaths, and going on."""

import functools
import time
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import optuna
import pytest
from tests.support.faults import kill
from tests.support.ranks import Here, report_of, run_ranks

import multiring
from multiring import adapters, trials
from multiring.errors import ArgumentError, MismatchError, PeerLostError, StateError
from multiring.trials import desk, holder
from multiring.trials.space import distributions_of

SPACE = {"x": {"low": 0.0, "high": 1.0}, "layers": {"low": 1, "high": 4}, "kind": ["a", "b", "c"]}


def loss_of(params: dict[str, Any]) -> float:
    return float((params["x"] - 0.3) ** 2 + 0.1 * params["layers"] + (params["kind"] == "b"))


class Kept(optuna.samplers.TPESampler):
    """Keeps its study, and the order in which trials begin and end."""

    study: optuna.Study | None = None
    order: ClassVar[list[tuple[str, int]]] = []

    def before_trial(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        Kept.study = study
        Kept.order.append(("ask", trial.number))
        super().before_trial(study, trial)

    def after_trial(self, study: optuna.Study, trial: optuna.trial.FrozenTrial, *end: Any) -> None:
        Kept.order.append(("tell", trial.number))
        super().after_trial(study, trial, *end)


def ordered(here: Here) -> tuple[list[tuple[str, int]], list[Any]]:
    here.join()

    def objective(trial: trials.Trial) -> float:
        time.sleep(0.05 * Random(trial.number).random())  # noqa: S311 -- no secret
        return loss_of(trial.params)

    trials.run(objective, SPACE, trials=30, sampler=Kept(seed=7, n_startup_trials=5))
    return Kept.order, [] if Kept.study is None else [(each.params, each.value) for each in Kept.study.trials]


def test_parameters_are_those_of_optuna_alone() -> None:
    order, found = run_ranks(ordered, 3)[0]
    assert len(order) == 60
    assert [what for what, _ in order] != ["ask", "tell"] * 30  # trials ran side by side
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=7, n_startup_trials=5))
    asked: dict[int, Any] = {}
    for what, number in order:
        if what == "ask":
            asked[number] = study.ask(distributions_of(SPACE))
            assert asked[number].number == number
        else:
            study.tell(asked[number], loss_of(asked[number].params))
    assert [(each.params, each.value) for each in study.trials] == found


KINDS = [
    *("good", "raises first", "raises last", "none", "text", "nan", "memory", "exits", "computes", "sleeps"),
    *("pruned on one", "wrong report", "other step", "step twice", "nested", "shutdown", "none but first"),
]
REASONS = {
    "raises first": "ValueError: first",
    "raises last": "ValueError: last",
    "none": "the objective returned None; want a number",
    "text": "the objective returned '1.5'; want a number",
    "nan": "the objective returned NaN",
    "memory": "out of memory: MemoryError: no room",
    "exits": "SystemExit: 3",
    "computes": "its time limit of 2 s has passed",
    "sleeps": "its time limit of 2 s has passed",
    "wrong report": "ArgumentError: report(value='low'): want a number",
    "other step": "MismatchError: should_prune, call 1: rank ",
    "step twice": "ArgumentError: report(step=4): want a step >= 0 that was not reported before",
    "nested": "StateError: trials.run: this is a trial of another study",
}


def act(trial: trials.Trial) -> Any:  # noqa: C901 -- one case each
    kind, is_first = trial.params["kind"], multiring.rank() == 0
    if kind == "raises first" and is_first:
        raise ValueError("first")
    if kind == "raises last" and not is_first:
        raise ValueError("last")
    if kind == "memory":
        raise MemoryError("no room")
    if kind == "exits":
        raise SystemExit(3)
    while kind == "computes" and not is_first:
        sum(range(1000))
    if kind == "sleeps" and is_first:
        time.sleep(1000.0)
    if kind == "pruned on one" and is_first:
        raise trials.TrialPruned
    if kind == "wrong report":
        trial.report("low", 0)  # type: ignore[arg-type]
    if kind == "other step":
        trial.report(1.0, multiring.rank())
        trial.should_prune()
    for _ in range(2 * (kind == "step twice")):
        trial.report(1.0, 4)
    if kind == "nested":
        trials.run(act, SPACE, trials=1)
    if kind == "shutdown":
        multiring.shutdown()  # of a script that was written for a job of its own
    found = adapters.allreduce(np.full(3, float(multiring.rank())), name="gradient")
    assert multiring.size() == adapters.size() == len(trial.ranks) == trial.group.size == 2
    assert list(found) == [0.5] * 3
    assert adapters.global_process_set.ranks == [0, 1]
    assert adapters.local_rank() == trial.ranks[multiring.rank()] % adapters.local_size()  # for devices
    other = 1.0 if is_first else None  # of a program whose first rank evaluates the model
    return {"none": None, "text": "1.5", "nan": float("nan"), "none but first": other}.get(kind, 1.0)


def fail_in_every_way(here: Here) -> Any:
    """Run all kinds; `local_size` is 4 on one host, and 2 on two."""
    vars(desk)["_INTERRUPT_S"], vars(holder)["_PRUNED_S"] = 0.2, 0.2
    here.join()
    sampler = optuna.samplers.GridSampler({"kind": KINDS})
    found = trials.run(act, {"kind": KINDS}, trials=100, ranks_per_trial=2, sampler=sampler, time_limit_s=2.0)
    assert multiring.size() == adapters.size() == 4
    assert adapters.global_process_set.ranks == [0, 1, 2, 3]
    group = multiring.world()
    array = np.ones(3)
    group.all_reduce(array)
    assert list(array) == [4.0] * 3
    assert list(adapters.allreduce(np.ones(3), name="gradient")) == [1.0] * 3
    return found


@pytest.mark.parametrize("engine", ["shm", "shm+tcp"])
def test_failures_are_states_with_reasons(engine: str) -> None:
    results = run_ranks(fail_in_every_way, 4, engine=engine)
    assert results[1:] == results[:-1]
    found = {each.params["kind"]: each for each in results[0].trials}
    # The grid ends before the 100 trials. Optuna tries a few again while the last ones run.
    assert len(found) == len(KINDS) <= len(results[0].trials) <= len(KINDS) + 4
    for kind, each in found.items():
        state = "failed" if kind in REASONS else "pruned" if kind == "pruned on one" else "complete"
        assert (each.state, each.value) == (state, 1.0 if state == "complete" else None), each
        assert REASONS.get(kind, "") in each.reason, each
        assert len(each.ranks) == 2


class Coin(optuna.pruners.BasePruner):
    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        del study
        return is_pruned(trial.number, trial.last_step or 0)


def is_pruned(number: int, step: int) -> bool:
    return Random(100 * number + step).random() < 0.4  # noqa: S311 -- no secret


def prune(here: Here) -> tuple[Any, list[Any]]:
    here.join()
    seen: list[Any] = []

    def objective(trial: trials.Trial) -> float:
        step = -1
        try:
            for step in range(6):
                assert adapters.allreduce(np.full(9, float(step)), name="gradient")[0] == step
                trial.report(float(step), step)
                if trial.should_prune():
                    raise trials.TrialPruned
        finally:
            seen.append((trial.number, step, multiring.size()))
        return 0.0

    found = trials.run(objective, {"ranks": [1, 2, 3]}, trials=60, ranks_per_trial="ranks", pruner=Coin())
    return found, seen


def test_prunes_come_at_the_same_step_on_all_ranks_of_a_trial() -> None:
    results = run_ranks(prune, 5)
    found = results[0][0]
    seen = {number: set() for number in range(60)}  # type: dict[int, set[Any]]
    for _, some in results:
        for number, step, size in some:
            seen[number].add((step, size))
    assert len(found.trials) == 60
    for each in found.trials:
        prunes = [step for step in range(6) if is_pruned(each.number, step)]
        assert each.state == ("pruned" if prunes else "complete")
        assert seen[each.number] == {(min([*prunes, 5]), each.params["ranks"])}
        assert each.reports == {float(step): step for step in range(min([*prunes, 5]) + 1)}
    assert {len(each.ranks) for each in found.trials if each.state == "pruned"} == {1, 2, 3}


def go_on(here: Here, path: str, count: int, pauses: bool) -> Any:  # noqa: FBT001 -- by the rig
    here.join()

    def objective(trial: trials.Trial) -> float:
        for step in range(3):
            trial.report(trial.params["x"] + step, step)
        if pauses and trial.number >= 4:
            if here.rank == 1:
                here.reach("late")
            multiring.world().barrier()
            time.sleep(1000.0)
        return loss_of(trial.params)

    return trials.run(objective, SPACE, trials=count, ranks_per_trial=3, storage=path, name="long")


def test_a_killed_study_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "study.db")
    report = report_of(go_on, 3, path, 10, True, faults=[kill(1).at("late")])
    for rank in (0, 2):
        error = report.outcomes[rank].error
        assert isinstance(error, PeerLostError)
        assert "rank 1" in str(error)
    results = run_ranks(go_on, 3, path, 10, False)
    assert results[1:] == results[:-1]
    states = [each.state for each in results[0].trials]
    assert states == [*["complete"] * 4, "failed", *["complete"] * 6]
    assert results[0].trials[4].reason.startswith("interrupted: its job ended first")
    assert results[0].trials[5].params == results[0].trials[4].params
    assert results[0].unsaved == 0
    kept = optuna.load_study(study_name="long", storage=f"sqlite:///{path}")
    for each, trial in zip(results[0].trials, kept.trials, strict=True):
        assert (each.params, each.reports) == (trial.params, trial.intermediate_values)
        assert (each.value, each.number) == (trial.values[0] if trial.values else None, trial.number)
    # All trials are there: nothing is run again.
    assert [each.value for each in run_ranks(go_on, 3, path, 10, True)[0].trials] == [
        each.value for each in results[0].trials
    ]


class Broken(optuna.samplers.RandomSampler):
    def before_trial(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        del study
        if trial.number == 3:
            raise RuntimeError("the sampler is broken")


def refused(here: Here, path: str) -> list[str]:
    here.join()
    run = functools.partial(trials.run, lambda trial: loss_of(trial.params))
    texts = []
    several: list[dict[str, Any]] = [
        {"space": {"x": {"low": 1, "high": 0}}, "trials": 1},
        {"space": SPACE, "trials": 0},
        {"space": SPACE, "trials": 1, "ranks_per_trial": 3},
        {"space": SPACE, "trials": 1, "ranks_per_trial": 8},
        {"space": SPACE, "trials": 1, "ranks_per_trial": "ranks"},
        {"space": SPACE, "trials": 1, "direction": "down"},
        {"space": SPACE, "trials": 1, "time_limit_s": 0},
        {"space": SPACE, "trials": 1, "sampler": "tpe"},
        {"space": SPACE, "trials": 1, "pruner": 3},
        {"space": SPACE, "trials": 1, "name": ""},
        {"space": SPACE, "trials": 1, "storage": f"{path}/none/study.db"},
    ]
    for wrong in several:
        with pytest.raises(ArgumentError) as raised:
            run(wrong.pop("space"), **wrong)
        texts.append(str(raised.value))
    with pytest.raises(ArgumentError, match="objective=3: want a function"):
        trials.run(3, SPACE, trials=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError) as raised:
        trials.run(None if here.rank == 2 else lambda trial: loss_of(trial.params), SPACE, trials=1)  # type: ignore[arg-type]
    own = here.rank == 2
    assert str(raised.value).startswith("objective=None: want" if own else "objective: that of rank 2 is no function")
    with pytest.raises(StateError, match="the study cannot go on: RuntimeError: the sampler is broken"):
        trials.run(lambda trial: loss_of(trial.params), SPACE, trials=9, sampler=Broken(seed=1))
    found = trials.run(
        lambda trial: loss_of(trial.params), SPACE, trials=2, ranks_per_trial=lambda params: 9 * params["layers"]
    )
    texts += [each.reason for each in found.trials]
    return texts


def test_arguments_are_refused_on_every_rank(tmp_path: Path) -> None:
    results = run_ranks(refused, 4, str(tmp_path))
    assert results[1:] == results[:-1]
    assert results[0][2].startswith("ranks_per_trial=3: 4 ranks make 1 groups, and 1 of them would never work; want a")
    assert results[0][3] == "ranks_per_trial=8: want 1 to 4, the number of ranks, or a function"
    for text, told in zip(
        results[0],
        ["'x'", "trials=0", "divisor of 4", "=8", "'ranks'", "'down'", "=0", "BaseSampler", "BasePruner", "name=''"],
        strict=False,
    ):
        assert told in text
    assert "cannot be opened" in results[0][10]
    assert all("ranks_per_trial gave " in text and "1 to 4" in text for text in results[0][11:13])


def alone(here: Here) -> Any:
    here.join()
    return trials.run(lambda trial: loss_of(trial.params), SPACE, trials=5, direction="maximize")


def test_a_study_on_one_rank() -> None:
    (found,) = run_ranks(alone, 1)
    assert [each.ranks for each in found.trials] == [(0,)] * 5
    assert found.best.value == max(each.value for each in found.trials)


def shared_kib() -> int:
    """Return how much of the ranks' shared memory this process has in use."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef":
            is_ours = "memfd:multiring" in line
        elif is_ours and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


def leave_nothing(here: Here) -> tuple[list[int], list[bool]]:
    here.join()
    sizes: list[int] = []
    sums: list[bool] = []

    def objective(trial: trials.Trial) -> float:
        for step in range(3):  # several groups, whose slots the next trials use
            mine = np.full(40, float(trial.number + step + multiring.rank()))
            found = adapters.allreduce(mine, name=f"gradient {step}")
            sums.append(bool((found == np.mean(trial.number + step + np.arange(multiring.size()))).all()))
            array = np.full(3, float(trial.number))
            trial.group.all_reduce(array)
            sums.append(bool((array == trial.number * multiring.size()).all()))
        if trial.number % 7 == 3 and multiring.rank() == 0:
            raise ValueError("fails")
        sizes.append(shared_kib())
        return 0.0

    trials.run(objective, {"ranks": [2, 3]}, trials=300, ranks_per_trial="ranks")
    return sizes, sums


def test_trials_leave_no_shared_memory() -> None:
    for sizes, sums in run_ranks(leave_nothing, 3):
        assert all(sums)
        assert sizes[0] > 0
        # A trial without `recycle` leaves 24 KiB on two ranks, and more on three.
        assert max(sizes) - sizes[len(sizes) // 5] <= 256, sizes


def test_errors_of_a_trial_that_is_over() -> None:
    assert issubclass(trials.TrialStoppedError, PeerLostError)
    assert issubclass(MismatchError, ValueError)
