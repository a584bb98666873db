"""What runs on the backend "multiring", beside Gloo: the tables of docs/torch.md, made anew.

    python benchmarks/conformance_torch.py [--only programs,suite] [--failures FILE]

Runs the programs of examples/distributed with both names, and torch's own tests of its backends. Exits with 1 where a
program's losses differ from Gloo's by more than they may, or one of torch's tests fails that Gloo passes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: the tests' programs are there

from benchmarks.evidence import commit, machine
from tests.frameworks.program_cases import CASES, FIRST, LATER, apart, losses
from tests.frameworks.program_ranks import losses_of
from tests.wire.ranks import RanksFailed

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "torch.md"
OURS, THEIRS = "multiring", "gloo"
LIBRARIES = ("torch", "accelerate", "pytorch-lightning", "transformers")
MPI_ONLY = "Only MPI supports"  # the reason of tests that torch runs with that backend alone


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one of torch's tests ended: pass, not applicable or fail, and why."""

    name: str
    how: str
    why: str
    seconds: float


def main() -> int:
    """Make the tables, and write them into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="programs,suite", help="some of programs,suite")
    parser.add_argument("--failures", type=Path, help="where to write what failed, in full")
    arguments = parser.parse_args()
    parts = {"programs": programs, "suite": suite}
    wrong: list[str] = []
    for name in arguments.only.split(","):
        lines = [made_by(), "", *parts[name](wrong)]
        print("\n".join(lines), flush=True)
        write(name, lines)
    if arguments.failures:
        arguments.failures.write_text("\n\n".join(wrong))
    return 1 if wrong else 0


def made_by() -> str:
    """Return what the figures are of."""
    versions = ", ".join(f"{library} {version(library)}" for library in LIBRARIES)
    return f"{versions}; {machine()}; commit {commit()}."


def write(name: str, lines: list[str]) -> None:
    """Put the lines between the page's marks of that name."""
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = PAGE.read_text().partition(first)
    _, _, after = rest.partition(last)
    PAGE.write_text("\n".join([before + first, *lines, last]) + after)


def programs(wrong: list[str]) -> Iterator[str]:
    """Yield the table of programs: how far their losses are from Gloo's."""
    yield "| | program | 2 ranks, 10 steps | 3 or 4 ranks, 50 steps: first step, all steps |"
    yield "|---|---|---|---|"
    for name, case in CASES.items():
        shown = dict.fromkeys((2, 3), "-")
        for ranks in case.sizes:
            try:
                differences = apart(losses(name, ranks, OURS), losses(name, ranks, THEIRS))
            except RanksFailed as error:
                wrong.append(f"{name}, {ranks} ranks: {error}")
                shown[min(ranks, 3)] = "FAILS"
                continue
            holds = differences[0] <= FIRST and max(differences) <= (LATER if ranks > 2 else 0)
            if not holds:
                wrong.append(f"{name}, {ranks} ranks: {differences}")
            text = "same bits" if not any(differences) else f"{differences[0]:.1e}, {max(differences):.1e}"
            shown[min(ranks, 3)] = ("" if holds else "DIFFERS ") + (f"{ranks}: {text}" if ranks > 2 else text)
        yield f"| {case.what} | `{' '.join([case.program, *case.arguments])}` | {shown[2]} | {shown[3]} |"
    yield resumed(wrong)
    yield ""
    yield averages()


def resumed(wrong: list[str]) -> str:
    """Return the table's row of a checkpoint that 2 ranks save and 3 go on with."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend in (OURS, THEIRS):
            where = ("--folder", str(Path(folder) / backend))
            losses_of("checkpoint.py", 2, *where, backend=backend)
            found[backend] = losses_of("checkpoint.py", 3, *where, "--resume", backend=backend)
    differences = apart(found[OURS], found[THEIRS])
    if differences[0] > FIRST or max(differences) > LATER:
        wrong.append(f"checkpoint: {differences}")
    text = f"saved by 2, 10 steps on with 3: {differences[0]:.1e}, {max(differences):.1e}"
    return f"| Distributed checkpoint, FSDP2 | `checkpoint.py` | - | {text} |"


def averages() -> str:
    """Return what FSDP2's averages give, beside the sums that it divides itself."""
    shown = []
    for backend in (OURS, THEIRS):
        averaged = losses_of("fsdp2.py", 2, "--steps", "10", backend=backend)
        divided = losses_of("fsdp2.py", 2, "--steps", "10", "--sum", backend=backend)
        furthest = max(apart(averaged, divided))
        shown.append(f"{backend} {'gives the same bits' if furthest == 0 else f'is {furthest:.1e} away'}")
    what = "FSDP2 with averages (`fsdp2.py`, 2 ranks, 10 steps), beside sums that it divides by itself"
    return f"{what}: {', '.join(shown)}."


def suite(wrong: list[str]) -> Iterator[str]:
    """Yield the tables of torch's own tests."""
    with ThreadPoolExecutor() as pool:  # ranks mostly wait for each other
        ours, theirs = pool.map(outcomes, (OURS, THEIRS))
    yield "| `distributed_test`, 4 ranks | multiring | Gloo |"
    yield "|---|---|---|"
    for how in ("pass", "not applicable", "fail"):
        yield f"| {how} | {count(ours, how)} | {count(theirs, how)} |"
    yield ""
    yield "| not applicable because | tests |"
    yield "|---|---|"
    reasons = Counter(each.why for each in ours.values() if each.how == "not applicable")
    for why, number in reasons.most_common():
        yield f"| {why} | {number} |"
    yield ""
    yield "| fails | on multiring | on Gloo |"
    yield "|---|---|---|"
    for name, each in ours.items():
        if "fail" in (each.how, theirs[name].how):
            yield f"| `{name}` | {each.how} | {theirs[name].how} |"
        if each.how == "fail" and theirs[name].how != "fail":
            wrong.append(f"{name}: {each.why}")


def count(found: dict[str, Outcome], how: str) -> int:
    """Return how many tests ended so."""
    return sum(each.how == how for each in found.values())


def outcomes(backend: str) -> dict[str, Outcome]:
    """Run torch's tests, and return how each ended."""
    found = {each.name: each for each in run("gloo", backend)}
    of_mpi = [each.name for each in found.values() if each.how == "not applicable" and MPI_ONLY in each.why]
    return found | {each.name: each for each in run("mpi", backend, *of_mpi)}


def run(reading: str, backend: str, *names: str) -> Iterator[Outcome]:
    """Yield how tests ended, as they end."""
    command = [sys.executable, str(ROOT / "benchmarks" / "torch_suite.py"), reading, backend, *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # noqa: TID251 -- the tests' own is in it
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:  # noqa: S603
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b'{"name"'):
                outcome = Outcome(**json.loads(line))
                print(f"{backend}: {outcome.name}: {outcome.how}, {outcome.seconds:.1f} s", file=sys.stderr)
                yield outcome


if __name__ == "__main__":
    sys.exit(main())
