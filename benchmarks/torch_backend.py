"""What multiring promises as a backend of torch.distributed, against Gloo in turns; options and records as floors.py.

    python benchmarks/torch_backend.py [--only NAME,...] [--again | --keep] [--list]

Two ranks on this host, and four virtual hosts at 1 Gbit/s (as root). Libraries take turns, each job in processes of its
own; every job verifies its results before it is timed. `multiring-torch` is the backend as torch.distributed drives it,
`multiring` the Group below it, which shows what the adapter costs.

* `collectives`: reduce_scatter and all_gather of 8 MiB, of ordinary tensors.
* `fsdp`: a step of a transformer of 97.7 million parameters with fully_shard. `fsdp-multiring` differs from Gloo's by
  the backend's name; `fsdp-multiring-arena` has what is sent and received in the arena, by torch's own option
  set_allocate_memory_from_process_group_for_comm.
* `lab-*`: not slower than Gloo: the interval of the ratio reaches 0.97, as both carry what the wire does and
  medians lie on either side of 1 from run to run. Steps are emulated: with four hosts on few cores
  they would take as long as four steps, and hide the wire. `ddp` and `ddp-multiring` are the same program but for the
  backend's name; `ddp-multiring-hook` has its gradients in the arena by `share_bucket`.

What a step of DistributedDataParallel exposes on one host is ddp_exposed.py's.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # lets this script import from the repository root

from benchmarks.floors import MIB, Line, Record, Verdict, main, ours

from multiring.bench.statistics import Interval, ratio_interval

Judge = Callable[[list[Record]], Iterable[Verdict]]
TORCH = "multiring-torch"
FOUR = "--hosts 4 --slots 1 --link 1gbit --alternations 6"
# Most of a job is its start and the verified steps: few timed ones in each of many jobs, and only who is judged.
FEW = "--steps 4 --warmup 1 --leave-out multiring"
DDP = ("ddp", "ddp-multiring", "ddp-multiring-hook")
FSDP = ("fsdp", "fsdp-multiring", "fsdp-multiring-arena")
COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")


@dataclass(frozen=True, slots=True)
class Floor:
    """What the ratio of Gloo's seconds to the backend's has to be, in words, and whether it is."""

    text: str
    holds: Callable[[Interval], bool]


def faster(times: float) -> Floor:
    """Return the floor of being so many times as fast."""
    return Floor(f"{times:g} x", lambda found: found.middle >= times)


NOT_SLOWER = Floor("reaches 0.97 x", lambda found: found.high >= 0.97)


def times_of(found: Interval) -> str:
    """Return the ratio and its interval in words."""
    return f"{found.middle:.2f} x gloo [{found.low:.2f}, {found.high:.2f}]"


def collectives(floor: Floor, aim: str, *names: str) -> Judge:
    """Return what judges how many times faster than Gloo collectives of 8 MiB are."""

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
    """Return what judges how many times faster a training step is than the same over Gloo."""

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
