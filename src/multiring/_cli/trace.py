"""multiring trace: make a timeline from the parts that ranks left, or draw a timeline.

`multiring trace merge FILE PART...` is for a job whose rank 0 could not write the timeline. Then each rank's part stays
beside the path of the timeline, on the rank's own host. `multiring run -n N --timeline FILE` merges the parts itself.
`multiring trace draw FILE FIGURE` draws the last two steps of a timeline as .svg.
"""

import argparse
import sys
from pathlib import Path

from multiring._cli.drawings import check_figure, timeline, write_figure
from multiring._cli.number_option import COUNT
from multiring.errors import ArgumentError
from multiring.trace import file_path, merge


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="merge|draw")
    merging = actions.add_parser("merge", help="write FILE from PARTs", allow_abbrev=False)
    merging.add_argument("file", type=Path, metavar="FILE", help="the timeline to write; compressed if it ends in .gz")
    merging.add_argument("parts", type=Path, nargs="+", metavar="PART", help="the ranks' files: *.rank-K.part")
    drawing = actions.add_parser("draw", help="draw the last steps of FILE", allow_abbrev=False)
    drawing.add_argument("file", type=Path, metavar="FILE", help="a timeline")
    drawing.add_argument("figure", type=Path, metavar="FIGURE", help="the drawing, a name that ends with .svg")
    drawing.add_argument("--steps", type=COUNT, default=2, metavar="N", help="number of steps (default 2)")


def run(arguments: argparse.Namespace) -> int:
    """Merge or draw, and return 0.

    Missing ranks are reported but are no error. The parts are kept.
    """
    if arguments.action == "draw":
        return _draw(arguments)
    path = file_path(arguments.file)
    if path.exists():
        raise ArgumentError(f"{arguments.file} exists and may be the timeline of other ranks; want another name")
    try:
        missing = merge(arguments.parts, path)
    except OSError as error:
        raise ArgumentError(f"{error.filename}: {error.strerror}") from None
    for rank, why in missing.items():
        print(f"multiring: rank {rank} is not in the timeline: {why}", file=sys.stderr)
    return 0


def _draw(arguments: argparse.Namespace) -> int:
    check_figure(arguments.figure)
    write_figure(arguments.figure, timeline(arguments.file, arguments.steps))
    return 0
