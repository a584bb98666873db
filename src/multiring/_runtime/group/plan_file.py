"""Read and write files of pinned plans; `planner/` parses and formats their text."""

from collections.abc import Iterable
from pathlib import Path

from multiring._replacing import replace_file
from multiring._topology import Topology
from multiring.errors import ArgumentError
from multiring.planner import Pins, Plan, Task, pins_of, pins_text


def read_pins(path: str | Path) -> Pins:
    """Return the pinned plans in the file at `path`.

    Raises:
        ArgumentError: the file cannot be read, or its contents are not valid plans.
    """
    try:
        return pins_of(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"plan file {str(path)!r}: {error}; want a file from multiring plan --save") from None
    except ArgumentError as error:
        raise ArgumentError(f"plan file {str(path)!r}: {error}") from None


def write_pins(path: str | Path, plans: Iterable[tuple[Task, Plan]], topology: Topology) -> None:
    """Write `plans`, pinned for `topology`, to the file `path`.

    An existing plan file is replaced.

    Raises:
        ArgumentError: `path` exists and is not a plan file, or the file cannot be written.
    """
    text = pins_text(plans, topology)
    head = text[: len("# Plans for ")].encode()
    try:
        replace_file(Path(path), text.encode(), is_ours=lambda found: found.startswith(head), what="a plan file")
    except OSError as error:
        raise ArgumentError(f"plan file {str(path)!r}: {error}; want a path that can be written") from None
