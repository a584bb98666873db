"""Run scripts like `python SCRIPT`, but on ranks forked after the slow imports.

This takes a tenth of the processor time if a script imports torch or TensorFlow and does little. It does not test the
launcher, which other tests start.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.ranks import Here, Process, report_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Settings of a script's processes besides the script's arguments."""

    alone: bool = False  # remove the variables that multiring's launcher sets
    environments: tuple[dict[str, str], ...] = ()  # additional variables, by rank
    folder: str = ""  # the working directory; default: the nursery's


def live(here: Here, script: str, arguments: tuple[str, ...], start: Start) -> int:
    """Run like `python SCRIPT ARGUMENT...` and return the exit code."""
    if start.alone:
        for name in [name for name in os.environ if name.startswith("MULTIRING_")]:
            del os.environ[name]
    if start.environments:
        os.environ.update(start.environments[here.rank])
        sys.path[1:1] = start.environments[here.rank].get("PYTHONPATH", "").split(os.pathsep)
    if start.folder:
        os.chdir(start.folder)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    program = ModuleType("__main__")
    program.__file__ = script
    sys.modules["__main__"] = program
    try:
        exec(compile(Path(script).read_text(encoding="utf-8"), script, "exec"), vars(program))  # noqa: S102 -- a script
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def run_script(
    script: Path,
    ranks: int,
    *arguments: str,
    process: Process,
    start: Start = Start(),
    deadline_s: float = 110.0,
    **settings: Any,
) -> list[tuple[int, str]]:
    """Return each rank's exit code and output."""
    report = report_of(live, ranks, str(script), arguments, start, process=process, deadline_s=deadline_s, **settings)
    return [(outcome.exit_code or outcome.value, outcome.output) for outcome in report.outcomes]
