"""Topology files: what `topology/` makes of their text, read and written."""

from pathlib import Path

from multiring.errors import ArgumentError
from multiring.topology import Topology, text_of, topology_of


def read_topology(path: str | Path) -> Topology:
    """Return the topology in the file at `path`, one rank a host; `Topology.placed` puts a job's ranks there.

    Raises:
        ArgumentError: the file cannot be read, or is no topology.
    """
    try:
        return topology_of(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(
            f"topology file {str(path)!r}: {error}; want a file that docs/topology.md describes"
        ) from None
    except ArgumentError as error:
        raise ArgumentError(f"topology file {str(path)!r}: {error}") from None


def write_topology(path: str | Path, topology: Topology, heading: str = "") -> None:
    """Write `topology` to `path`, with `heading` as a comment.

    Raises:
        ArgumentError: the file cannot be written.
    """
    try:
        Path(path).write_text(text_of(topology, heading), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"topology file {str(path)!r}: {error}; want a path that can be written") from None
