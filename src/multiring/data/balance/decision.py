"""Which stage of a training bounds it: that whose doubling would shorten a step most, by what was counted.

A step ends when its batch is there, and its computation and what the wire does not hide behind it are done, so that it
takes the longest of three: what workers need for a batch; what a resource needs that serves one request at a time, or
the host's cores; and computation with the exposed part of the wire. Each stage is halved in turn, and the step computed
again. Where two of the three are nearly as long, neither hides the other fully: hence a norm in place of the maximum.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

SOURCE, DISK, NETWORK, DECODE, COPY = ("source", "disk", "network", "decode", "copy")
WORKERS, COMPUTE, WIRE = "workers", "compute", "wire"
STAGES = (SOURCE, DISK, NETWORK, DECODE, COPY, COMPUTE, WIRE, WORKERS)
NAMES = {COPY: "host-to-arena", WORKERS: "number of workers"}
REQUESTED = (SOURCE, DISK, NETWORK)  # stages that somebody else may be slow in
_NORM = 8
# Requests beside others take so much longer than ones alone where they are served in turn: half of it with two workers.
_IN_TURN = 1.25
_BUSY = 0.9  # of the cores: beyond it a worker's clock counts its waiting for one
_QUEUED = 0.05  # of workers' time, waited for a core: beyond it more of them would not have more cores
_FEW = 8  # requests alone: fewer of them tell nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What one rank counted of its training. Times are seconds, of all workers together where they are the workers'.

    Attributes:
        wall_s: of training, without what was paused.
        steps: in it.
        waited_s: of the training's thread, for batches.
        wire_s: in which an operation was on the wire that all ranks had come to.
        exposed_s: of that, in which a thread waited for it.
        peers_s: in which a thread waited for ranks that had not come.
        cpu_s: of this process's threads together.
        workers: how many.
        cores: that this rank may use.
        spent: seconds by stage, "cpu" (workers' threads), "queued" (when those could have run, but had no core), and by
            "STAGE alone", "STAGE beside" how long requests took.
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
    """A step's parts, in seconds: those of workers together, those of resources, and those of the training's thread."""

    stages: Mapping[str, float]  # of workers
    in_turn: Mapping[str, float]  # of stages that serve one request at a time
    cpu: Mapping[str, float]  # of decode, copy, and the training's threads: compute
    workers: int
    cores: float
    compute: float
    exposed: float
    wire: float

    @property
    def step_s(self) -> float:
        """Return how long a step takes."""
        made = sum(self.stages.values()) / self.workers
        cpu = sum(self.cpu.values()) / self.cores
        lengths = (made, *self.in_turn.values(), cpu, self.compute + self.exposed)
        longest = max(*lengths, 1e-12)
        return float(longest * sum((each / longest) ** _NORM for each in lengths) ** (1 / _NORM))

    def doubled(self, stage: str) -> "Model":
        """Return it with a stage twice as fast."""
        if stage == WORKERS:
            return replace(self, workers=2 * self.workers)
        if stage == WIRE:
            return replace(self, wire=self.wire / 2, exposed=max(0.0, self.exposed - self.wire / 2))
        if stage == COMPUTE:
            # Half as much time is left for the wire to hide behind.
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
    """What bounded a training.

    Attributes:
        bound: the stage, of STAGES.
        gains: how many times as fast a step would be with each stage twice as fast.
        shares: of the time: workers' by stage, the training's thread's by what it did or waited for.
        steps: of the training.
        step_s: seconds a step.
        workers: of a rank.
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


def balance_of(ranks: list[Counted]) -> Balance:
    """Return what bounded a training of one or more ranks: of the one that waited least for the others.

    Args:
        ranks: what each counted, at least one, with steps.
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


def model_of(counted: Counted) -> Model:
    """Return the model of a rank's step."""
    steps, spent = counted.steps, counted.spent
    is_full = counted.cpu_s > _BUSY * counted.cores * counted.wall_s
    workers_cpu, queued = spent.get("cpu", 0.0), spent.get("queued", 0.0)
    cores = counted.cores
    if queued > _QUEUED * sum(spent.get(name, 0.0) for name in (*REQUESTED, DECODE, COPY)):
        # Others compute on these cores too, and have what is missing of each.
        is_full = True
        cores = max(cores * workers_cpu / (workers_cpu + queued), counted.cpu_s / counted.wall_s)
    cpu = {DECODE: min(workers_cpu, spent.get(DECODE, 0.0))}
    # What is read is copied too, out of the page cache; that goes with the copying.
    cpu |= {COPY: workers_cpu - cpu[DECODE], COMPUTE: max(0.0, counted.cpu_s - workers_cpu)}
    stages = {name: spent.get(name, 0.0) for name in (*REQUESTED, DECODE, COPY)}
    in_turn = {}
    for name in REQUESTED:
        alone = _mean(spent, f"{name} alone")
        beside = _mean(spent, f"{name} beside")
        requests = spent.get(f"{name} alone requests", 0) + spent.get(f"{name} beside requests", 0)
        if counted.workers > 1 and spent.get(f"{name} alone requests", 0) < _FEW:
            # Somebody always waits for it: as far as can be told it does all it can.
            in_turn[name] = min(stages[name], counted.wall_s)
        elif counted.workers > 1 and beside > _IN_TURN * alone:
            # What a request took longer than alone it waited for others: a faster stage, or fewer workers, spare it.
            in_turn[name] = stages[name] = alone * requests
    if is_full:
        # Without its waiting for a core, as far as that is told; what sleeps in it would sleep on a free core, too.
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
