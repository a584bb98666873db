"""multiring trials: find hyper-parameters of a script by many trials, and show a study as a page.

    multiring trials run study.toml -- python train.py --rate {rate}
    multiring trials page study.db -o study.html

`run` starts each trial as a job of its own. docs/trials.md describes the file of a study.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from multiring._cli.output import show
from multiring._launch import CommandError
from multiring.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from multiring.trials.results import TrialResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser("run", help="run a study of a script", allow_abbrev=False)
    run.usage = "multiring trials run [-n N] STUDY [--] PROGRAM [ARGUMENTS...]"
    run.add_argument("study", type=Path, metavar="STUDY", help="the file of the study, in TOML")
    run.add_argument("-n", dest="ranks", type=_count, metavar="N", help="how many ranks run at a time")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM...", help="the program of every rank")
    page = actions.add_parser("page", help="write a page of a study", allow_abbrev=False)
    page.add_argument("storage", metavar="STORAGE", help="the study's storage: a file, or a URL of SQLAlchemy")
    page.add_argument("--name", metavar="NAME", help="the study's name; not needed if the storage has one study")
    page.add_argument("-o", "--output", type=Path, metavar="FILE", help="the page (default: STUDY.html)")


def run(arguments: argparse.Namespace) -> int:
    """Run an action and return its exit code; that of `run` is 1 if no trial is complete, or a seed has no figure."""
    try:
        return _run(arguments) if arguments.action == "run" else _page(arguments)
    except ImportError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    from multiring._cli.run import program_of  # noqa: PLC0415 -- the other commands start faster without
    from multiring.trials.command.study import run_command_study  # noqa: PLC0415 -- as above
    from multiring.trials.plan import imported_optuna  # noqa: PLC0415 -- as above

    optuna = imported_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if arguments.program and arguments.program[0].startswith("-") and arguments.program[0] != "--":
        raise ArgumentError(f"{arguments.program[0]}: want options before {arguments.study}, and -- before the program")
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        raise ArgumentError("no program: want multiring trials run study.toml -- python train.py")
    try:
        found = run_command_study(arguments.study, program_of(program), arguments.ranks, show)
    except CommandError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return error.exit_code
    states = [each.state for each in found.result.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("complete", "pruned", "failed"))
    show(f"study {found.result.name!r}: {len(states)} trials: {counts}")
    if found.best is not None:
        show(f"best: trial {found.best.number}: {found.best.value!r}, {found.best.params}")
        show(f"    {found.best_command}")
        if found.judged is not None:
            show(found.judged.told(found.best.value or 0.0))
    if found.signal:
        show("the study was ended early; the same command goes on with it if the file names a storage")
        return 128 + found.signal
    if found.best is None:
        show(f"no trial is complete; {why_none(found.result.trials)}")
        return 1
    if found.judged is None:
        show("not judged: the best of many trials looks better than it is; a table [judge] trains it again")
        return 0
    return 1 if found.judged.problems else 0


def why_none(trials: "Sequence[TrialResult]") -> str:
    """Return why no trial is complete: the reason of the first one that failed, or else the state of the first one."""
    shown = sorted(trials, key=lambda each: not each.reason)[:1]
    return "".join(f"trial {each.number}: {each.reason or each.state}" for each in shown) or "none ran"


def _page(arguments: argparse.Namespace) -> int:
    from multiring.trials.page import write_page  # noqa: PLC0415 -- as above

    try:
        path = write_page(arguments.storage, arguments.name, arguments.output)
    except OSError as error:
        raise ArgumentError(f"-o {arguments.output}: the page cannot be written: {error}") from error
    show(str(path))
    return 0


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"{text!r} ranks: want an integer >= 1")
    from multiring.trials.command.study_file import MOST_RANKS  # noqa: PLC0415 -- the other commands start faster without

    if len(text) > len(str(MOST_RANKS)) or int(text) > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text} ranks: want at most {MOST_RANKS} on this host")
    return int(text)
