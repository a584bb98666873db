"""Compare all-reduces of CUDA tensors in one job, whose ranks time all libraries in turns."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from multiring._bench.cases import Question
from multiring._bench.compare import OURS, Comparison, Manner, Timing
from multiring._bench.job import JobCommand, Jobs, RankAnswer, answers
from multiring._bench.machine import OtherWorkMeter
from multiring._bench.workers.contract import write_cases
from multiring.errors import ArgumentError, UnsupportedError

WORKER = Path(__file__).parent / "workers" / "on_device.py"
COLLECTIVES = ("all_reduce",)
PEERS = ("gloo", "nccl")
_ENGINES = {OURS: "multiring.torch", "gloo": "tcp", "nccl": "nccl"}


class DeviceBench:
    """Runs comparisons of CUDA tensors on this host.

    Args:
        jobs: runs the job.
        manner: how to time. Of each library, the calls of one alternation take about `manner.seconds`.
        against: libraries out of PEERS.
        python: the command that runs a Python program.

    Raises:
        ArgumentError: there is no such library.
    """

    def __init__(
        self, jobs: Jobs, manner: Manner, against: Sequence[str] = PEERS, python: Sequence[str] = (sys.executable,)
    ) -> None:
        for name in against:
            if name not in PEERS:
                raise ArgumentError(f"{name!r} does not take CUDA tensors here, want one of {', '.join(PEERS)}")
        self._jobs = jobs
        self._manner = manner
        self._libraries = (OURS, *dict.fromkeys(against))
        self._python = tuple(python)

    def compare(self, questions: Sequence[Question]) -> list[Comparison]:
        """Return the times of all libraries on each question. All questions have the same number of ranks.

        Raises:
            WrongResultError: a library's result differs from NumPy's.
            JobError: the job failed or hung.
            StoppedError: a signal came.
            UnsupportedError: there is no GPU.
        """
        meter = OtherWorkMeter()
        rows = [[Timing(name, _ENGINES[name], "device", each) for name in self._libraries] for each in questions]
        timings = [timing for row in rows for timing in row]
        for timing, by_rank in zip(timings, self._run(timings, questions[0].ranks), strict=True):
            _take(timing, by_rank)
        if rows[0][0].not_offered:
            raise UnsupportedError(f"{rows[0][0].not_offered}: want a GPU and torch's CUDA build, or --device cpu")
        other_cores = meter.cores()
        return [
            Comparison(question=question, pool_bytes=0, timings=tuple(row), bound=None, other_cores=other_cores)
            for question, row in zip(questions, rows, strict=True)
        ]

    def _run(self, timings: Sequence[Timing], ranks: int) -> list[list[RankAnswer]]:
        """Run the job, and return the answers of all ranks to each timing."""
        cases = []
        for number, timing in enumerate(timings):
            folder = self._jobs.folder / f"device-{number}"
            folder.mkdir()
            manner = self._manner
            case = replace(timing.case(str(folder)), warmup=1, cores=())  # CUDA's threads need more than one core
            cases.append(replace(case, calls=manner.calls or 0, turns=manner.alternations, seconds=manner.seconds))
        case_file = self._jobs.folder / "cases.json"
        write_cases(cases, case_file)
        command = (sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--", *self._python)
        start = JobCommand(command=(*command, str(WORKER), str(case_file)), variables={"OMP_NUM_THREADS": "1"})

        def so_far() -> list[list[RankAnswer]]:
            """Return the answers of every rank that has answered all cases."""
            by_case = [answers(Path(case.out_dir), ranks) for case in cases]
            complete = min(len(given) for given in by_case)
            return [[given[rank] for given in by_case] for rank in range(complete)]

        by_rank = self._jobs.run_for("all-reduces of CUDA tensors", start, so_far, ranks)
        return [[given[place] for given in by_rank] for place in range(len(cases))]


def _take(timing: Timing, by_rank: Sequence[RankAnswer]) -> None:
    """Fill in the slowest rank's figure of each alternation, or the reason for missing figures."""
    timing.not_offered = next((answer.not_offered for answer in by_rank if answer.not_offered), "")
    if not timing.not_offered:
        timing.seconds = [max(turn) for turn in zip(*(answer.seconds for answer in by_rank), strict=True)]
        first = by_rank[0]
        timing.version, timing.settings, timing.calls = first.version, first.settings, first.calls
