"""Check the floors of the torch.distributed backend relative to Gloo.

    python benchmarks/promises/torch_backend.py [--only NAME,...] [--again | --keep] [--list]

See floors.py for the options and records. The lines run two ranks on this host, and four virtual hosts at 1 Gbit/s (as
root). The libraries alternate, each job in its own processes. Every job verifies its results before it is timed.
`multiring-torch` is the backend as torch.distributed uses it. `multiring` is the Group below it; the difference is the
adapter's cost.

* `collectives`: reduce_scatter and all_gather of 8 MiB of ordinary tensors.
* `fsdp`: a step of a transformer of 97.7 million parameters with fully_shard. `fsdp-multiring` differs from Gloo's only
  in the backend's name. `fsdp-multiring-arena` sends and receives in the arena, with torch's option
  set_allocate_memory_from_process_group_for_comm.
* `lab-*`: not slower than Gloo. The interval of the ratio must reach 0.97, because the wire limits both backends and
  the medians vary around 1. The steps' computation is emulated; four hosts on few cores would compute four times as
  long and hide the wire. `ddp` and `ddp-multiring` differ only in the backend's name. `ddp-multiring-hook` has its
  gradients in the arena, through `allreduce_hook`.

ddp_exposed.py measures the exposed communication of DistributedDataParallel on one host.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

from benchmarks.promises.floors import MIB, Line, Record, Verdict, main, ours

from multiring._bench.statistics import Interval, ratio_interval

Judge = Callable[[list[Record]], Iterable[Verdict]]
TORCH = "multiring-torch"
FOUR = "--hosts 4 --slots 1 --link 1gbit --alternations 6"
# Most of a job's time is its start and the verified steps. So there are many jobs with few timed steps, and only for
# the libraries that are judged.
FEW = "--steps 4 --warmup 1 --leave-out multiring"
DDP = ("ddp", "ddp-multiring", "ddp-multiring-hook")
FSDP = ("fsdp", "fsdp-multiring", "fsdp-multiring-arena")
COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")


@dataclass(frozen=True, slots=True)
class Floor:
    """A floor for the ratio of Gloo's seconds to the backend's.

    Attributes:
        text: The floor in words.
        holds: Returns whether a ratio's interval meets the floor.
    """

    text: str
    holds: Callable[[Interval], bool]


def faster(times: float) -> Floor:
    """Return the floor of being `times` times as fast as Gloo."""
    return Floor(f"{times:g} x", lambda found: found.middle >= times)


NOT_SLOWER = Floor("reaches 0.97 x", lambda found: found.high >= 0.97)


def times_of(found: Interval) -> str:
    """Return the ratio and its interval as a text."""
    return f"{found.middle:.2f} x gloo [{found.low:.2f}, {found.high:.2f}]"


def collectives(floor: Floor, aim: str, *names: str) -> Judge:
    """Return a judge of the speed of collectives of 8 MiB relative to Gloo."""

    def judge(records: list[Record]) -> Iterable[Verdict]:
        for name in names:
            gloo, backend = (ours(records, 8 * MIB, library, collective=name) for library in ("gloo", TORCH))
            found = ratio_interval(gloo["seconds"], backend["seconds"])
            below = ours(records, 8 * MIB, collective=name)
            figure = f"{times_of(found)}, {backend['median_s'] * 1e3:.2f} ms"
            figure += f"; the Group below it {below['median_s'] * 1e3:.2f} ms"
            yield Verdict(f"{name} 8 MiB", figure, floor.text, aim, floor.holds(found))

    return judge


def step_of(records: list[Record], library: str) -> Record:
    """Return a library's record of a training step."""
    (found,) = [record for record in records if record["library"] == library]
    return found


def steps(floor: Floor, aim: str, over_gloo: str, *libraries: str) -> Judge:
    """Return a judge of the speed of a training step relative to the step over Gloo."""

    def judge(records: list[Record]) -> Iterable[Verdict]:
        gloo = step_of(records, over_gloo)
        for library in libraries:
            backend = step_of(records, library)
            found = ratio_interval(gloo["seconds"], backend["seconds"])
            figure = f"{times_of(found)}, {backend['median_step_s'] * 1e3:.0f} ms"
            yield Verdict(library, figure, floor.text, aim, floor.holds(found))

    return judge


LINES = (
    Line(
        "collectives",
        tuple(
            f"{name} --ranks 2 --against gloo,{TORCH} --buffers ordinary --sizes 8MiB --pool-mib 0"
            for name in COLLECTIVES[:2]
        ),
        collectives(faster(4), "8 x", *COLLECTIVES[:2]),
    ),
    Line(
        "fsdp",
        (f"step --networks transformer --ranks 2 --alternations 6 --against {','.join(FSDP)} {FEW}",),
        steps(faster(1.5), "2 x", *FSDP),
    ),
    Line(
        "lab-collectives",
        tuple(f"{name} {FOUR} --against gloo,{TORCH} --sizes 8MiB --pool-mib 0" for name in COLLECTIVES),
        collectives(NOT_SLOWER, "", *COLLECTIVES),
    ),
    Line(
        "lab-ddp",
        (f"step --networks resnet50 --emulate {FOUR} --against {','.join(DDP)} {FEW},independent",),
        steps(NOT_SLOWER, "", *DDP),
    ),
)


if __name__ == "__main__":
    sys.exit(main(LINES, __doc__))
