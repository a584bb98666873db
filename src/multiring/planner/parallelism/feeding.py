"""The time in which the workers of a rank make its samples of a step, and what bounds that time."""

import math
from dataclasses import dataclass

from multiring._topology import Topology
from multiring.errors import ArgumentError
from multiring.planner.staging import each_for_itself, site_of

_WORKERS, _CORES, _THREAD = "workers", "cores", "loading thread"


@dataclass(frozen=True, kw_only=True, slots=True)
class Feeding:
    """How the workers of each rank make its samples, while the rank computes.

    A worker takes `worker_s` seconds for a sample: it reads, decodes, and copies it into the batch. `cpu_s` of these
    are processor time. Each rank has `workers` workers. The ranks of a host share its `cores`; None: each worker has a
    core. In a second of forward and backward, the rest of a rank takes `compute_cores` seconds of processor time; 0 if
    it computes on an accelerator. The source delivers `source_bytes_per_s` to all hosts together, over their rails, and
    a sample has `sample_bytes` there; None: reading takes what is in `worker_s`, however many ranks read. The thread
    that loads batches takes `batch_s` for one, beside the workers: small samples come no faster. In training, a rank
    takes each step's samples over in `hand_over_s`, beside which neither workers nor the rank get on.

    Raises:
        ArgumentError: a number is not positive, or not finite.
    """

    worker_s: float
    cpu_s: float
    workers: int
    cores: float | None = None
    compute_cores: float = 0.0
    source_bytes_per_s: float | None = None
    sample_bytes: float | None = None
    batch_s: float = 0.0
    hand_over_s: float = 0.0

    def __post_init__(self) -> None:
        cores = 1.0 if self.cores is None else self.cores
        source, sample = (1.0 if each is None else each for each in (self.source_bytes_per_s, self.sample_bytes))
        least = min(self.worker_s, self.workers, cores, source, sample)
        if not 0 < least < math.inf or not min(self.cpu_s, self.compute_cores, self.batch_s, self.hand_over_s) >= 0:
            raise ArgumentError(f"{self}: want numbers above 0")
        if self.source_bytes_per_s is not None and self.sample_bytes is None:
            raise ArgumentError(f"{self}: a source without the bytes of a sample; want sample_bytes, too")


@dataclass(frozen=True, slots=True)
class InputTime:
    """The seconds in which a rank's samples of a step are made.

    `bound` names what takes so long: "workers", "loading thread", "cores", or a link between the source and the hosts.
    """

    seconds: float
    bound: str


def input_time(feeding: Feeding, samples: float, compute_s: float, topology: Topology) -> InputTime:
    """Return the time in which each rank's samples of a step are made; that of the slowest rank.

    It is the longest of four lower bounds: the workers of a rank; the thread that loads its batches; the cores of a
    host, on which its ranks compute, too; and the links from the source to the hosts. Gradients that use the same links
    are not counted. The samples are then handed over.

    Args:
        feeding: how samples are made.
        samples: the samples of a rank in one step.
        compute_s: the seconds of its forward and backward.
        topology: all ranks.
    """
    times = {_WORKERS: samples * feeding.worker_s / feeding.workers, _THREAD: feeding.batch_s}
    if feeding.cores is not None:
        most = max(map(len, topology.hosts))
        times[_CORES] = (
            most * (samples * feeding.cpu_s + feeding.batch_s + compute_s * feeding.compute_cores) / feeding.cores
        )
    if feeding.source_bytes_per_s is not None and feeding.sample_bytes is not None:
        held = samples * feeding.sample_bytes
        site = site_of(topology, source=feeding.source_bytes_per_s, by_rank=True)
        staged = each_for_itself(site, held * topology.ranks, held)
        times[staged.bound] = staged.seconds
    bound = max(times, key=lambda name: times[name])
    return InputTime(times[bound] + feeding.hand_over_s, bound)
