"""multiring verify gpu: check on the GPUs of this host what multiring does with CUDA tensors.

Each part is a job of a few ranks, with claims that hold or not, and figures. A part that has a result in the folder is
not run again, so the command may be stopped and repeated. It writes gpu.json and gpu.md into the folder. It needs a
GPU, torch's CUDA build and no network. Exit codes: 0 all parts that ran have passed, 1 a part has failed, 3 nothing
could be run.
"""

import argparse
from datetime import datetime, timezone
from pathlib import Path

from multiring._bench.machine import hardware
from multiring._cli.output import show
from multiring._verify.parts import PARTS
from multiring._verify.results import FAILED, NOT_RUN, PartResult
from multiring._verify.running import chosen, machine_here, run_all

_FAILED, _NOT_RUN = 1, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    names = ", ".join(each.name for each in PARTS)
    parser.add_argument("what", choices=["gpu"], help="what to verify")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("multiring-verify"),
        metavar="FOLDER",
        help="folder (default: multiring-verify)",
    )
    parser.add_argument("--only", default="", metavar="PART,...", help=f"run these parts: {names}")


def run(arguments: argparse.Namespace) -> int:
    """Run the parts and return the exit code."""
    parts = chosen([each for each in arguments.only.split(",") if each])
    machine = machine_here()
    heading = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"multiring verify gpu --out {arguments.out}",
        "host": hardware(),
        **{name: ", ".join(each) if isinstance(each, list) else each for name, each in machine.items()},
    }
    results = run_all(parts, arguments.out, heading, machine, tell=_tell)
    show(f"{arguments.out / 'gpu.md'} and gpu.json have all results")
    if any(each.status == FAILED for each in results):
        return _FAILED
    return _NOT_RUN if all(each.status == NOT_RUN for each in results) else 0


def _tell(result: PartResult) -> None:
    show(f"{result.status:8} {result.part:12} {result.title}, {result.seconds:.0f} s")
    for each in result.checks:
        if not each.holds:
            show(f"         does not hold: {each.claim}: {each.found}")
    if result.reason:
        show("         " + result.reason.replace("\n", "\n         "))
