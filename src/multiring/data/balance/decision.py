"""Find the bottleneck of a training: the stage whose doubled speed would shorten a step most.

A step takes the longest of three times. The first is the workers' time for a batch. The second is the time of the
host's cores, or of a resource that serves one request at a time. The third is the time of the computation, plus the
part of the communication ("wire") that the computation does not hide. The model halves the time of each stage in turn,
and computes the step's time again. If two of the three times are nearly equal, they do not overlap perfectly. The
model therefore uses a norm instead of the maximum.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from multiring.data.stages import COPY, DECODE, DISK, NETWORK, REQUESTED, SOURCE

WORKERS, COMPUTE, WIRE = "workers", "compute", "wire"
STAGES = (SOURCE, DISK, NETWORK, DECODE, COPY, COMPUTE, WIRE, WORKERS)
NAMES = {COPY: "host-to-arena", WORKERS: "number of workers"}
_NORM = 8
# If concurrent requests take longer than single requests by this factor, the resource serves one request at a time. Two
# workers at such a resource give a factor of 1.5.
_IN_TURN = 1.25
_BUSY = 0.9  # if the process uses a larger share of its cores, workers' times include waiting for a core
_QUEUED = 0.05  # if workers wait for a core for a larger share of their time, all cores are in use
_FEW = 8  # with fewer requests that ran alone, their mean time is not reliable


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCounts:
    """One rank's measurements of its training.

    Times are in seconds; workers' times are sums over all workers.

    Attributes:
        wall_s: the elapsed time of the training, without pauses.
        steps: the number of steps in this time.
        waited_s: the time in which the training's thread waited for batches.
        wire_s: the time in which an operation that all ranks had posted was running.
        exposed_s: the part of `wire_s` in which a thread waited for the operation.
        peers_s: the time in which a thread waited for ranks that had not posted an operation yet.
        cpu_s: the CPU time of all threads of this process.
        workers: the number of workers.
        cores: the number of cores that this rank can use.
        spent: the workers' time by stage. "cpu" is their CPU time, "queued" the time in which they waited for a core.
            "STAGE alone" and "STAGE beside" are the times of requests; see `StageClock`.
    """

    wall_s: float
    steps: int
    waited_s: float
    wire_s: float = 0.0
    exposed_s: float = 0.0
    peers_s: float = 0.0
    cpu_s: float = 0.0
    workers: int = 1
    cores: float = 1.0
    spent: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The times of a step's parts, in seconds.

    Workers' times are sums over all workers.
    """

    stages: Mapping[str, float]  # workers' time by stage
    in_turn: Mapping[str, float]  # time of stages that serve one request at a time
    cpu: Mapping[str, float]  # CPU time of decode, of copy, and of the training's threads ("compute")
    workers: int  # number of workers
    cores: float  # number of cores
    compute: float  # computation time of the training's thread
    exposed: float  # the part of `wire` that the computation does not hide
    wire: float  # communication time

    @property
    def step_s(self) -> float:
        """Return the time of a step in seconds."""
        made = sum(self.stages.values()) / self.workers
        cpu = sum(self.cpu.values()) / self.cores
        lengths = (made, *self.in_turn.values(), cpu, self.compute + self.exposed)
        longest = max(*lengths, 1e-12)
        return float(longest * sum((each / longest) ** _NORM for each in lengths) ** (1 / _NORM))

    def doubled(self, stage: str) -> "Model":
        """Return the model with a stage twice as fast."""
        if stage == WORKERS:
            return replace(self, workers=2 * self.workers)
        if stage == WIRE:
            return replace(self, wire=self.wire / 2, exposed=max(0.0, self.exposed - self.wire / 2))
        if stage == COMPUTE:
            # With half the computation, less of the communication is hidden.
            hidden = min(self.wire - self.exposed, self.compute / 2)
            exposed = self.wire - max(0.0, hidden)
            return replace(self, compute=self.compute / 2, exposed=exposed, cpu=_halved(self.cpu, stage))
        return replace(
            self,
            stages=_halved(self.stages, stage),
            in_turn=_halved(self.in_turn, stage),
            cpu=_halved(self.cpu, stage),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """The bottleneck of a training.

    Attributes:
        bound: the stage that is the bottleneck, of STAGES.
        gains: the speed-up of a step if each stage were twice as fast.
        shares: shares of the time: of workers' time by stage, and of the training thread's time by activity.
        steps: the number of steps of the training.
        step_s: seconds a step.
        workers: the number of workers of a rank.
    """

    bound: str
    gains: Mapping[str, float]
    shares: Mapping[str, float]
    steps: int
    step_s: float
    workers: int

    def __str__(self) -> str:
        """Return the balance line."""
        workers = ", ".join(f"{_name(each)} {self.shares[each]:.0%}" for each in (SOURCE, DISK, NETWORK, DECODE, COPY))
        thread = ", ".join(f"{each} {self.shares[each]:.0%}" for each in (COMPUTE, WIRE, "data", "other ranks"))
        return (
            f"bounded by {_name(self.bound)}: twice as much of it would make a step {self.gains[self.bound]:.2f} times "
            f"as fast; {self.steps} step{'' if self.steps == 1 else 's'} of {1e3 * self.step_s:.3g} ms: {thread}; "
            f"{self.workers} worker{'s' if self.workers > 1 else ''}: {workers}"
        )


def balance_of(ranks: list[TrainingCounts]) -> Balance:
    """Return the bottleneck of a training of one or more ranks.

    The rank that waited least for other ranks is the slowest; its measurements decide.

    Args:
        ranks: the measurements of each rank, at least one; each must have steps.
    """
    slowest = min(ranks, key=lambda each: each.peers_s / each.steps)
    model = model_of(slowest)
    gains = {stage: model.step_s / model.doubled(stage).step_s for stage in STAGES}
    wall = max(slowest.wall_s, 1e-12)
    shares = {each: slowest.spent.get(each, 0.0) / wall / slowest.workers for each in (*REQUESTED, DECODE, COPY)}
    shares |= {
        COMPUTE: model.compute * slowest.steps / wall,
        WIRE: slowest.exposed_s / wall,
        "data": slowest.waited_s / wall,
        "other ranks": slowest.peers_s / wall,
    }
    bound = max(STAGES, key=lambda each: (gains[each], shares.get(each, 0.0)))
    return Balance(
        bound=bound,
        gains=gains,
        shares=shares,
        steps=slowest.steps,
        step_s=wall / slowest.steps,
        workers=slowest.workers,
    )


def model_of(counted: TrainingCounts) -> Model:
    """Return the model of a rank's step from its measurements."""
    steps, spent = counted.steps, counted.spent
    is_full = counted.cpu_s > _BUSY * counted.cores * counted.wall_s
    workers_cpu, queued = spent.get("cpu", 0.0), spent.get("queued", 0.0)
    cores = counted.cores
    if queued > _QUEUED * sum(spent.get(name, 0.0) for name in (*REQUESTED, DECODE, COPY)):
        # Other processes use these cores too; this rank gets only a part of each core.
        is_full = True
        cores = max(cores * workers_cpu / (workers_cpu + queued), counted.cpu_s / counted.wall_s)
    cpu = {DECODE: min(workers_cpu, spent.get(DECODE, 0.0))}
    # A read also copies data out of the page cache. This CPU time counts as copying.
    cpu |= {COPY: workers_cpu - cpu[DECODE], COMPUTE: max(0.0, counted.cpu_s - workers_cpu)}
    stages = {name: spent.get(name, 0.0) for name in (*REQUESTED, DECODE, COPY)}
    in_turn = {}
    for name in REQUESTED:
        alone = _mean(spent, f"{name} alone")
        beside = _mean(spent, f"{name} beside")
        requests = spent.get(f"{name} alone requests", 0) + spent.get(f"{name} beside requests", 0)
        if counted.workers > 1 and spent.get(f"{name} alone requests", 0) < _FEW:
            # A request is nearly always running, so the resource seems to work at its limit.
            in_turn[name] = min(stages[name], counted.wall_s)
        elif counted.workers > 1 and beside > _IN_TURN * alone:
            # Concurrent requests take longer because they wait for each other. Do not count this wait as work.
            in_turn[name] = stages[name] = alone * requests
    if is_full:
        # Subtract the waiting for a core from the decoding time if it is known. Sleeping in a transform still counts,
        # because it would take as long on a free core.
        stages[DECODE] = max(cpu[DECODE], stages[DECODE] - queued) if queued else cpu[DECODE]
    compute = counted.wall_s - counted.waited_s - counted.exposed_s - counted.peers_s
    return Model(
        stages={name: each / steps for name, each in stages.items()},
        in_turn={name: each / steps for name, each in in_turn.items()},
        cpu={name: each / steps for name, each in cpu.items()},
        workers=counted.workers,
        cores=cores,
        compute=max(0.0, compute) / steps,
        exposed=counted.exposed_s / steps,
        wire=max(counted.wire_s, counted.exposed_s) / steps,
    )


def _halved(parts: Mapping[str, float], stage: str) -> Mapping[str, float]:
    return {name: each / 2 if name == stage else each for name, each in parts.items()}


def _mean(spent: Mapping[str, float], name: str) -> float:
    return spent.get(name, 0.0) / max(1.0, spent.get(f"{name} requests", 0.0))


def _name(stage: str) -> str:
    return NAMES.get(stage, stage)
