"""Time a training step in turns: with multiring, with DistributedDataParallel and without communication."""

import json
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multiring._bench.job import JobCommand, Jobs, WrongResultError
from multiring._bench.machine import OtherWorkMeter
from multiring._bench.statistics import Interval, median_interval, ratio_interval
from multiring._bench.variants import VARIANTS
from multiring._bench.workers.step_case import (
    ALONE,
    ANSWER,
    DDP,
    DDP_NCCL,
    DDP_OURS,
    DDP_OURS_HOOK,
    DEVICES,
    DTYPES,
    FSDP,
    FSDP_OURS,
    FSDP_OURS_ARENA,
    INDEPENDENT,
    NETWORKS,
    OURS,
    Pace,
    StepCase,
)
from multiring.errors import ArgumentError

WORKER = Path(__file__).parent / "workers" / "step_worker.py"
PACER = WORKER.with_name("step_pace.py")
USUAL = ("resnet50", "vgg16", "embedding")
USUAL_ON_GPUS = ("resnet50", "transformer")
PEERS = (DDP,)
PEERS_ON_GPUS = (DDP, DDP_NCCL, ALONE)
SHARDED = (FSDP, FSDP_OURS, FSDP_OURS_ARENA)
# These libraries are used only if the user names them, and so is the network that is not in USUAL.
OTHERS = (DDP_OURS, DDP_OURS_HOOK, *SHARDED, DDP_NCCL, ALONE)
_CODED = {name: variant.wire for name, variant in VARIANTS.items() if variant.wire}
_MEMORY_SHARE = 0.8
LEAST_IMAGE = 64  # pixels; smaller images would have no pixels in the last layers


@dataclass(frozen=True, kw_only=True, slots=True)
class StepQuestion:
    """The step to time.

    `batch`: samples per rank, None: as in NETWORKS; `image_size`: pixels along an image's side.

    `is_emulated`: ranks sleep instead of computing, for the time that the computation took on a core of its own.

    `device`: the type of the device that has the model.

    Raises:
        ArgumentError: the network, type or device is unknown, or a number is out of range.
    """

    network: str
    ranks: int = 2
    hosts: int = 1
    threads: int = 1
    batch: int | None = None
    dtype: str = "bfloat16"
    image_size: int = 224
    is_emulated: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        for value, known, what in (
            (self.network, NETWORKS, "network"),
            (self.dtype, DTYPES, "type"),
            (self.device, DEVICES, "device"),
        ):
            if value not in known:
                raise ArgumentError(f"unknown {what} {value!r}, want one of {', '.join(known)}")
        for name, least in (("ranks", 2), ("threads", 1), ("batch", 1), ("image_size", LEAST_IMAGE)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ArgumentError(f"{name.replace('_', ' ')} {value}: want at least {least}")

    @property
    def samples(self) -> int:
        """The number of samples in a rank's batch."""
        return NETWORKS[self.network].samples if self.batch is None else self.batch

    @property
    def gradient_bytes(self) -> int:
        """The bytes of gradients that a rank reduces in a step.

        Gradients are float32, like parameters.
        """
        return 4 * NETWORKS[self.network].parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class StepManner:
    """How to time. Each job runs `warmup` steps, then times `steps` steps.

    Each library has `alternations` jobs.

    Raises:
        ArgumentError: a number is out of range.
    """

    alternations: int = 7
    steps: int = 10
    warmup: int = 2

    def __post_init__(self) -> None:
        if self.alternations < 1 or self.steps < 1:
            raise ArgumentError(f"{self.alternations} alternations of {self.steps} steps: want at least 1 of each")
        if self.warmup < 0:
            raise ArgumentError(f"{self.warmup} steps of warm-up: want 0 or more")


@dataclass(slots=True)
class StepTiming:
    """One library's figures: the slowest rank's median step of each alternation; or why there are none."""

    library: str
    seconds: list[float] = field(default_factory=list)
    version: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    not_run: str = ""

    @property
    def interval(self) -> Interval:
        """The median step over alternations, with its confidence interval."""
        return median_interval(self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepComparison:
    """The figures of all libraries on one question.

    `other_cores`: the cores that other work took.
    """

    question: StepQuestion
    manner: StepManner
    timings: tuple[StepTiming, ...]
    other_cores: float
    pace: Pace | None = None

    def timing(self, library: str) -> StepTiming | None:
        """Return the timing of `library`, or None if it was not timed."""
        return next((timing for timing in self.timings if timing.library == library and timing.seconds), None)

    def ratio(self, library: str, other: str) -> Interval | None:
        """Return the step of `other` divided by that of `library`: above 1, `library` is faster."""
        ours, theirs = self.timing(library), self.timing(other)
        return None if ours is None or theirs is None else ratio_interval(theirs.seconds, ours.seconds)

    def exposed_s(self, library: str) -> Interval | None:
        """Return the seconds by which the library's step is longer than that of independent processes."""
        ours, alone = self.timing(library), self.timing(INDEPENDENT)
        if ours is None or alone is None:
            return None
        return median_interval([one - other for one, other in zip(ours.seconds, alone.seconds, strict=True)])


class StepBench:
    """Runs comparisons.

    Args:
        jobs: runs the jobs.
        manner: how to time.
        against: libraries out of PEERS, OTHERS and, between hosts, multiring's variants with a wire type. Multiring and
            independent processes are timed as well.
        leave_out: OURS or INDEPENDENT, not to be timed. Without INDEPENDENT the exposed time is unknown.
        launcher: the command line before the ranks' own command; None: start the ranks on this host.
        tell: gets progress messages.
    """

    python: tuple[str, ...] = (sys.executable,)
    """The command that runs a Python program."""

    def __init__(
        self,
        jobs: Jobs,
        manner: StepManner,
        against: Sequence[str] = PEERS,
        *,
        leave_out: Sequence[str] = (),
        launcher: tuple[str, ...] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        for name in against:
            known = (*PEERS, *OTHERS, *_CODED)
            if name not in known:
                raise ArgumentError(f"{name!r} is not a library of this bench, want one of {', '.join(known)}")
            if name in _CODED and launcher is None:
                raise ArgumentError(
                    f"{name} differs from multiring only between hosts: give the number of hosts with --hosts H"
                )
        self._jobs = jobs
        self._manner = manner
        for name in leave_out:
            if name not in {OURS, INDEPENDENT}:
                raise ArgumentError(f"{name!r} cannot be left out, want {OURS} or {INDEPENDENT}")
        everyone = (OURS, *dict.fromkeys(against), INDEPENDENT)
        self._libraries = tuple(name for name in everyone if name not in leave_out)
        if not self._libraries:
            raise ArgumentError(f"no library is left to time without {' and '.join(leave_out)}")
        self._launcher = launcher
        self._tell = tell or (lambda _: None)
        self._number = 0

    @property
    def libraries(self) -> int:
        """The number of libraries."""
        return len(self._libraries)

    def compare(self, question: StepQuestion) -> StepComparison:
        """Return the times of all libraries on `question`.

        Every job verifies before it times.

        Raises:
            WrongResultError: gradients are not the mean of all ranks' gradients, or parameters differ after a step.
            JobError: a job failed or hung.
            ArgumentError: a library shards the model, and the question is emulated or on a device.
            StoppedError: a signal came.
        """
        sharded = [name for name in self._libraries if name in SHARDED]
        if question.is_emulated and sharded:
            raise ArgumentError(
                f"{', '.join(sharded)} shard parameters, but an emulated network never reads parameters: leave out "
                "these libraries, or do not emulate"
            )
        if question.device != "cpu" and (sharded or question.is_emulated):
            raise ArgumentError(
                f"--device {question.device} is not for {', '.join(sharded or ['--emulate'])}: leave it out"
            )
        meter = OtherWorkMeter()
        pace = self._measure(question) if question.is_emulated else None
        timings = [StepTiming(library) for library in self._libraries]
        for turn in range(self._manner.alternations):
            # Reverse every other turn, so that no library always runs after the same other library.
            for timing in timings if turn % 2 == 0 else reversed(timings):
                if timing.not_run:
                    continue
                self._tell(
                    f"{question.network}, alternation {turn + 1} of {self._manner.alternations}: {timing.library}"
                )
                answers = self._run(question, timing.library)
                timing.not_run = next((each["not_run"] for each in answers if each.get("not_run")), "")
                if timing.not_run:
                    continue
                timing.seconds.append(max(statistics.median(answer["seconds"]) for answer in answers))
                timing.version, timing.settings = answers[0]["version"], answers[0]["settings"]
        return StepComparison(
            question=question,
            manner=self._manner,
            timings=tuple(timings),
            other_cores=meter.cores(),
            pace=pace,
        )

    @property
    def _pace_file(self) -> Path:
        return self._jobs.folder / "pace.json"

    def _measure(self, question: StepQuestion) -> Pace:
        """Measure how long compute takes, and write it to a file for the ranks."""
        self._tell(f"{question.network}: measuring its compute")
        folder, case_file = self._prepared(question, INDEPENDENT)
        start = JobCommand(
            command=(sys.executable, str(PACER), str(case_file)), variables={"OMP_NUM_THREADS": str(question.threads)}
        )
        self._jobs.run_for(f"the compute of {question.network}", start, lambda: _answers(folder, 1), 1)
        (folder / f"{ANSWER}-0.json").replace(self._pace_file)
        shutil.rmtree(folder)
        return Pace.read(self._pace_file)

    def _run(self, question: StepQuestion, library: str) -> list[dict[str, Any]]:
        """Run one job, and return its ranks' answers."""
        folder, case_file = self._prepared(question, library)
        title = f"a step of {question.network} with {library}"
        ranks = 1 if library == ALONE else question.ranks
        start = self._start(question, case_file, ranks)
        found = self._jobs.run_for(title, start, lambda: _answers(folder, ranks), ranks)
        shutil.rmtree(folder)
        return found

    def _prepared(self, question: StepQuestion, library: str) -> tuple[Path, Path]:
        """Create a new folder with a case file; return both paths."""
        self._number += 1
        folder = self._jobs.folder / f"step-{self._number}"
        folder.mkdir()
        case_file = folder / "case.json"
        case = StepCase(
            library=OURS if library in _CODED else library,
            wire=_CODED.get(library, ""),
            pace=str(self._pace_file) if question.is_emulated else "",
            network=question.network,
            batch=question.samples,
            image_size=question.image_size,
            dtype=question.dtype,
            threads=question.threads,
            steps=self._manner.steps,
            warmup=self._manner.warmup,
            out_dir=str(folder),
            device=question.device,
        )
        case.write(case_file)
        return folder, case_file

    def _start(self, question: StepQuestion, case_file: Path, ranks: int) -> JobCommand:
        here = (sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--")
        command = (*(self._launcher or here), *self.python, str(WORKER), str(case_file))
        return JobCommand(command=command, variables={"OMP_NUM_THREADS": str(question.threads)})


def check_step_memory(question: StepQuestion) -> None:
    """Raise ArgumentError if the ranks would not fit into this machine's memory."""
    # Parameters, gradients, momentum and gradients in flight are float32; weights and their gradients also bfloat16.
    needed = question.ranks * 5 * question.gradient_bytes
    if question.device != "cpu":
        return  # the devices have memory of their own
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > _MEMORY_SHARE * present:
        raise ArgumentError(
            f"{question.ranks} ranks of {question.network} need more than {needed / 2**30:.1f} GiB, this machine has "
            f"{present / 2**30:.1f}: want fewer ranks, or another of --networks"
        )


def _answers(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Return the answers that the ranks left in `folder`, in the order of ranks.

    Raises:
        WrongResultError: a rank had a wrong result.
    """
    files = [folder / f"{ANSWER}-{rank}.json" for rank in range(ranks)]
    found: list[dict[str, Any]] = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    for answer in found:
        if answer["wrong"]:
            raise WrongResultError(answer["wrong"])
    return found
