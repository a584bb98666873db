"""multiring trace: make a timeline of the parts that ranks left, or draw one.

`multiring trace merge FILE PART...` is for a job whose rank 0 could not write its timeline: each rank's part then stays
beside the place of the file, on the rank's own host. Under `multiring run -n N --timeline FILE` it is done already.
`multiring trace draw FILE FIGURE` draws the last two steps of a timeline as .svg.
"""

import argparse
import sys
from pathlib import Path

from multiring.cli.drawings import check_figure, timeline, write_figure
from multiring.errors import ArgumentError
from multiring.trace import file_path, merge


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="merge|draw")
    merging = actions.add_parser("merge", help="write FILE from PARTs", allow_abbrev=False)
    merging.add_argument("file", type=Path, metavar="FILE", help="the timeline to write; compressed if it ends in .gz")
    merging.add_argument("parts", type=Path, nargs="+", metavar="PART", help="what the ranks left: *.rank-K.part")
    drawing = actions.add_parser("draw", help="draw the last steps of FILE", allow_abbrev=False)
    drawing.add_argument("file", type=Path, metavar="FILE", help="a timeline")
    drawing.add_argument("figure", type=Path, metavar="FIGURE", help="where to: a name that ends with .svg")
    drawing.add_argument("--steps", type=int, default=2, metavar="N", help="how many steps (default 2)")


def run(arguments: argparse.Namespace) -> int:
    """Exit 0, also where ranks are missing, which is said; the parts stay."""
    if arguments.action == "draw":
        return _draw(arguments)
    path = file_path(arguments.file)
    if path.exists():
        raise ArgumentError(f"{arguments.file} exists; want another name, as it may be the timeline of other ranks")
    try:
        missing = merge(arguments.parts, path)
    except OSError as error:
        raise ArgumentError(f"{error.filename}: {error.strerror}") from None
    for rank, why in missing.items():
        print(f"multiring: rank {rank} is not in it: {why}", file=sys.stderr)
    return 0


def _draw(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1:
        raise ArgumentError(f"--steps {arguments.steps}: want at least 1")
    check_figure(arguments.figure)
    write_figure(arguments.figure, timeline(arguments.file, arguments.steps))
    return 0
