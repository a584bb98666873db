"""Compare libraries on one question: verify the results, time the libraries in turns, compute confidence intervals."""

import os
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from multiring._bench.cases import Question, size_text
from multiring._bench.job import JobCommand, Jobs, RankAnswer, answers
from multiring._bench.machine import OtherWorkMeter
from multiring._bench.statistics import Interval, median_interval, ratio_interval
from multiring._bench.workers.contract import Case, write_cases
from multiring._launch.cores import cores_of_cpus, usable_cpus
from multiring.errors import ArgumentError

OURS = "multiring"
BOUND = "bound"
_PROBE_CALLS = 10
_LEAST_CALLS = 10
_LEAST_WARMUP = 3
_MEMORY_SHARE = 0.7


def is_ours(library: str) -> bool:
    """Return whether `library` is multiring or one of its variants."""
    return library == OURS or library.startswith(f"{OURS}-")


class Library(Protocol):
    """A library that implements collectives, and the way to start its jobs."""

    @property
    def name(self) -> str:
        """The library's name on the command line and in records."""

    @property
    def engine(self) -> str:
        """The engine that carries the library's bytes."""

    def refusal(self, case: Case) -> str:
        """Return why the library cannot run `case`, or ""."""

    def buffers(self, asked: str) -> str:
        """Return the kind of memory that the library uses, "arena" or "ordinary".

        `asked` is the kind that the user requested for multiring.
        """

    def settings(self, case: Case, ranks: int) -> Mapping[str, str]:
        """Return the library's settings in `case`; all cases of a job have the same settings."""

    def start(self, case_file: Path, ranks: int) -> JobCommand:
        """Return how to start a job of the library's worker on the cases in `case_file`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How to time.

    The timed calls of a job take about `seconds`; their number is `calls` if given, or else at most `most_calls`. The
    warm-up calls before them take about `warm_s`.

    Raises:
        ArgumentError: a number is out of range.
    """

    buffers: str = "arena"
    alternations: int = 7
    seconds: float = 0.5
    calls: int | None = None
    most_calls: int = 5000
    warm_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ArgumentError(f"{self.seconds:g} seconds: want more than 0")
        if self.alternations < 1:
            raise ArgumentError(
                f"{self.alternations} alternations: want at least 1, and at least 6 for a 95 % interval"
            )
        if self.calls is not None and self.calls < 1:
            raise ArgumentError(f"{self.calls} calls: want at least 1")


@dataclass(slots=True)
class Timing:
    """The times of one library on one question.

    `seconds` has the slowest rank's median call of each alternation.
    """

    library: str
    engine: str
    buffers: str
    question: Question
    pool_bytes: int = 0
    not_offered: str = ""
    seconds: list[float] = field(default_factory=list)
    version: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    calls: int = _PROBE_CALLS
    warmup: int = _LEAST_WARMUP

    @property
    def median_s(self) -> float:
        """The median over alternations, in seconds."""
        return statistics.median(self.seconds)

    @property
    def interval(self) -> Interval:
        """The confidence interval of the median."""
        return median_interval(self.seconds)

    def case(self, out_dir: str) -> Case:
        """Return the work of a job: the library's ranks write their answers to `out_dir`."""
        question = self.question
        return Case(
            library=self.library,
            collective=question.collective,
            dtype=question.dtype,
            count=question.count,
            out_dir=out_dir,
            op=question.op,
            buffers=self.buffers,
            pool_bytes=self.pool_bytes,
            calls=self.calls,
            warmup=self.warmup,
            cores=cores_for(question.ranks) if question.hosts == 1 else (),
        )

    def take(self, given: Sequence[RankAnswer]) -> None:
        """Add the figure of one alternation from the ranks' answers, or the reason for a missing figure."""
        self.not_offered = next((answer.not_offered for answer in given if answer.not_offered), "")
        if not self.not_offered:
            self.seconds.append(max(statistics.median(answer.seconds) for answer in given))
            self.version, self.settings = given[0].version, given[0].settings

    def count_calls(self, manner: Manner) -> None:
        """Set the number of timed calls by the figure of the verifying job, and discard that figure."""
        if not self.seconds:
            return
        (probed_s,) = self.seconds
        self.seconds.clear()
        per_s = 1 / max(probed_s, 1e-9)
        fitting = min(max(int(manner.seconds * per_s), _LEAST_CALLS), manner.most_calls)
        self.calls = manner.calls or fitting
        self.warmup = max(int(manner.warm_s * per_s), _LEAST_WARMUP)


@dataclass(frozen=True, slots=True)
class Bound:
    """The upper bound of algbw: the rate of a library that never waits, and its formula."""

    bytes_per_s: float
    formula: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The times of all libraries on one question, multiring first.

    `bound` is None if it was not measured. `other_cores` is the average number of cores that other work took.
    """

    question: Question
    pool_bytes: int
    timings: tuple[Timing, ...]
    bound: Bound | None
    other_cores: float

    @property
    def ours(self) -> Timing:
        """Multiring's timing."""
        return self.timings[0]

    @property
    def best_peer(self) -> Timing | None:
        """The timing of the fastest other library."""
        offered = [timing for timing in self.timings if timing.seconds and not is_ours(timing.library)]
        return min(offered, key=lambda timing: timing.median_s) if offered else None

    def advantage_over(self, peer: Timing) -> Interval | None:
        """Return how many times faster multiring is than `peer`."""
        return ratio_interval(peer.seconds, self.ours.seconds) if peer.seconds and self.ours.seconds else None


class Bench:
    """Runs comparisons.

    `libraries` begins with multiring and may include the bound; `tell` gets progress messages.
    """

    def __init__(
        self, jobs: Jobs, libraries: Sequence[Library], manner: Manner, tell: Callable[[str], None] | None = None
    ) -> None:
        self._jobs = jobs
        self._libraries = tuple(libraries)
        self._manner = manner
        self._tell = tell or (lambda _: None)
        self._number = 0

    def compare(self, question: Question, pool_bytes: int = 0, bound: Bound | None = None) -> Comparison:
        """Return the times of all libraries on `question`.

        Args:
            question: the collective to time.
            pool_bytes: the total size of the buffers that each rank uses in turn; 0 for one buffer.
            bound: the bound, if it was measured elsewhere and is not one of the libraries.

        Raises:
            WrongResultError: a library's result differs from NumPy's.
            JobError: a job failed or hung.
            StoppedError: a signal came.
        """
        return self.compare_together([(question, pool_bytes)], bound)[0]

    def compare_together(
        self, asked: Sequence[tuple[Question, int]], bound: Bound | None = None
    ) -> tuple[Comparison, ...]:
        """Return the times of all libraries on each (question, pool_bytes), in as few jobs as possible.

        Starting sixteen ranks takes longer than timing them. All questions have the same numbers of ranks and hosts.

        Raises:
            The errors of `compare`.
        """
        meter = OtherWorkMeter()
        # The bound's worker verifies nothing, because the bound computes no result.
        rows = [[self._timing(library, question, pool) for question, pool in asked] for library in self._libraries]
        for library, timings in zip(self._libraries, rows, strict=True):
            self._tell(f"verifying {library.name}")
            self._run(library, timings)
            for timing in timings:
                timing.count_calls(self._manner)
        pairs = zip(self._libraries, rows, strict=True)
        running = [
            (library, timings) for library, timings in pairs if not all(timing.not_offered for timing in timings)
        ]
        for turn in range(self._manner.alternations):
            # Reverse every other turn, so that no library always runs after the same other library.
            for library, timings in running if turn % 2 == 0 else reversed(running):
                self._tell(f"alternation {turn + 1} of {self._manner.alternations}: {library.name}")
                self._run(library, timings)
        other_cores = meter.cores()
        return tuple(
            Comparison(
                question=question,
                pool_bytes=pool,
                timings=tuple(timing for timing in column if timing.library != BOUND),
                bound=_bound_of(question, column) or bound,
                other_cores=other_cores,
            )
            for (question, pool), column in zip(asked, zip(*rows, strict=True), strict=True)
        )

    def _timing(self, library: Library, question: Question, pool_bytes: int) -> Timing:
        """Return an empty timing, with the reason if the library cannot run the case."""
        buffers = library.buffers(self._manner.buffers)
        timing = Timing(library.name, library.engine, buffers, question, pool_bytes)
        timing.not_offered = library.refusal(timing.case(""))
        return timing

    def _run(self, library: Library, timings: Sequence[Timing]) -> None:
        """Add a figure to each of `timings`, or the reason for a missing figure; run one job per set of settings."""
        jobs: dict[tuple[tuple[str, str], ...], list[Timing]] = {}
        for timing in timings:
            if not timing.not_offered:
                given = library.settings(timing.case(""), timing.question.ranks)
                jobs.setdefault(tuple(sorted(given.items())), []).append(timing)
        for together in jobs.values():
            self._run_job(library, together)

    def _run_job(self, library: Library, timings: Sequence[Timing]) -> None:
        self._number += 1
        folder = self._jobs.folder / str(self._number)
        cases = []
        for number, timing in enumerate(timings):
            cases.append(timing.case(str(folder / str(number))))
            Path(cases[-1].out_dir).mkdir(parents=True)
        case_file = folder / "cases.json"
        write_cases(cases, case_file)
        question = timings[0].question
        sizes = ", ".join(dict.fromkeys(f"{timing.question.size_bytes}" for timing in timings))
        title = f"{library.name}, {question.collective} of {sizes} bytes"

        def so_far() -> list[list[RankAnswer]]:
            """Return the answers of every rank that has answered all cases."""
            by_case = [answers(Path(case.out_dir), question.ranks) for case in cases]
            complete = min(len(given) for given in by_case)
            return [[given[rank] for given in by_case] for rank in range(complete)]

        by_rank = self._jobs.run_for(title, library.start(case_file, question.ranks), so_far, question.ranks)
        shutil.rmtree(folder)
        for timing, given in zip(timings, zip(*by_rank, strict=True), strict=True):
            timing.take(given)


def _bound_of(question: Question, column: Sequence[Timing]) -> Bound | None:
    timed = next((timing for timing in column if timing.library == BOUND and timing.seconds), None)
    if timed is None or not question.size_bytes or timed.median_s <= 0:
        return None
    return Bound(question.size_bytes / timed.median_s)


def cores_for(ranks: int) -> tuple[int, ...]:
    """Return one CPU per rank, on distinct cores.

    If there are too few cores, the result is empty, and ranks are not bound.
    """
    first_of = {core: cpu for cpu, core in sorted(cores_of_cpus(usable_cpus()).items(), reverse=True)}
    cpus = sorted(first_of.values())
    return tuple(cpus[:ranks]) if ranks <= len(cpus) else ()


def check_memory(question: Question, pool_bytes: int) -> None:
    """Raise ArgumentError if the ranks' buffers would not fit into this machine's memory."""
    # Input and output may be two buffers. The verification of a buffer needs the same amount of memory again.
    needed = question.ranks * (2 * max(pool_bytes, question.size_bytes) + 4 * question.size_bytes)
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > _MEMORY_SHARE * present:
        raise ArgumentError(
            f"{question.ranks} ranks with {size_text(max(pool_bytes, question.size_bytes))} of buffers each need about "
            f"{needed / 2**30:.1f} GiB, this machine has {present / 2**30:.1f}: want fewer ranks, smaller sizes or "
            "another --pool-mib"
        )
