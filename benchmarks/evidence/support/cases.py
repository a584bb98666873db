"""Run random cases and compare multiring's results with an independent reference.

    python benchmarks/evidence/TOPIC/main.py [--seconds 1800] [--seed 1] [--only FAMILY,...] [--again]
        [--against CHECKOUT]

The evidence programs of all topics share this module. A topic consists of families. A family draws a case from a seeded
generator, runs it with multiring, computes the expected result by other means, and yields a `Fault` for each
difference. Families take turns. A turn is a process, or a job of several ranks, that runs some cases. If a turn crashes
or hangs, its current case counts as a fault, and the next turn starts with the following case.

Every case is recorded in build/evidence/. The same command, started again, continues from there. Each fault is printed
with a command that repeats it. The exit code is 1 if a case showed a fault or if a family ran no case, and 0 otherwise.

`--against CHECKOUT` runs the cases on the multiring of another checkout, whose native core must be built. The file
benchmarks/evidence/support/topics.toml lists the topic's faulty programs. The run ends as soon as a case has shown the
fault of each program. The exit code is 0 if the cases found at least 80 % of these faults.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.evidence.jobs.job import ROOT
from benchmarks.evidence.support.claims import commit, machine

from multiring._settings import inherited_environment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# An in-place installation adds an import hook that finds its own checkout's multiring and ignores PYTHONPATH. Python
# imports this text as `sitecustomize` after the hook is installed, and the text removes the hook. It applies to each
# process of a turn and to their child processes. The rest of the text gives a former checkout this checkout's names.
SITE_CUSTOMIZE = """import sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__]
""" + (ROOT / "benchmarks/tools/former_packages.py").read_text(encoding="utf-8")
TURN_S = 15.0
# Turns with --against are short, because a family that has shown all its faults gets no more turns.
AGAINST_TURN_S = 5.0
# Many cases hang on an old checkout, and only a few hangs are faults to be found.
AGAINST_DEADLINE_S = 60.0
START_S = 90.0  # The time limit for a turn's first case to begin. Imports are slow on a loaded machine.
MOST_CASES = 200
MUST_FIND = 0.8
TOLD = 600  # the number of characters printed of a fault's text

Random = np.random.Generator


@dataclass(frozen=True, slots=True)
class Fault:
    """A difference between multiring's result and the expected result.

    Attributes:
        sign: The kind of fault. All cases that show the same kind have the same sign.
        text: The result that was found, and the result that was expected.
    """

    sign: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A kind of random cases.

    Attributes:
        run: Runs one case and yields its faults. It gets the case's generator and an empty folder, which the ranks of
            the case share.
        ranks: The number of ranks that run each case together under `multiring run`. 0 runs the case in a process
            without a launcher.
        deadline_s: The time after which a case counts as hung.
        case_s: The expected time of a case. Only the first turn uses it; later turns use the measured time.
        aims: The programs of topics.toml whose faults the family can show. With `--against`, the family
            gets no more turns once all of them were shown.
    """

    name: str
    run: Callable[[Random, Path], Iterator[Fault]]
    ranks: int = 0
    deadline_s: float = 60.0
    case_s: float = 1.0
    variables: Mapping[str, str] = field(default_factory=dict)
    aims: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """The families of an evidence program, and the faults that they must find.

    Attributes:
        shows: For each program of topics.toml, the signs that only its fault can cause. A sign that
            ends with a colon matches all signs that begin with it.
    """

    name: str
    program: str
    families: Sequence[Family]
    shows: Mapping[str, Sequence[str]]


def main(topic: Topic) -> int:
    """Run the command line of a topic's program; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0, help="total time of all runs of this command")
    parser.add_argument("--seed", type=int, default=1, help="seed of each family's first case")
    parser.add_argument(
        "--only", default=",".join(each.name for each in topic.families), help="families to run, separated by commas"
    )
    parser.add_argument("--again", action="store_true", help="drop the records of earlier runs of this command")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="checkout whose multiring runs the cases")
    parser.add_argument("--cases", type=int, help="number of cases of each family")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    known = {each.name: each for each in topic.families}
    if arguments.turn:
        run_turn(known[arguments.turn], arguments.seed, arguments.cases, arguments.folder)
        return 0
    if unknown := [name for name in arguments.only.split(",") if name not in known]:
        parser.error(f"unknown families {', '.join(unknown)}; known are {', '.join(known)}")
    families = [known[name] for name in arguments.only.split(",")]
    return Run(topic, families, arguments).go_on()


# ---- in a turn's process or rank ----


def run_turn(family: Family, seed: int, cases: int, folder: Path) -> None:
    """Run cases one after the other, and log a line before and after each case."""
    rank = inherited_environment().get("RANK", "0") if family.ranks else "0"
    with (folder / f"answers.{rank}").open("w", encoding="utf-8") as answers:
        for number in range(seed, seed + cases):
            print(json.dumps({"begins": number}), file=answers, flush=True)
            shared = folder / str(number)
            shared.mkdir(exist_ok=True)
            faults = list(faults_of(family, number, shared))
            print(json.dumps({"seed": number, "faults": faults}), file=answers, flush=True)


def faults_of(family: Family, seed: int, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the sign and the text of each fault of a case.

    An exception that the case raises counts as a fault.
    """
    random = np.random.default_rng((seed, zlib.crc32(family.name.encode())))
    try:
        for fault in family.run(random, folder):
            yield fault.sign, fault.text
    except Exception as error:  # noqa: BLE001 -- any unexpected error is a fault
        where = "".join(traceback.format_exception(error))
        yield f"{family.name}: {type(error).__name__}", where[-2 * TOLD :]


# ---- in the process that starts turns ----


@dataclass(slots=True)
class Tally:
    """The progress of a family: its cases and faults so far."""

    next_seed: int
    cases: int = 0
    case_s: float = 1.0
    faults: Counter[str] = field(default_factory=Counter)


class Run:
    """The run of a topic: its families take turns until the time is used up."""

    def __init__(self, topic: Topic, families: Sequence[Family], arguments: argparse.Namespace) -> None:
        self._topic, self._families, self._arguments = topic, families, arguments
        self._tree: Path = (arguments.against or ROOT).resolve()
        self._tallies = {each.name: Tally(arguments.seed, case_s=each.case_s) for each in families}
        self._spent_s = 0.0
        self._record = ROOT / "build" / "evidence" / f"{topic.name}-{commit_in(self._tree)}-{arguments.seed}.jsonl"
        self._record.parent.mkdir(parents=True, exist_ok=True)
        if arguments.again:
            self._record.unlink(missing_ok=True)
        self._take_back()

    def go_on(self) -> int:
        """Run turns, print the table and return the exit code."""
        print(f"# Random cases: {self._topic.name}, {time.strftime('%Y-%m-%d %H:%M')}\n")
        command = shlex.join(["python", *sys.argv])
        print(f"`{command}` at commit {commit()}, cases on {commit_in(self._tree)}, {machine()}\n", flush=True)
        for family in cycle(self._families):
            tally = self._tallies[family.name]
            if self._is_over():
                break
            if self._has_shown_all(family):
                continue
            left_s = self._arguments.seconds - self._spent_s
            turn_s = TURN_S if self._arguments.against is None else AGAINST_TURN_S
            # On a slow machine the first families must leave time for a turn of each other one.
            turn_s = min(turn_s, left_s / max(1, sum(each.cases == 0 for each in self._tallies.values())))
            cases = min(max(1, int(min(turn_s, left_s) / tally.case_s)), MOST_CASES)
            if self._arguments.cases is not None:
                cases = min(cases, self._arguments.cases - tally.cases)
            if cases > 0:
                self._turn(family, tally, cases)
        return self._close()

    def _is_over(self) -> bool:
        if self._arguments.cases is not None:
            return all(each.cases >= self._arguments.cases for each in self._tallies.values())
        if self._spent_s >= self._arguments.seconds:
            return True
        return self._arguments.against is not None and (
            not self._unseen() or all(map(self._has_shown_all, self._families))
        )

    def _has_shown_all(self, family: Family) -> bool:
        """Return whether the family has shown all its faults of the other checkout."""
        if self._arguments.against is None:
            return False
        if not family.aims:  # A family without aims gets turns only if no family of the topic has aims.
            return any(each.aims for each in self._families)
        return not set(family.aims) & set(self._unseen())

    def _turn(self, family: Family, tally: Tally, cases: int) -> None:
        begun = time.monotonic()
        first = tally.next_seed
        with tempfile.TemporaryDirectory(prefix="multiring-evidence-") as name:
            folder = Path(name)
            ended = self._run_process(family, first, cases, folder)
            answers = read_answers(folder)
        seconds = time.monotonic() - begun
        self._spent_s += seconds
        for seed in range(first, first + cases):
            faults = answers.get(seed)
            if faults is None:
                faults = [(f"{family.name}: {ended.partition(chr(10))[0]}", ended)]
            line = {"family": family.name, "seed": seed, "faults": faults, "spent_s": seconds / cases}
            with self._record.open("a", encoding="utf-8") as file:
                print(json.dumps(line), file=file)
            self._count(line)
            for sign, text in faults:
                self._tell(family, seed, sign, text)
            if seed not in answers:
                break
        tally.case_s = max(seconds / max(len(answers), 1), 1e-3)

    def _run_process(self, family: Family, seed: int, cases: int, folder: Path) -> str:
        """Run a turn's process to its end.

        Returns:
            How the process ended. This is the fault's text for a case without an answer.
        """
        program = [str(ROOT / "benchmarks" / self._topic.program), "--turn", family.name, "--seed", str(seed)]
        program += ["--cases", str(cases), "--folder", str(folder)]
        launcher = ["-m", "multiring", "run", "-n", str(family.ranks), "--", sys.executable] if family.ranks else []
        variables = {
            **inherited_environment(),
            "OMP_NUM_THREADS": "1",
            **family.variables,
            "PYTHONPATH": os.pathsep.join([str(self._tree / "src"), str(ROOT), str(folder / "hooks")]),
        }
        (folder / "hooks").mkdir()
        (folder / "hooks" / "sitecustomize.py").write_text(SITE_CUSTOMIZE, encoding="utf-8")
        with (folder / "output").open("w+") as output:
            process = subprocess.Popen(  # noqa: S603 -- our own
                [sys.executable, *launcher, *program],
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            against = self._arguments.against is not None
            deadline_s = min(family.deadline_s, AGAINST_DEADLINE_S) if against else family.deadline_s
            hung = not waited(process, folder, deadline_s)
            if hung:
                process.terminate()  # the launcher shuts its ranks down
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.seek(0)
            said = output.read()[-4 * TOLD :]
        return f"{'hang' if hung else f'exit code {process.returncode}'}\n{said}"

    def _count(self, line: Mapping[str, Any]) -> None:
        tally = self._tallies.get(line["family"])
        if tally is not None:
            tally.cases += 1
            tally.next_seed = max(tally.next_seed, line["seed"] + 1)
            tally.faults.update(sign for sign, _ in line["faults"])

    def _take_back(self) -> None:
        if self._record.exists():
            for text in self._record.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                self._count(line)
                self._spent_s += line["spent_s"]

    def _tell(self, family: Family, seed: int, sign: str, text: str) -> None:
        if self._tallies[family.name].faults[sign] > 1:
            return  # One example of a sign is enough to repeat it. The table counts all.
        program = f"benchmarks/{self._topic.program}"
        again = f"python {program} --only {family.name} --seed {seed} --cases 1 --again"
        print(f"FAULT {sign}; again by: {again}\n    {text[-TOLD:].strip()}", flush=True)

    def _found(self) -> dict[str, bool]:
        signs = {sign for each in self._tallies.values() for sign in each.faults}
        return {
            program: any(
                sign == want or (want.endswith(":") and sign.startswith(want)) for want in wanted for sign in signs
            )
            for program, wanted in ((each, self._topic.shows.get(each, ())) for each in programs_of(self._topic.name))
        }

    def _unseen(self) -> list[str]:
        return [program for program, found in self._found().items() if not found]

    def _close(self) -> int:
        print("\n| family | cases | faults |\n|---|---|---|")
        for name, tally in self._tallies.items():
            print(f"| {name} | {tally.cases} | {tally.faults.total()} |")
        for sign, count in sum((each.faults for each in self._tallies.values()), Counter()).most_common():
            print(f"{count:6}  {sign}")
        print(f"\n{self._spent_s:.0f} s", flush=True)
        if self._arguments.against is None:
            if idle := [name for name, each in self._tallies.items() if each.cases == 0]:
                print(f"no case of {', '.join(idle)} ran: give more --seconds, or --again to start anew")
            return 1 if idle or any(each.faults for each in self._tallies.values()) else 0
        found = self._found()
        for program, is_found in found.items():
            print(f"{'found' if is_found else 'NOT FOUND'}  {program}")
        share = sum(found.values()) / len(found)
        print(f"{sum(found.values())} of {len(found)} programs found ({share:.0%})")
        return 0 if share >= MUST_FIND else 1


def waited(process: "subprocess.Popen[bytes]", folder: Path, deadline_s: float) -> bool:
    """Wait for a turn's process; return False if no rank logged a line in time."""
    lines, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        now = sum(path.stat().st_size for path in folder.glob("answers.*"))
        if now != lines:
            lines, since = now, time.monotonic()
        if time.monotonic() - since > (deadline_s + (0 if lines else START_S)) * crowd():
            return False
    return True


def crowd() -> float:
    """Return the number of processes per CPU, at least 1.

    Deadlines are multiplied by this number, because work takes longer on a loaded machine.
    """
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def read_answers(folder: Path) -> dict[int, list[tuple[str, str]]]:
    """Return the faults of each case that all ranks of a turn have finished."""
    ranks = []
    for path in sorted(folder.glob("answers.*")):
        lines = [json.loads(text) for text in path.read_text(encoding="utf-8").split("\n")[:-1]]
        ranks.append({line["seed"]: line["faults"] for line in lines if "seed" in line})
    finished = set.intersection(*(set(each) for each in ranks)) if ranks else set()
    return {seed: [tuple(fault) for each in ranks for fault in each[seed]] for seed in sorted(finished)}


def commit_in(tree: Path) -> str:
    """Return the short name of the commit that a checkout is at."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "-C", str(tree), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603 -- our own


def programs_of(topic: str) -> list[str]:
    """Return the programs whose faults a topic must find."""
    with (ROOT / "benchmarks" / "evidence" / "support" / "topics.toml").open("rb") as file:
        return list(tomllib.load(file)[topic]["programs"])
