"""Scripts run as `python SCRIPT` runs them, but by ranks that are forked when what they import is imported already.

That takes a tenth of the processor's time where a script imports torch or TensorFlow and does little. What a launcher
does is not seen: of each script one test starts real processes.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.wire.ranks import Here, Process, report_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What the processes of a script are told besides its arguments."""

    alone: bool = False  # nothing of a launcher of ours
    environments: tuple[dict[str, str], ...] = ()  # by rank


def live(here: Here, script: str, arguments: tuple[str, ...], start: Start) -> int:
    """Be `python SCRIPT ARGUMENT...` and return its exit code."""
    if start.alone:
        for name in [name for name in os.environ if name.startswith("MULTIRING_")]:
            del os.environ[name]
    if start.environments:
        os.environ.update(start.environments[here.rank])
        sys.path[1:1] = start.environments[here.rank].get("PYTHONPATH", "").split(os.pathsep)
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
    """Return each rank's exit code, and what it wrote."""
    report = report_of(live, ranks, str(script), arguments, start, process=process, deadline_s=deadline_s, **settings)
    return [(outcome.exit_code or outcome.value, outcome.output) for outcome in report.outcomes]
