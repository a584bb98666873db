"""The timeline of `multiring run`: make its path ready, and complete it from the ranks' parts."""

import sys
from dataclasses import replace
from pathlib import Path

from multiring._launch import JobOptions
from multiring.errors import ArgumentError
from multiring.trace import TakenError, clear, is_held, merge, part_path, parts_of, unfinished_of


def with_clear_timeline(options: JobOptions, path: Path) -> JobOptions:
    """Prepare the `path` of the timeline, and return the options to use.

    An old timeline at the path is removed. If another job records to the path, the returned options have no timeline.

    Raises:
        ArgumentError: a file at the path is not a timeline.
    """
    try:
        clear(path)
    except TakenError as error:
        print(f"multiring: no timeline of this job is recorded: {error}", file=sys.stderr)
        return replace(options, timeline=None)
    return options


def make_do_with_parts(path: Path, *, is_here: bool) -> None:
    """Write the timeline from the ranks' parts on this machine if rank 0 could not write it.

    Missing parts and other problems are printed. `is_here` says whether all ranks were on this machine.
    """
    found = parts_of(path)
    left = [each for each in found if not is_held(each)]  # a held part belongs to another job that records now
    if not left:
        if is_here and not found and not path.exists():
            print(
                f"multiring: nobody wrote the timeline {path}: the program did not join the job (multiring.init()), or "
                "ended before it joined",
                file=sys.stderr,
            )
        return
    names = ", ".join(str(each) for each in left)
    if part_path(path, 0) not in left:
        print(f"multiring: these parts are not in the timeline that rank 0 wrote: {names}", file=sys.stderr)
        return
    try:
        missing = merge(left, path)
    except (ArgumentError, OSError) as error:
        print(f"multiring: no timeline could be made of {names}: {error}", file=sys.stderr)
        return
    for each in (*left, *(unfinished_of(path) if left == found else ())):
        each.unlink(missing_ok=True)
    lacks = f"; it lacks ranks {', '.join(map(str, missing))}" if missing else ""
    print(f"multiring: {path} was made from the parts that the ranks wrote before they ended{lacks}", file=sys.stderr)
