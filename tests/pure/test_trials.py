"""Trials without ranks: spaces, the choice of ranks, outcomes, and the writer of a storage."""

import dataclasses
import inspect
import logging
import math
import re
import sqlite3
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

from multiring._cli.trials import why_none
from multiring._runtime.group.generation_end import GenerationEnd
from multiring.errors import ArgumentError
from multiring.trials import NoTrialError, TrialStoppedError, plan
from multiring.trials.command.study import run_command_study
from multiring.trials.desk import TrialDesk
from multiring.trials.holder import StudyHolder, chosen_ranks
from multiring.trials.messages import StudyEnd, TrialAssignment
from multiring.trials.plan import PACKAGES, StudyArguments, plan_of
from multiring.trials.population_holder import PopulationArguments, population_of
from multiring.trials.results import StudyResult, TrialResult
from multiring.trials.space import distributions_of, space_text
from multiring.trials.storage import INTERRUPTED, REASON, StorageWriter, opened, study_in_memory
from multiring.trials.trial import TrialPruned, checked_report, outcome_of_error, outcome_of_value

SPACE = {"rate": {"low": 1e-5, "high": 0.1, "log": True}, "layers": {"low": 1, "high": 4}, "batch": [16, 32]}
WAIT_S = 60.0


def test_forms_of_a_space() -> None:
    found = distributions_of({**SPACE, "decay": optuna.distributions.FloatDistribution(0.0, 1.0, step=0.25)})
    assert found == {
        "rate": optuna.distributions.FloatDistribution(1e-5, 0.1, log=True),
        "layers": optuna.distributions.IntDistribution(1, 4),
        "batch": optuna.distributions.CategoricalDistribution([16, 32]),
        "decay": optuna.distributions.FloatDistribution(0.0, 1.0, step=0.25),
    }
    assert space_text(found) == space_text(dict(reversed(found.items())))
    numbers = {
        "rate": {"low": np.float32(0.5), "high": np.float64(1.0)},
        "batch": list(np.arange(2)),
        "kind": ("a", "b"),
    }
    assert distributions_of(numbers) == {
        "rate": optuna.distributions.FloatDistribution(0.5, 1.0),
        "batch": optuna.distributions.CategoricalDistribution([0, 1]),
        "kind": optuna.distributions.CategoricalDistribution(["a", "b"]),
    }
    plan = plan_of(arguments(trials=np.int64(3), ranks_per_trial=np.int64(2)), [(0, 1, 2, 3)])
    assert (plan.trials, plan.ranks_per_trial) == (3, 2)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ([], "at least one|one or more"),
        ([1, 1], "a choice twice, 1"),
        ([True, 1], "it has True and 1, which are equal"),
        ([None, 0, "0", False], "it has 0 and False, which are equal"),
        (optuna.distributions.CategoricalDistribution([2, 2.0]), "it has 2 and 2.0, which are equal"),
        ([0.5, math.nan, math.nan], "a choice twice"),
        ([[1], [2]], "list"),
        ((0.0, 1.0), r"want \[0.0, 1.0\], or {'low': 0.0, 'high': 1.0}"),
        ([(1, 2)], "tuple"),
        ("relu", "type str"),
        (3, "type int"),
        ({"low": 2.0, "high": 1.0}, "low <= high"),
        ({"low": 2, "high": 1}, "low <= high"),
        ({"low": 0.0, "high": 1.0, "log": True}, "low > 0"),
        ({"low": 0, "high": 8, "log": True}, "low >= 1"),
        ({"low": 1.0, "high": 2.0, "log": True, "step": 0.5}, "step"),
        ({"low": 0, "high": 10, "step": 3}, "do not reach 10: the last is 9"),
        ({"low": 0.0, "high": 1.0, "step": -0.5}, "step > 0"),
        ({"low": 0.0}, "high=None: want a finite number"),
        ({"low": 0.0, "high": math.inf}, "high=inf"),
        ({"low": 0, "high": 10**400}, "too large"),
        ({"low": 0.0, "high": "1"}, "high='1'"),
        ({"low": True, "high": 3}, "low=True"),
        ({"low": 0.0, "high": 1.0, "log": "yes"}, "log='yes'"),
        ({"low": 0.0, "high": 1.0, "logs": True}, "it has logs"),
    ],
)
def test_a_space_that_contradicts_itself(wanted: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^space: parameter 'depth' is .*({told}).*; want a list of choices"):
        distributions_of({"depth": wanted})


@pytest.mark.parametrize("space", [{}, [], None, "rate", {1: [1, 2]}, {"": [1, 2]}])
def test_what_is_no_space(space: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^space.*want"):
        distributions_of(space)


def test_ranks_of_a_trial_are_on_as_few_hosts_as_possible() -> None:
    hosts = [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert chosen_ranks({0, 1, 2, 5, 6}, 2, hosts) == (5, 6)  # the larger gap stays for a larger trial
    assert chosen_ranks({0, 1, 2, 5, 6}, 3, hosts) == (0, 1, 2)
    assert chosen_ranks({0, 1, 2, 5, 6}, 4, hosts) == (0, 1, 2, 5)
    assert chosen_ranks({3, 7}, 2, hosts) == (3, 7)


@pytest.mark.parametrize(
    ("value", "state", "told"),
    [
        (1, "complete", ""),
        (np.float32(0.5), "complete", ""),
        (math.inf, "complete", ""),
        (None, "failed", "returned None; want a number"),
        ("1.5", "failed", "returned '1.5'"),
        (True, "failed", "returned True"),
        ([1.0, 2.0], "failed", r"returned \[1.0, 2.0\]"),
        (np.zeros(2), "failed", "returned array"),
        (np.array([[0.25]]), "complete", ""),
        (np.True_, "failed", "returned np.True_"),
        (np.array("1.5"), "failed", "returned array('1.5'"),
        (np.complex64(1), "failed", "returned np.complex64"),
        (np.timedelta64(3, "s"), "failed", "returned np.timedelta64"),
        (10**400, "failed", "returned 1000"),
        ({"loss": 1.0}, "failed", "returned {'loss': 1.0}"),
        (math.nan, "failed", "returned NaN"),
    ],
)
def test_what_an_objective_returns(value: Any, state: str, told: str) -> None:
    found = outcome_of_value(3, value)
    assert (found.serial, found.state) == (3, state)
    assert (found.value is not None) == (state == "complete")
    assert told.replace("\\", "") in found.reason


class OutOfMemoryError(RuntimeError):
    """As torch's."""


def test_what_an_objective_raises() -> None:
    assert outcome_of_error(1, TrialPruned()).state == outcome_of_error(1, optuna.TrialPruned()).state == "pruned"
    assert outcome_of_error(1, ValueError("no such layer")).reason == "ValueError: no such layer"
    for error in (MemoryError("1 GB"), OutOfMemoryError("1 GB"), RuntimeError("RESOURCE_EXHAUSTED: 1 GB")):
        assert outcome_of_error(1, error).reason.startswith("out of memory: ")
    assert not outcome_of_error(1, RuntimeError("1 GB")).reason.startswith("out of memory")


def trial(number: int, state: str, value: float | None) -> TrialResult:
    return TrialResult(
        number=number, params={}, state=state, value=value, reason="", ranks=(), began_s=0, ended_s=0, reports={}
    )


def test_the_best_trial() -> None:
    trials = (trial(0, "failed", None), trial(1, "complete", 2.0), trial(2, "complete", 1.0), trial(3, "pruned", 0.0))
    found = StudyResult(name="a", direction="minimize", trials=trials, unsaved=0)
    assert found.best.number == 2
    assert StudyResult(name="a", direction="maximize", trials=trials, unsaved=0).best.number == 1
    with pytest.raises(NoTrialError, match="none of 1 trials is complete"):
        _ = StudyResult(name="a", direction="minimize", trials=trials[:1], unsaved=0).best


def test_why_no_trial_is_complete() -> None:
    failed = dataclasses.replace(trial(1, "failed", None), reason="rank 0: ValueError: no such layer")
    assert why_none([trial(0, "pruned", 0.5), failed]) == "trial 1: rank 0: ValueError: no such layer"
    assert why_none([trial(0, "pruned", 0.5)]) == "trial 0: pruned"
    assert why_none([]) == "none ran"


def memory(storage: Any, name: str = "study", space: Any = SPACE, direction: Any = "minimize") -> Any:
    sampler = optuna.samplers.RandomSampler(seed=1)
    return study_in_memory(name, direction, distributions_of(space), sampler, None, opened(storage)[0])


def run_some(study: Any, writer: StorageWriter, trials: int) -> None:
    for _ in range(trials):
        found = study.ask(distributions_of(SPACE))
        writer.note(found.number)
        for step in range(3):
            found.report(found.params["rate"] * step, step)
            writer.note(found.number)
        found.set_user_attr("ranks", [0, 1])
        study.tell(found, found.params["rate"])
        writer.note(found.number)


def facts(study: Any) -> list[Any]:
    """Return what a storage must have of each trial."""
    return [
        (each.number, each.state, each.values, each.params, each.intermediate_values, each.user_attrs)
        for each in study.get_trials(deepcopy=False)
    ]


@pytest.mark.parametrize("file", ["study.db", "study.log"])
def test_a_storage_has_all_that_memory_has(tmp_path: Path, file: str) -> None:
    study, writer = memory(tmp_path / file)
    writer.start()
    run_some(study, writer, 6)
    study.ask(distributions_of(SPACE))
    writer.note(6)
    assert writer.close(WAIT_S) == 0
    kept = optuna.load_study(study_name="study", storage=opened(tmp_path / file)[0])
    assert facts(kept) == facts(study)
    # The study goes on: the trial that was running failed as interrupted, and its parameters are the next.
    again, writer = memory(tmp_path / file)
    assert facts(again)[:6] == facts(study)[:6]
    assert again.trials[6].state.name == "FAIL"
    assert again.trials[6].user_attrs[REASON] == INTERRUPTED
    assert again.ask(distributions_of(SPACE)).params == study.trials[6].params
    writer.note(7)
    writer.start()
    run_some(again, writer, 1)
    assert writer.close(WAIT_S) == 0
    assert facts(optuna.load_study(study_name="study", storage=opened(tmp_path / file)[0])) == facts(again)


def test_a_resumed_sampler_does_not_repeat_itself(tmp_path: Path) -> None:
    study, writer = memory(tmp_path / "study.log")
    writer.start()
    run_some(study, writer, 5)
    assert writer.close(WAIT_S) == 0
    again, _ = memory(tmp_path / "study.log")
    first = {each.params["rate"] for each in study.trials}
    assert not first & {again.ask(distributions_of(SPACE)).params["rate"] for _ in range(5)}


def test_a_locked_storage_delays_nothing_and_gets_all_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"sqlite:///{tmp_path}/study.db?timeout=0.1"
    study, writer = memory(url)
    writer.start()
    with sqlite3.connect(tmp_path / "study.db", isolation_level=None) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        with caplog.at_level(logging.WARNING, "multiring"):
            run_some(study, writer, 5)
            until_s = time.monotonic() + WAIT_S
            while "takes nothing" not in caplog.text and time.monotonic() < until_s:
                time.sleep(0.01)
            time.sleep(1.0)  # it tries again meanwhile
        lock.execute("ROLLBACK")
    assert writer.close(WAIT_S) == 0
    told = [each.message.partition(" (")[0] for each in caplog.records if each.name == "multiring"]
    assert told == ["trials: the storage takes nothing", "trials: the storage takes the study's trials again"]
    assert "database is locked" in caplog.text
    assert facts(optuna.load_study(study_name="study", storage=url)) == facts(study)


class SlowWriting:
    """Stands for the thread and the clock: the storage takes a value each 40 s."""

    def __init__(self, writer: StorageWriter, values: int) -> None:
        self._writer, self._left, self._now_s = writer, values, 0.0

    def is_alive(self) -> bool:
        return self._left > 0

    def join(self, seconds: float) -> None:
        del seconds
        self._left -= 1
        self._now_s += 40.0
        vars(self._writer)["_taken"] += 1

    def monotonic(self) -> float:
        return self._now_s


@pytest.mark.parametrize("is_patient", [False, True])
def test_the_end_waits_as_long_as_a_slow_storage_takes_values(
    tmp_path: Path,
    is_patient: bool,  # noqa: FBT001 -- a parameter of the test
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, writer = memory(tmp_path / "study.log")
    slow = SlowWriting(writer, 1000)
    vars(writer)["_thread"] = slow
    monkeypatch.setattr("multiring.trials.storage.time", slow)
    writer.close(60.0, is_patient=is_patient)
    assert slow.is_alive() is not is_patient
    assert caplog.text.count("the storage is slow; 0 trials are still being written to it") == 1


@pytest.mark.parametrize("file", ["study.db", "study.log"])
def test_a_storage_whose_file_is_removed(tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    study, writer = memory(tmp_path / file)
    writer.watch(tmp_path / file)
    writer.start()
    run_some(study, writer, 1)
    assert wait_until_saved(writer)
    (tmp_path / file).unlink()
    run_some(study, writer, 2)
    assert writer.close(1.0) == 2
    assert caplog.text.count("the storage takes nothing") == 1
    assert not (tmp_path / file).exists()


def test_a_study_of_another_space_or_direction(tmp_path: Path) -> None:
    memory(tmp_path / "study.log")
    with pytest.raises(ArgumentError, match=r"^space: the storage has a study 'study' with the space .*another name"):
        memory(tmp_path / "study.log", space={**SPACE, "batch": [16, 64]})
    with pytest.raises(ArgumentError, match=r"^direction='maximize': the storage has a study 'study'.*minimize"):
        memory(tmp_path / "study.log", direction="maximize")
    memory(tmp_path / "study.log", name="another", space={"x": [1, 2]})
    # A study that Optuna has made says nothing about its space but its trials.
    url = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(storage=url, study_name="study")
    study.tell(study.ask({"x": optuna.distributions.FloatDistribution(0.0, 1.0)}), 1.0)
    with pytest.raises(ArgumentError, match="trial 0 with parameter 'x'"):
        memory(url)
    assert len(memory(url, space={"x": {"low": 0.0, "high": 2.0}})[0].trials) == 1


@pytest.mark.parametrize(
    ("storage", "told"),
    [
        (3, "storage=3: want a URL"),
        ("/no/such/folder/study.db", "cannot be opened"),
        ("nonsense://user:password@host/study", "nonsense://user:...@host/study"),
        ("nonsense://user:pass@password@host/study", "nonsense://user:...@host/study"),
    ],
)
def test_a_storage_that_cannot_be_opened(storage: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told) as raised:
        opened(storage)
    assert "password" not in str(raised.value)


@pytest.mark.parametrize("content", [b"my notes", b"rate = 3\nkind = 5\n", b"[1, 2]\n", b"3\n", bytes(range(256)) * 20])
def test_a_file_that_is_no_journal_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "study.log"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"study.log': it cannot be opened \(ValueError: the file is no journal"):
        memory(path)
    assert path.read_bytes() == content


def test_a_journal_goes_on_after_a_part_of_a_line(tmp_path: Path) -> None:
    """As a full disk leaves it, or a machine without power, after any byte: between writes, and between jobs."""
    path = tmp_path / "study.log"
    study, writer = memory(path)
    writer.start()
    run_some(study, writer, 1)
    assert wait_until_saved(writer)
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines()[-1][:-5])  # a write that failed
    run_some(study, writer, 2)
    assert writer.close(WAIT_S) == 0
    assert facts(optuna.load_study(study_name="study", storage=opened(path)[0])) == facts(study)
    whole = path.read_bytes()
    ends = [end for end, byte in enumerate(whole, 1) if byte == ord("\n")]
    for size in (5, 20, ends[0] - 1, ends[1] + 3, ends[-2] + 1, len(whole) - 1):
        path.write_bytes(whole[:size])
        again, writer = memory(path)
        writer.start()
        run_some(again, writer, 1)
        assert writer.close(WAIT_S) == 0
        assert facts(optuna.load_study(study_name="study", storage=opened(path)[0])) == facts(again)


def failing_once(method: str) -> Any:
    """Return a storage whose method writes, and then fails once, as on a network that is lost before the answer."""
    plain = getattr(optuna.storages.InMemoryStorage, method)

    def write(self: Any, *words: Any, **named: Any) -> Any:
        found = plain(self, *words, **named)
        if not self.has_failed:
            self.has_failed = True
            raise ConnectionError("the connection was lost")
        return found

    return type("FailingStorage", (optuna.storages.InMemoryStorage,), {method: write, "has_failed": False})()


@pytest.mark.parametrize(
    "method",
    ["create_new_trial", "set_trial_intermediate_value", "set_trial_user_attr", "set_trial_state_values"],
)
def test_a_value_whose_write_failed_too_late_is_not_written_for_ever(method: str) -> None:
    """A trial that is complete takes no value again, so that it and all later ones would wait for ever."""
    storage = failing_once(method)
    study, writer = memory(storage)
    writer.start()
    found = study.ask(distributions_of(SPACE))
    writer.note(0)
    assert wait_until_saved(writer)
    found.report(1.0, 0)
    found.set_user_attr("ranks", [0])
    study.tell(found, 2.0)
    writer.note(0)
    run_some(study, writer, 2)
    assert writer.close(WAIT_S) == 0
    assert storage.has_failed
    assert facts(optuna.load_study(study_name="study", storage=storage)) == facts(study)


def wait_until_saved(writer: StorageWriter) -> bool:
    until_s = time.monotonic() + WAIT_S
    while writer.unsaved and time.monotonic() < until_s:
        time.sleep(0.01)
    return writer.unsaved == 0


def arguments(**changes: Any) -> StudyArguments:
    plain: dict[str, Any] = {
        "space": SPACE,
        "trials": 3,
        "ranks_per_trial": 1,
        "direction": "minimize",
        "sampler": None,
        "pruner": None,
        "storage": None,
        "name": "study",
        "time_limit_s": None,
    }
    return StudyArguments(**{**plain, **changes})


def test_a_storage_that_is_locked_or_of_another_kind_at_the_start(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db?timeout=0.1"
    plan_of(arguments(storage=url), [(0,)])
    with sqlite3.connect(tmp_path / "study.db", isolation_level=None) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ArgumentError, match=r"^storage .*study.db.*cannot be opened \(.*database is locked\)"):
            plan_of(arguments(storage=url), [(0,)])
        lock.execute("ROLLBACK")
    url = f"sqlite:///{tmp_path}/several.db"
    optuna.create_study(storage=url, study_name="study", directions=["minimize", "maximize"])
    with pytest.raises(ArgumentError, match=r"^storage .*several.db.*multi-objective"):
        plan_of(arguments(storage=url), [(0,)])


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (["a", 1], "'a'"),
        ([True, 2], "True"),
        ([0, 1], "0"),
        ([2.0, 4.0], "2.0"),
        ([8, 16], "8"),
        ({"low": 0, "high": 4}, "0"),
        ({"low": 5, "high": 8}, "5"),
        ({"low": 1.0, "high": 4.0}, "1.0"),
    ],
)
def test_parameters_that_cannot_be_numbers_of_ranks(values: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^ranks_per_trial='ranks': this parameter has the value {told}; want"):
        plan_of(arguments(space={"ranks": values}, ranks_per_trial="ranks"), [(0, 1), (2, 3)])
    assert plan_of(arguments(space={"ranks": [8, 1]}, ranks_per_trial="ranks"), [(0, 1)]).ranks_per_trial is None


@pytest.mark.parametrize("step", [-1, 1.0, True, None, "3", 2**53 + 1, 10**30])
def test_steps_that_no_storage_keeps(step: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^report\(step=.*: want a whole number, 0 to 2\*\*53"):
        checked_report(1.0, step)
    assert checked_report(np.float32(0.5), np.int64(2**53)) == (0.5, 2**53)


def test_a_package_that_a_sampler_needs_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna imports it at a later trial: its error came after the first trials, and with a traceback."""
    monkeypatch.setattr(plan, "_is_installed", lambda package: package not in {"cmaes", "scipy"})
    told = "sampler: Optuna's CmaEsSampler needs cmaes, which is not installed; pip install cmaes"
    sampler = optuna.samplers.CmaEsSampler(seed=1)
    with pytest.raises(ImportError, match=f"^{told}"):
        plan_of(arguments(sampler=sampler), [(0,)])
    wanted = PopulationArguments(
        space=SPACE,
        rounds=1,
        ranks_per_member=1,
        direction="minimize",
        sampler=sampler,
        seed=0,
        quantile=0.25,
        resample=0.25,
    )
    with pytest.raises(ImportError, match=f"^{told}"):
        population_of(wanted, [(0, 1)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the pruner is experimental
        pruner = optuna.pruners.WilcoxonPruner()
    with pytest.raises(ImportError, match=r"^pruner: Optuna's WilcoxonPruner needs scipy"):
        plan_of(arguments(pruner=pruner), [(0,)])
    file = tmp_path / "study.toml"
    file.write_text('trials = 3\nspace = {rate = [1, 2]}\nsampler = {kind = "CmaEsSampler", seed = 1}\n')
    with pytest.raises(ArgumentError, match=rf"study\.toml, line 3: {told}"):
        run_command_study(file, [sys.executable, "-c", "pass", "{rate}"], 1, print)


def test_the_packages_of_all_samplers_are_known() -> None:
    """A release of Optuna can have a sampler that imports another package at a later trial."""
    classes = [
        each
        for module, base in ((optuna.samplers, "BaseSampler"), (optuna.pruners, "BasePruner"))
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, getattr(module, base))
    ]
    assert {each.__name__ for each in classes} >= set(PACKAGES)
    for each in classes:
        source = Path(inspect.getfile(each)).read_text(encoding="utf-8")
        lazy = {name.partition(".")[0] for name in re.findall(r'_LazyImport\("([\w.]+)"\)', source)} - {"optuna"}
        assert lazy <= set(PACKAGES.get(each.__name__, ())), each


@pytest.mark.parametrize("storage", [False, True])
def test_a_study_ends_before_it_began(tmp_path: Path, storage: bool) -> None:  # noqa: FBT001 -- a parameter of the test
    """As if a rank was lost while the others met."""
    wanted = arguments(storage=tmp_path / "study.log" if storage else None)
    no_messages: Any = None  # it sends nothing
    found = StudyHolder(plan_of(wanted, [(0, 1)]), no_messages).close(is_interrupted=True)
    assert (found.trials, found.unsaved) == ((), 0)


def test_the_end_of_a_study_that_cannot_go_on_ends_a_trial_that_waits() -> None:
    desk = TrialDesk()
    desk.receive(0, TrialAssignment(serial=1, number=0, params={}, ranks=(0,)))
    assert isinstance(desk.next(), TrialAssignment)
    desk.begin(1, GenerationEnd(may_end=True))
    desk.receive(0, StudyEnd("the copies are lost"))
    with pytest.raises(TrialStoppedError, match="the study cannot go on: the copies are lost"):
        desk.answer(1, 1)
    desk.leave()
