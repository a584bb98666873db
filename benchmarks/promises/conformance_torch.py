"""Compare the backend "multiring" with Gloo and write the tables of docs/torch.md.

    python benchmarks/promises/conformance_torch.py [--only programs,suite] [--failures FILE]

The program runs examples/distributed with both backends on 2, 3 and 4 ranks, and torch's own tests of its backends. The
exit code is 1 if a program fails or its losses differ too much from Gloo's. It is also 1 if one of torch's tests fails
on multiring and passes on Gloo. The extra "conformance" must be installed.
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

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import the tests' programs

from benchmarks.evidence.support.claims import commit, machine
from tests.support.program_cases import CASES, apart, is_close, losses
from tests.support.program_ranks import ProgramError, losses_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "torch.md"
OURS, THEIRS = "multiring", "gloo"
LIBRARIES = ("torch", "accelerate", "pytorch-lightning", "transformers")
SIZES = (2, 3, 4)
RESUMED = ((2, 3), (2, 4), (4, 2))  # the numbers of ranks that save a checkpoint, and that resume from it
DEADLINE_S = 1200.0  # the time limit for one program
AT_A_TIME = 3  # the number of programs at a time; their ranks import torch for seconds and wait for each other
FAILS, DIFFERS = "FAILS", "DIFFERS"
MPI_ONLY = "Only MPI supports"  # the reason that torch gives for tests which need the MPI backend


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one of torch's tests: pass, not applicable or fail, with a reason."""

    name: str
    how: str
    why: str
    seconds: float


def main() -> int:
    """Create the tables and write them into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="programs,suite", help="some of programs,suite")
    parser.add_argument("--failures", type=Path, help="file for the failures in full")
    arguments = parser.parse_args()
    parts = {"programs": programs, "suite": suite}
    wrong: list[str] = []
    by = made_by()  # read now, because the table written below changes a file of the commit
    for name in arguments.only.split(","):
        lines = [by, "", *parts[name](wrong)]
        print("\n".join(lines), flush=True)
        write(name, lines)
    if arguments.failures:
        arguments.failures.write_text("\n\n".join(wrong))
    return 1 if wrong else 0


def made_by() -> str:
    """Return the versions, the machine and the commit of the measurements."""
    versions = ", ".join(f"{library} {version(library)}" for library in LIBRARIES)
    return f"{versions}; {machine()}; commit {commit()}."


def write(name: str, lines: list[str]) -> None:
    """Write the lines between the page's markers with this name."""
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = PAGE.read_text().partition(first)
    _, _, after = rest.partition(last)
    PAGE.write_text("\n".join([before + first, *lines, last]) + after)


def programs(wrong: list[str]) -> Iterator[str]:
    """Yield the tables of programs: which of them run, and their distance from Gloo."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        compare = {
            (name, ranks): pool.submit(cell, name, ranks, wrong) for name, case in CASES.items() for ranks in case.sizes
        }
        resume = {sizes: pool.submit(resumption, *sizes, wrong) for sizes in RESUMED}
    rows, runs = [], {}
    for name, case in CASES.items():
        cells = [compare[name, ranks].result() if ranks in case.sizes else f"({case.why})" for ranks in SIZES]
        rows.append(f"| {case.what} | `{' '.join([case.program, *case.arguments])}` | {' | '.join(cells)} |")
        runs[case.what] = cells
    for (saved, resumed), found in resume.items():
        what = f"Distributed checkpoint: {saved} ranks save, {resumed} go on"
        runs[what] = [found.result() if ranks == resumed else "" for ranks in SIZES]
        rows.append(f"| {what} | `checkpoint.py` | {' | '.join(runs[what])} |")
    yield f"| | torch {version('torch')} |"
    yield "|---|---|"
    for what, cells in runs.items():
        yield f"| {what} | {'no' if any(text.startswith((FAILS, DIFFERS)) for text in cells) else 'yes'} |"
    yield ""
    yield "| | program | 2 ranks | 3 ranks | 4 ranks |"
    yield "|---|---|---|---|---|"
    yield from rows
    yield ""
    yield from averages(wrong)


def cell(name: str, ranks: int, wrong: list[str]) -> str:
    """Return the table cell of a case on this number of ranks."""
    try:
        ours, theirs = (losses(name, ranks, backend, DEADLINE_S) for backend in (OURS, THEIRS))
    except ProgramError as error:
        return failed(f"{name}, {ranks} ranks", error, wrong)
    return compared(f"{name}, {ranks} ranks", ours, theirs, ranks, wrong)


def resumption(saved: int, resumed: int, wrong: list[str]) -> str:
    """Return the table cell of a checkpoint that other ranks resume from."""
    found = {}
    name = f"checkpoint, {saved} ranks and {resumed}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            for backend in (OURS, THEIRS):
                where = ("--folder", str(Path(folder) / backend))
                losses_of("checkpoint.py", saved, *where, backend=backend, deadline_s=DEADLINE_S)
                found[backend] = losses_of(
                    "checkpoint.py", resumed, *where, "--resume", backend=backend, deadline_s=DEADLINE_S
                )
        except ProgramError as error:
            return failed(name, error, wrong)
    return compared(name, found[OURS], found[THEIRS], max(saved, resumed), wrong)


def failed(what: str, error: ProgramError, wrong: list[str]) -> str:
    """Return the table cell of a failed program, and record the failure."""
    print(f"{what}: {error}", file=sys.stderr)
    wrong.append(f"{what}: {error}")
    return FAILS


def compared(what: str, ours: list[float], theirs: list[float], ranks: int, wrong: list[str]) -> str:
    """Return the table cell with the distance of the losses from Gloo's.

    It has the relative differences at the first step and at the worst step.
    """
    differences = apart(ours, theirs)
    print(f"{what}: {differences[0]:.1e}, {max(differences):.1e}", file=sys.stderr)
    text = "same bits" if ours == theirs else f"{differences[0]:.1e}, {max(differences):.1e}"
    if is_close(ours, theirs, ranks):
        return text
    wrong.append(f"{what}: {differences}")
    return f"{DIFFERS} {text}"


def averages(wrong: list[str]) -> Iterator[str]:
    """Yield the table of FSDP2's averages beside sums that FSDP2 divides itself.

    Only multiring's results can fail; Gloo's are shown for comparison.
    """
    yield "| averages of FSDP2, beside sums that it divides by itself | multiring | Gloo |"
    yield "|---|---|---|"
    for name, ranks in (("fsdp2", 2), ("hsdp", 4)):
        shown = []
        for backend in (OURS, THEIRS):
            try:
                words = ("--sum", *CASES[name].arguments)
                divided = losses_of("fsdp2.py", ranks, *words, backend=backend, deadline_s=DEADLINE_S)
                averaged = losses(name, ranks, backend, DEADLINE_S)
            except ProgramError as error:
                shown.append(FAILS)
                if backend == OURS:
                    wrong.append(f"averages, {name}: {error}")
                continue
            shown.append("same bits" if averaged == divided else f"{max(apart(averaged, divided)):.1e} away")
            if backend == OURS and averaged != divided:  # division by 2 or 4 does not round, before the sum or after it
                wrong.append(f"averages, {name}: {apart(averaged, divided)}")
        yield f"| {CASES[name].what}, {ranks} ranks | {' | '.join(shown)} |"


def suite(wrong: list[str]) -> Iterator[str]:
    """Yield the tables of torch's own tests."""
    with ThreadPoolExecutor() as pool:  # ranks mostly wait for each other, so many can run at once
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
    """Return the number of tests with the result `how`."""
    return sum(each.how == how for each in found.values())


def outcomes(backend: str) -> dict[str, Outcome]:
    """Run torch's tests; return the result of each."""
    found = {each.name: each for each in run("gloo", backend)}
    of_mpi = [each.name for each in found.values() if each.how == "not applicable" and MPI_ONLY in each.why]
    return found | {each.name: each for each in run("mpi", backend, *of_mpi)}


def run(reading: str, backend: str, *names: str) -> Iterator[Outcome]:
    """Yield the results of tests as the tests end."""
    command = [sys.executable, str(ROOT / "benchmarks" / "promises" / "torch_suite.py"), reading, backend, *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # noqa: TID251 -- includes the tests' variables
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:  # noqa: S603
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b'{"name"'):
                outcome = Outcome(**json.loads(line))
                print(f"{backend}: {outcome.name}: {outcome.how}, {outcome.seconds:.1f} s", file=sys.stderr)
                yield outcome


if __name__ == "__main__":
    sys.exit(main())
