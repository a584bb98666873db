"""Compare random Keras programs on several ranks with the same in one process.

    python benchmarks/evidence/keras/main.py [--seconds 1800] [--seed 1] [--only FAMILY,...] [--again]
        [--against CHECKOUT]

A family is a kind of program on one of Keras' backends. Rank 0 gets the expected result from a process without
multiring. The sign of a fault names the differing result and the unusual features of the program, so the fault of a
single feature can be recognized. The families of the other frameworks' adapters are in
benchmarks/evidence/keras/frameworks.py.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.jobs.job import ROOT
from benchmarks.evidence.keras.frameworks import FRAMEWORKS, SHOWS_FRAMEWORKS
from benchmarks.evidence.support.cases import Family, Fault, Random, Topic, main

from multiring._settings import inherited_environment

TOLERANCE = 2e-4  # the tolerance for float32 after some training steps
LAUNCHERS = ("MULTIRING_", "OMPI_", "PMI", "SLURM_")


@cache
def ready() -> Any:
    """Join the job and return multiring.keras."""
    import multiring.keras as mk  # noqa: PLC0415 -- slow, and for ranks alone

    mk.init()
    logging.getLogger("multiring").setLevel(logging.ERROR)
    return mk


@dataclass
class Truth:
    """The process that runs the cases without multiring."""

    process: "subprocess.Popen[str]"

    def of(self, kind: str, entropy: list[int]) -> dict[str, Any]:
        """Return the result of a case in one process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([kind, entropy]), file=self.process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


@cache
def truth() -> Truth:
    """Return the reference process. The first call starts it."""
    kept = {name: each for name, each in inherited_environment().items() if not name.startswith(LAUNCHERS)}
    command = [sys.executable, str(ROOT / "benchmarks" / "evidence" / "keras" / "truth.py")]
    process = subprocess.Popen(  # noqa: S603 -- our own
        command, env=kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    return Truth(process)


@cache
def written() -> list[str]:
    """Return the list of the paths that this process opens for writing.

    Later opens extend the list.
    """
    paths: list[str] = []

    def hook(event: str, arguments: Any) -> None:
        if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax"):
            paths.append(str(arguments[0]))

    sys.addaudithook(hook)
    return paths


def case(kind: str, random: Random, folder: Path) -> Iterator[Fault]:
    """Run a case on this rank and compare the result with that of one process."""
    mk = ready()
    import keras  # noqa: PLC0415 -- slow, and for ranks alone
    from benchmarks.evidence.keras.programs import Api  # noqa: PLC0415 -- as above
    from benchmarks.evidence.keras.truth import drawn, result_of  # noqa: PLC0415 -- as above

    entropy = random.integers(1 << 30, size=4).tolist()
    if mk.rank() == 0:
        truth()  # start the process early; it imports Keras
    draws, features = drawn(kind, entropy)
    api = Api(mk.distribute, mk.allgather_object, mk.rank(), mk.size())
    written().clear()
    found = result_of(kind, draws, features, api, folder)
    everybodys = mk.allgather_object(found)
    names = mk.allgather_object({Path(path).name for path in written() if str(folder) in path})
    if mk.rank() == 0 and (twice := names[0].intersection(*names[1:])):
        yield Fault(f"{kind}: written on every rank: {'+'.join(features)}", f"{sorted(twice)}")
    keras.backend.clear_session()
    wanted = mk.broadcast_object(truth().of(kind, entropy) if mk.rank() == 0 else None, 0)
    if mk.rank() == 0:
        yield from faults(kind, features, everybodys, wanted)


def faults(
    kind: str, features: Sequence[str], everybodys: Sequence[Mapping[str, Any]], wanted: Mapping[str, Any]
) -> Iterator[Fault]:
    """Yield the ranks' differences from each other and from a single process."""
    name = "+".join(features) or "plain"
    raised = [each["raised"] for each in everybodys if "raised" in each]
    if "raised" in wanted:
        if len(raised) < len(everybodys):
            yield Fault(f"{kind}: not raised: {name}", f"one process raised {wanted['raised']}")
        return
    if raised:
        which = raised[0].partition(":")[0] if kind == "callbacks" else "raised"
        where = next(each["where"] for each in everybodys if "raised" in each)
        yield Fault(f"{kind}: {which}: {name}", f"{raised} {where}")
        return
    for rank, each in enumerate(everybodys):
        if not alike(each["weights"], everybodys[0]["weights"], exact=True):
            yield Fault(f"{kind}: replicas: {name}", f"rank {rank} has other weights than rank 0")
    for what, value in wanted.items():
        if not alike(everybodys[0][what], value):
            sign = "unreadable" if "unreadable" in json.dumps(everybodys[0][what]) else what
            trains = [each for each in features if each != "validation"]  # validation does not change the weights
            shown = ("+".join(trains) or "plain") if what == "weights" else name
            yield Fault(f"{kind}: {sign}: {shown}", f"{short(everybodys[0][what])}, in one process {short(value)}")


def alike(one: Any, other: Any, *, exact: bool = False) -> bool:
    """Return whether two results are equal, up to rounding unless `exact`."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name], exact=exact) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(alike(*pair, exact=exact) for pair in zip(one, other, strict=True))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other if exact else bool(np.isclose(one, other, rtol=TOLERANCE, atol=TOLERANCE))
    return bool(one == other)


def short(value: Any) -> str:
    """Return a result as a text of limited length."""
    text = json.dumps(value)
    return text if len(text) < 250 else text[:250] + "..."


def families() -> Iterator[Family]:
    """Yield the families of each backend."""
    for backend, ranks in (("torch", 2), ("tensorflow", 2), ("jax", 2), ("torch", 3)):
        for kind in ("training", "structures", "gans", "callbacks"):
            if (kind == "gans" and backend == "jax") or (ranks == 3 and kind not in ("training", "callbacks")):
                continue
            yield Family(
                name=f"{kind}-{backend}-{ranks}",
                run=partial(case, kind),
                ranks=ranks,
                deadline_s=240.0,  # the first case of a turn waits for another process to import Keras
                variables={"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
            )


SHOWS: dict[str, Sequence[str]] = {
    "fw_05_keras_checkpoint.py": (
        "callbacks: written on every rank:",
        "callbacks: BadZipFile:",
        "callbacks: BlockingIOError:",
        "callbacks: FileExistsError:",
        "callbacks: unreadable:",
    ),
    "fw_06_keras_silent.py": ("training: weights: sum", "training: replicas: batch-norm", "gans: replicas: plain"),
    "fw_07_keras_evaluate.py": ("training: evaluate: weighted-metrics", "training: evaluate: two-outputs"),
    "fw_08_keras_refused.py": (
        "training: raised: class-weight",
        "training: raised: own-step",
        "training: raised: generator",
    ),
    "fw_09_keras_vae.py": ("structures: structure: plain",),
    "reader_03.py": ("training: weights: integer-weights",),
    "reader_11.py": ("training: evaluate: pydataset",),
    "bug_24_keras_corners.py": (
        "training: raised: masks",
        "training: raised: class-weight",
        "training: history: plain",
    ),
    **SHOWS_FRAMEWORKS,
}
TOPIC = Topic(name="keras", program="evidence/keras/main.py", families=[*FRAMEWORKS, *families()], shows=SHOWS)

if __name__ == "__main__":
    sys.exit(main(TOPIC))
