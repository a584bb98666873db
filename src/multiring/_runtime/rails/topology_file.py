"""Read and write topology files; `topology/` parses and formats their text."""

from pathlib import Path

from multiring._replacing import replace_file, require_replaceable
from multiring._topology import Topology, text_of, topology_of
from multiring.errors import ArgumentError

_HEAD = b"# Measured by multiring"  # the beginning of a file that multiring wrote
_WHAT = "a measured topology"


def read_topology(path: str | Path) -> Topology:
    """Return the topology in the file at `path`, with one rank per host.

    `Topology.placed` inserts a job's ranks.

    Raises:
        ArgumentError: the file cannot be read, or is not a valid topology.
    """
    try:
        return topology_of(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(
            f"topology file {str(path)!r}: {error}; want a file that docs/topology.md describes"
        ) from None
    except ArgumentError as error:
        raise ArgumentError(f"topology file {str(path)!r}: {error}") from None


def check_topology(path: str | Path) -> None:
    """Raise ArgumentError if `write_topology` would refuse `path`.

    `write_topology` refuses to replace another file.
    """
    try:
        require_replaceable(Path(path), is_ours=_is_measured, what=_WHAT)
    except OSError as error:
        raise ArgumentError(f"topology file {str(path)!r}: {error}; want a path that can be written") from None


def _is_measured(data: bytes) -> bool:
    return data.startswith(_HEAD)


def write_topology(path: str | Path, topology: Topology, heading: str = "") -> None:
    """Write `topology` to `path`, with `heading` as a comment.

    An earlier measured topology is replaced.

    Raises:
        ArgumentError: another file is at `path`, such as a topology written by hand; or the file cannot be written.
    """
    text = text_of(topology, heading).encode()
    try:
        replace_file(Path(path), text, is_ours=_is_measured, what=_WHAT)
    except OSError as error:
        raise ArgumentError(f"topology file {str(path)!r}: {error}; want a path that can be written") from None
