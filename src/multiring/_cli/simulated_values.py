"""All values of a prediction, for `--json` and for the page of `multiring simulate`: both show nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multiring._cli.simulated_input import described_input
from multiring._cli.simulation import Subject
from multiring._simulator.changes import Change, changes_of
from multiring._simulator.failures import Failures
from multiring._simulator.presets import Preset
from multiring._simulator.step import SimulatedStep, part_of
from multiring._topology import Topology

_HOUR_S = 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPrediction:
    """What was predicted: the steps of a training on parts of a cluster.

    `cluster` is its name or file, `known` its preset, and `goodputs` has the goodput of each step under `failures`.
    """

    cluster: str
    known: Preset | None
    topology: Topology
    subject: Subject
    steps: Sequence[SimulatedStep]
    failures: Failures | None = None
    goodputs: Sequence[Mapping[str, float]] = ()

    @property
    def largest(self) -> SimulatedStep:
        """The step of the most ranks."""
        return max(self.steps, key=lambda each: each.ranks)


def described(prediction: ClusterPrediction) -> dict[str, Any]:
    """Return the JSON object. Times are in seconds; efficiencies, loads and goodputs are parts of 1."""
    subject, known, largest = prediction.subject, prediction.known, prediction.largest
    changes = changes_of(
        subject.profile, subject.batch_per_rank, subject.exchange, part_of(prediction.topology, largest.ranks)
    )
    return {
        "topology": prediction.cluster,
        "title": f"{prediction.topology}" if known is None else known.title,
        "training": subject.title,
        "batch_per_rank": subject.batch_per_rank,
        **subject.described,
        "remarks": list(subject.remarks),
        "sources_of_topology": {} if known is None else dict(known.sources),
        "usd_per_host_hour": None if known is None else known.usd_per_host_hour,
        "priced": None if known is None else known.priced or None,
        "failures": None if prediction.failures is None else asdict(prediction.failures),
        "steps": [
            {
                **described_step(step, subject.interval(step)),
                "input": described_input(step, subject.feeding),
                "usd_per_million_samples": usd_per_million(step, known),
                **(prediction.goodputs[at] if prediction.goodputs else {}),
            }
            for at, step in enumerate(prediction.steps)
        ],
        "changes": {
            "ranks": largest.ranks,
            "of": [_described_change(each, largest) for each in changes],
        },
    }


def usd_per_million(step: SimulatedStep, known: Preset | None) -> float | None:
    """Return the price of a million samples in USD; None for a cluster without a price."""
    if known is None or known.usd_per_host_hour is None:
        return None
    return step.hosts * known.usd_per_host_hour / _HOUR_S / step.samples_per_s * 1e6


def described_step(step: SimulatedStep, interval: tuple[float, float] | None) -> dict[str, Any]:
    """Return a step for JSON."""
    total = step.seconds.total
    return {
        "ranks": step.ranks,
        "hosts": step.hosts,
        "step_s": total,
        "step_90_s": interval,
        "forward_s": step.forward_s,
        "backward_s": step.seconds.compute - step.forward_s,
        "compute_s": step.seconds.compute,
        "waiting_s": step.seconds.waiting,
        "exposed_s": step.seconds.exchange,
        "update_s": step.seconds.update,
        "outside_s": step.seconds.outside,
        "input_wait_s": step.seconds.input,
        "communication_s": step.communication_s,
        "samples_per_s": step.samples_per_s,
        "efficiency": step.efficiency,
        "efficiency_90": None if interval is None else [step.alone_s / interval[1], step.alone_s / interval[0]],
        "bound": step.bound,
        "buckets": [asdict(each) for each in step.buckets],
        "links": {
            name: {"busy_s": busy_s, "load": busy_s / total} for name, busy_s in asdict(step.links).items() if busy_s
        },
    }


def _described_change(change: Change, now: SimulatedStep) -> dict[str, Any]:
    return {
        "what": change.what,
        "alters_training": change.alters_training,
        "step_s": change.step.seconds.total,
        "exposed_s": change.step.seconds.exchange,
        "efficiency": change.step.efficiency,
        "faster_by": now.seconds.total / change.step.seconds.total - 1,
    }
