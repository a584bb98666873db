"""Put one question to several libraries, in turns: verify, then time, then say how sure the difference is."""

import os
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from multiring.bench.cases import Question, size_text
from multiring.bench.job import Jobs, Start, answers
from multiring.bench.machine import OtherWork
from multiring.bench.statistics import Interval, median_interval, ratio_interval
from multiring.bench.workers.contract import Case
from multiring.errors import ArgumentError
from multiring.launch.cores import cores_of_cpus, usable_cpus

OURS = "multiring"
BOUND = "bound"
_PROBE_CALLS = 10
_LEAST_CALLS = 10
_LEAST_WARMUP = 3
_MEMORY_SHARE = 0.7


def is_ours(library: str) -> bool:
    """Return whether that is multiring, as it goes by itself or as it was asked to."""
    return library == OURS or library.startswith(f"{OURS}-")


class Library(Protocol):
    """Something that does collectives, and how its job is started."""

    @property
    def name(self) -> str:
        """What the command line and the records call it."""

    @property
    def engine(self) -> str:
        """What carries its bytes."""

    def refusal(self, case: Case) -> str:
        """Return why it does not do `case`; "" where it may."""

    def start(self, case_file: Path, ranks: int) -> Start:
        """Return what starts a job of its worker on `case_file`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How to time.

    `seconds` is about what a job's timed calls take, at most `most_calls`, and `warm_s` those before; `calls`, where
    given, how many are timed.

    Raises:
        ArgumentError: there can be no such timing.
    """

    buffers: str = "arena"
    alternations: int = 7
    seconds: float = 0.5
    calls: int | None = None
    most_calls: int = 5000
    warm_s: float = 0.0

    def __post_init__(self) -> None:
        if self.alternations < 1:
            raise ArgumentError(f"{self.alternations} alternations time nothing, want at least 1, for 95 % at least 6")
        if self.calls is not None and self.calls < 1:
            raise ArgumentError(f"{self.calls} calls time nothing, want at least 1")


@dataclass(slots=True)
class Timing:
    """One library's answer. `seconds` has its figure in each alternation: the slowest rank's median call."""

    library: str
    engine: str
    buffers: str
    not_offered: str = ""
    seconds: list[float] = field(default_factory=list)
    version: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    calls: int = _PROBE_CALLS
    warmup: int = _LEAST_WARMUP

    @property
    def median_s(self) -> float:
        """The median alternation's figure."""
        return statistics.median(self.seconds)

    @property
    def interval(self) -> Interval:
        """How sure that is."""
        return median_interval(self.seconds)


@dataclass(frozen=True, slots=True)
class Bound:
    """The algbw without waiting, and how it comes about."""

    bytes_per_s: float
    formula: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Every library's answer to one question; ours first.

    `bound` is None where nothing measured it. `other_cores`: what other work took.
    """

    question: Question
    pool_bytes: int
    timings: tuple[Timing, ...]
    bound: Bound | None
    other_cores: float

    @property
    def ours(self) -> Timing:
        """Multiring's own."""
        return self.timings[0]

    @property
    def best_peer(self) -> Timing | None:
        """The fastest of the others."""
        offered = [timing for timing in self.timings if timing.seconds and not is_ours(timing.library)]
        return min(offered, key=lambda timing: timing.median_s) if offered else None

    def advantage_over(self, peer: Timing) -> Interval | None:
        """Return how many times faster ours is."""
        return ratio_interval(peer.seconds, self.ours.seconds) if peer.seconds and self.ours.seconds else None


class Bench:
    """Runs comparisons. `libraries` begins with ours and may hold the bound; `tell` hears what is being done."""

    def __init__(
        self, jobs: Jobs, libraries: Sequence[Library], manner: Manner, tell: Callable[[str], None] | None = None
    ) -> None:
        self._jobs = jobs
        self._libraries = tuple(libraries)
        self._manner = manner
        self._tell = tell or (lambda _: None)
        self._number = 0

    def compare(self, question: Question, pool_bytes: int = 0, bound: Bound | None = None) -> Comparison:
        """Return what all libraries need for `question`.

        Args:
            question: what to do.
            pool_bytes: 0 for one buffer, else how many bytes of buffers each rank's calls rotate over.
            bound: as measured elsewhere, where it is none of the libraries.

        Raises:
            WrongResultError: a library computes something else than NumPy.
            JobError: a job failed or hung.
            StoppedError: a signal came.
        """
        meter = OtherWork()
        # The bound is no library's business to verify: it has no result.
        timings = [self._probe(library, question, pool_bytes) for library in self._libraries]
        running = [pair for pair in zip(self._libraries, timings, strict=True) if not pair[1].not_offered]
        for turn in range(self._manner.alternations):
            # Every other turn backwards, so that nobody always comes after the same one.
            for library, timing in running if turn % 2 == 0 else reversed(running):
                self._tell(f"alternation {turn + 1} of {self._manner.alternations}: {library.name}")
                self._time(library, timing, question, pool_bytes)
        timed = next((timing for timing in timings if timing.library == BOUND and timing.seconds), None)
        if timed is not None and question.size_bytes and timed.median_s > 0:
            bound = Bound(question.size_bytes / timed.median_s)
        return Comparison(
            question=question,
            pool_bytes=pool_bytes,
            timings=tuple(timing for timing in timings if timing.library != BOUND),
            bound=bound,
            other_cores=meter.cores(),
        )

    def _probe(self, library: Library, question: Question, pool_bytes: int) -> Timing:
        """Return a timing without figures, but with the number of calls that are to be timed."""
        ours = is_ours(library.name)
        timing = Timing(library.name, library.engine, self._manner.buffers if ours else "ordinary")
        timing.not_offered = library.refusal(self._case(library, timing, question, pool_bytes))
        if not timing.not_offered:
            self._tell(f"verifying {library.name}")
            self._time(library, timing, question, pool_bytes)
        if timing.seconds:
            (probed_s,) = timing.seconds
            timing.seconds.clear()
            per_s = 1 / max(probed_s, 1e-9)
            fitting = min(max(int(self._manner.seconds * per_s), _LEAST_CALLS), self._manner.most_calls)
            timing.calls = self._manner.calls or fitting
            timing.warmup = max(int(self._manner.warm_s * per_s), _LEAST_WARMUP)
        return timing

    def _time(self, library: Library, timing: Timing, question: Question, pool_bytes: int) -> None:
        """Run one job and add its figure to `timing`, or why there is none."""
        case = self._case(library, timing, question, pool_bytes)
        folder = Path(case.out_dir)
        folder.mkdir()
        case_file = folder / "case.json"
        case.write(case_file)
        title = f"{library.name}, {question.collective} of {question.size_bytes} bytes"
        start = library.start(case_file, question.ranks)
        given = self._jobs.run_for(title, start, lambda: answers(folder, question.ranks), question.ranks)
        shutil.rmtree(folder)
        timing.not_offered = next((answer.not_offered for answer in given if answer.not_offered), "")
        if not timing.not_offered:
            timing.seconds.append(max(statistics.median(answer.seconds) for answer in given))
            timing.version, timing.settings = given[0].version, given[0].settings

    def _case(self, library: Library, timing: Timing, question: Question, pool_bytes: int) -> Case:
        self._number += 1
        return Case(
            library=library.name,
            collective=question.collective,
            dtype=question.dtype,
            count=question.count,
            out_dir=str(self._jobs.folder / str(self._number)),
            op=question.op,
            buffers=timing.buffers,
            pool_bytes=pool_bytes,
            calls=timing.calls,
            warmup=timing.warmup,
            cores=cores_for(question.ranks) if question.hosts == 1 else (),
        )


def cores_for(ranks: int) -> tuple[int, ...]:
    """Return a CPU for each rank, on cores of their own; none where there are not so many: ranks go where they like."""
    first_of = {core: cpu for cpu, core in sorted(cores_of_cpus(usable_cpus()).items(), reverse=True)}
    cpus = sorted(first_of.values())
    return tuple(cpus[:ranks]) if ranks <= len(cpus) else ()


def check_memory(question: Question, pool_bytes: int) -> None:
    """Raise ArgumentError where the ranks' buffers would not fit into this machine's memory."""
    # Input and output may be two, and verifying makes as many again of one buffer.
    needed = question.ranks * (2 * max(pool_bytes, question.size_bytes) + 4 * question.size_bytes)
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > _MEMORY_SHARE * present:
        raise ArgumentError(
            f"{question.ranks} ranks with {size_text(max(pool_bytes, question.size_bytes))} of buffers each need about "
            f"{needed / 2**30:.1f} GiB, this machine has {present / 2**30:.1f}: want fewer ranks, smaller sizes or "
            "another --pool-mib"
        )
