"""Print claims with their measured figures, and name the commit and the machine of a measurement."""

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim, its measured figure, and whether the claim holds."""

    text: str
    figure: str
    holds: bool


def report(claims: Mapping[str, Callable[[int], Iterator[Claim]]], description: str) -> int:
    """Print the claims selected on the command line; return 1 if any claim fails."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--only", default=",".join(claims), help=f"some of {','.join(claims)}")
    parser.add_argument("--short", action="store_true", help="run a tenth of everything, as a trial")
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="run 1/N of everything")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.only.split(",") if name not in claims]:
        parser.error(f"unknown {', '.join(unknown)}; known are {', '.join(claims)}")
    share = 10 if arguments.short else arguments.divide
    print(f"# Evidence, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{' '.join(['python', *sys.argv])}` at commit {commit()}, {machine()}\n")
    print("| | claim | measured |\n|---|---|---|", flush=True)
    missed = 0
    for name in arguments.only.split(","):
        for claim in claims[name](share):
            missed += not claim.holds
            print(f"| {'holds' if claim.holds else 'MISSED'} | {claim.text} | {claim.figure} |", flush=True)
    return 1 if missed else 0


def shown(failures: list[str]) -> str:
    """Return the number of failures and the first failure, as one line for the table."""
    return f"{len(failures)} failed; first: {failures[0]}".replace("\n", "<br>") if failures else ""


def commit() -> str:
    """Return the commit's name, marked if the working tree differs from it."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"  # noqa: S603


def machine() -> str:
    """Describe this machine: cores, CPU model, Linux and Python version."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(": ")[2]
    return f"{os.cpu_count()} cores of {name}, Linux {platform.release()}, Python {platform.python_version()}"
