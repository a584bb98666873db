"""`multiring trials run`: a study whose trials are jobs of their own."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multiring._launch.allocations import default_ranks
from multiring._launch.commands import check_can_run
from multiring._launch.signals import StopSignals
from multiring._runtime.engines.nvml import visible_gpus
from multiring._settings import inherited_environment
from multiring.errors import ArgumentError, StateError
from multiring.trials.command.jobs import JobPlan, StudyJobs, run_together
from multiring.trials.command.study_file import JudgeTable, StudyFile, read_study_file
from multiring.trials.command.trial_job import JobPatterns, TrialJob
from multiring.trials.command.words import command_line
from multiring.trials.holder import StudyHolder
from multiring.trials.messages import Message
from multiring.trials.plan import StudyPlan, plan_of
from multiring.trials.results import StudyResult, TrialResult
from multiring.trials.storage import COMMAND, JUDGED, LINES


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedTrial:
    """The best trial, trained again with other seeds."""

    number: int
    values: Mapping[int, float]  # by seed
    problems: Mapping[int, str]  # why a seed has no value
    is_earlier: bool  # whether an earlier run of the command has judged it

    def told(self, found: float) -> str:
        """Return both figures: that of the study, and that of the new runs."""
        parts = [f"seed {seed}: {value:.6g}" for seed, value in self.values.items()]
        parts += [f"seed {seed} has none: {problem}" for seed, problem in self.problems.items()]
        earlier = ", by an earlier run of this command" if self.is_earlier else ""
        mean = f"mean {statistics.fmean(self.values.values()):.6g}" if self.values else "none"
        return f"found in the study: {found:.6g}; trained again and judged{earlier}: {mean} ({'; '.join(parts)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandStudy:
    """What a study of a command has found."""

    result: StudyResult
    signal: int  # the signal that has ended it early, or 0
    best: TrialResult | None
    best_command: str  # as a user would run it
    judged: JudgedTrial | None  # None: the study has no table [judge], or was ended by a signal


def run_command_study(
    path: Path, command: Sequence[str], ranks: int | None, say: Callable[[str], None]
) -> CommandStudy:
    """Run the study in the file `path`; the main thread calls it.

    Args:
        path: the study's file.
        command: the words of a trial's program, with parameters in braces.
        ranks: how many ranks may run at a time; None takes the file's number, or that of `multiring run`.
        say: shows a line to the user.

    Raises:
        ArgumentError: the file, or an argument in it, is wrong. The text names the line.
        CommandError: the program does not exist or cannot be executed.
        ImportError: Optuna is not installed.
        StateError: the sampler or the pruner raised an error.
    """
    file = read_study_file(path, command)
    environment = inherited_environment()
    check_can_run("multiring trials run", command, environment)
    gpus = visible_gpus(environment)
    slots = ranks or file.ranks or default_ranks(gpus)[0]
    plan = _plan(file, slots)
    if file.log_dir is not None:
        try:
            file.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise file.error(("log_dir",), f"{str(file.log_dir)!r}: it cannot be made: {error.strerror}") from None
    job_plan = JobPlan(
        words=(*command, *file.words),
        slots=slots,
        devices=_devices(gpus, environment.get("CUDA_VISIBLE_DEVICES"), slots),
        grace_s=file.grace_s,
        log_dir=file.log_dir,
        patterns=JobPatterns(report=file.report, result=file.result),
    )
    if plan.writer is not None:
        _compare(plan, job_plan, say)
        plan.writer.keep(COMMAND, list(job_plan.words))
        plan.writer.keep(LINES, _texts(job_plan.patterns))
    return _Command(file, plan, job_plan, say).result()


def _compare(plan: StudyPlan, jobs: JobPlan, say: Callable[[str], None]) -> None:
    """Say if the earlier trials of a study ran another command, or their values were found in other lines."""
    for name, what, now in (
        (COMMAND, "ran another command", list(jobs.words)),
        (LINES, "reported by other lines", _texts(jobs.patterns)),
    ):
        before = plan.study.user_attrs.get(name)
        if before is not None and before != now:
            say(
                f"earlier trials of the study {plan.study.study_name!r} {what}: {before}, now {now}. Their values "
                "count beside the new ones; if they cannot be compared, give the study another name"
            )


def _texts(patterns: JobPatterns) -> list[str]:
    """Return the lines of reports and of the result, as the study's file has them; "" for none."""
    return ["" if each is None else each.text for each in (patterns.report, patterns.result)]


def _plan(file: StudyFile, slots: int) -> StudyPlan:
    try:
        arguments = file.arguments()
        return plan_of(arguments, [range(slots)])
    except ArgumentError as error:
        raise (error if str(error).startswith(str(file.path)) else file.wrong(error)) from None
    except ImportError as error:
        if not str(error).startswith(("sampler:", "pruner:")):
            raise
        raise file.wrong(error) from None


def _devices(gpus: int, given: str | None, slots: int) -> tuple[str, ...] | None:
    """Return the GPU of each rank that may run at a time; None if there are too few, and all trials see all of them."""
    if gpus < slots:
        return None
    names = [each.strip() for each in given.split(",")] if given else [str(number) for number in range(gpus)]
    return tuple(names[:slots]) if len(names) >= slots else None


class _Command:
    """One run of the command."""

    def __init__(self, file: StudyFile, plan: StudyPlan, jobs: JobPlan, say: Callable[[str], None]) -> None:
        self._file, self._plan, self._jobs, self._say = file, plan, jobs, say

    def result(self) -> CommandStudy:
        """Run the trials, and judge the best one."""
        held: list[StudyHolder] = []

        def answer(rank: int, message: Message) -> None:
            held[0].receive(rank, message)

        jobs = StudyJobs(self._jobs, answer, self._say)
        held.append(StudyHolder(self._plan, jobs, self._say))
        end = None
        try:
            held[0].start()
            end = jobs.run()
        finally:
            found = held[0].close(is_interrupted=end is None)
            jobs.close()
        if end is not None and end.error:
            raise StateError(f"multiring trials: the study cannot go on: {end.error}")
        complete = [each for each in found.trials if each.state == "complete"]
        best = found.best if complete else None
        judged, number = None, jobs.signal
        if best is not None and self._file.judge is not None and not number:
            judged, number = self._judged(best, self._file.judge)
        return CommandStudy(
            result=found,
            signal=number,
            best=best,
            best_command="" if best is None else self._command_line(best),
            judged=judged,
        )

    def _command_line(self, best: TrialResult) -> str:
        return command_line(self._jobs.words, best.params, best.number, self._count(best))

    def _count(self, trial: TrialResult) -> int:
        return int(self._plan.ranks_of(dict(trial.params)))

    def _judged(self, best: TrialResult, table: JudgeTable) -> tuple[JudgedTrial | None, int]:
        """Train the best trial again with the seeds of the file; return its figures, or the signal that has ended it.

        A study judges a trial once: a later run of the command returns the same figures.
        """
        kept = self._plan.study.user_attrs.get(JUDGED)
        lines = _texts(self._judging_patterns(table))
        words = [*self._jobs.words, *table.words]
        key = {"trial": best.number, "seeds": list(table.seeds), "words": words, "lines": lines}
        if kept is not None and all(kept.get(name) == value for name, value in key.items()):
            values = dict(zip(table.seeds, kept["values"], strict=True))
            return JudgedTrial(number=best.number, values=values, problems={}, is_earlier=True), 0
        self._say(f"training trial {best.number} again with seeds {', '.join(map(str, table.seeds))}")
        jobs = self._judging_jobs(best, table)
        count = self._count(best)
        at_once = max(1, self._jobs.slots // count)
        with StopSignals() as signals:
            seeds = list(jobs)
            for first in range(0, len(seeds), at_once):
                run_together([jobs[seed] for seed in seeds[first : first + at_once]], self._file.time_limit_s, signals)
                if signals.have_asked_for_end:
                    return None, next(iter(signals.take()), 0)
        for seed, job in jobs.items():
            if job.log_problem:
                self._say(f"seed {seed}: {job.log_problem}")
        values = {seed: value for seed, job in jobs.items() if (value := job.value()) is not None}
        problems = {seed: job.problem for seed, job in jobs.items() if job.problem}
        if self._plan.writer is not None and not problems:
            self._plan.writer.keep(JUDGED, {**key, "values": [values[seed] for seed in table.seeds]})
        return JudgedTrial(number=best.number, values=values, problems=problems, is_earlier=False), 0

    def _judging_patterns(self, table: JudgeTable) -> JobPatterns:
        return JobPatterns(report=self._file.report, result=table.result or self._file.result)

    def _judging_jobs(self, best: TrialResult, table: JudgeTable) -> dict[int, TrialJob]:
        count = self._count(best)
        plan = replace(
            self._jobs,
            words=(*self._jobs.words, *table.words),
            patterns=self._judging_patterns(table),
        )
        groups = max(1, plan.slots // count)
        jobs = {}
        for index, seed in enumerate(table.seeds):
            first = index % groups * count
            values: dict[str, Any] = {**best.params, "trial": best.number, "seed": seed}
            command = plan.command(values, range(first, first + count), f"judged-{seed}.log")
            jobs[seed] = TrialJob(command, plan.patterns, _forget)
        return jobs


def _forget(_step: int, _value: float) -> None:
    """Take a report of a trial that is trained again: nobody prunes it."""
