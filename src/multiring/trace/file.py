"""The file of a timeline: the parts of all ranks, written to a temporary file that is renamed when it is complete."""

import contextlib
import errno
import gzip
import io
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from multiring._version import VERSION
from multiring.errors import ArgumentError
from multiring.trace.chrome import events_of
from multiring.trace.claims import (
    HEAD,
    TakenError,
    is_held,
    is_part,
    is_unfinished,
    require_file,
    require_timeline,
)
from multiring.trace.part import Part, read_part

_MOST_RANKS = 1 << 20
_SHOWN = 200  # characters of an invalid path that a message shows
_encode = json.JSONEncoder(separators=(",", ":")).encode
_READ_ME = {
    "times": "microseconds of rank 0's monotonic clock",
    "agree": "from the call until every rank has started the operation",
    "wire": "from agreement to the end: bytes are in flight, or waited for",
    "reduce": "within that: this rank's processor at work; busy_us excludes gaps that are too short to show",
    "algbw GB/s": "bytes of the longer side / time from agreement to end",
    "horovod": "the name in Horovod's timeline",
}


def file_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` as an absolute path, with links resolved, if a file can be created there.

    Raises:
        ArgumentError: `path` is not a path, is a directory or device, or lies in a directory that does not exist.
    """
    try:
        text: Any = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ArgumentError(f"timeline={path!r}: want the path of a file")
    where = Path(text).absolute()
    try:
        if where.is_symlink():
            where = Path(os.path.realpath(where))
        if where.is_dir():
            raise ArgumentError(f"timeline={text!r} is a directory; want a file in it")
        if not where.parent.is_dir():
            raise ArgumentError(f"timeline={text!r}: there is no directory {os.fspath(where.parent)!r}; make it first")
        part_path(where, _MOST_RANKS).exists()  # checks the longest file name
    except OSError as error:  # mostly because the name is too long
        raise ArgumentError(f"timeline={text[:_SHOWN]!r}: {error.strerror}; want another path") from None
    require_file(where)
    return where


def part_path(path: Path, rank: int) -> Path:
    """Return the path of the part that `rank` keeps until the timeline `path` is written."""
    return path.with_name(f"{path.name}.rank-{rank}.part")


def parts_of(path: Path) -> list[Path]:
    """Return the parts beside the timeline `path`, by rank."""
    found = []
    for entry in path.parent.iterdir() if path.parent.is_dir() else ():
        rank = entry.name.removeprefix(f"{path.name}.rank-").removesuffix(".part")
        if rank.isdecimal() and entry == part_path(path, int(rank)):
            found.append((int(rank), entry))
    return [entry for _, entry in sorted(found)]


def clear(path: Path, own: Path | None = None) -> None:
    """Remove the file of an earlier timeline and its parts, so that later files belong to this timeline.

    Args:
        path: the timeline's file.
        own: a part that this process holds; it is kept.

    Raises:
        TakenError: another job records its timeline there now.
        ArgumentError: a file is not a timeline or part, and nothing was removed; or a file cannot be removed.
    """
    try:
        parts = [each for each in parts_of(path) if each != own]
        unfinished = unfinished_of(path)
    except OSError as error:
        raise ArgumentError(f"{path.parent} cannot be searched for an earlier timeline: {error.strerror}") from None
    for each in parts:
        require_file(each)
        if is_held(each):
            raise TakenError(f"another job is writing its timeline to {str(each)!r}; give this timeline another name")
        if not is_part(each):
            raise ArgumentError(
                f"{str(each)!r} is no part of a timeline, but has the name of one; it was left as it is. Give the "
                "timeline another name, or remove the file"
            )
    require_timeline(path)
    for each in (path, *parts, *unfinished):
        try:
            each.unlink(missing_ok=True)
        except OSError as error:
            raise ArgumentError(f"{each} cannot be removed for a new timeline: {error.strerror}") from None


def unfinished_of(path: Path) -> list[Path]:
    """Return the temporary files of `path` that killed ranks have not removed."""
    name = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.new")
    found = [each for each in path.parent.iterdir() if name.fullmatch(each.name) and each.is_file()]
    return [each for each in found if is_unfinished(each)]


class TraceFile:
    """A timeline's file while it is written. Ranks are added one by one, in any order.

    The file appears at `path` when it is closed. It is compressed if its name ends in .gz.

    Raises:
        OSError: the file cannot be written, or `path` is not a timeline. `add` and `close` raise
            this error too, and then remove the unfinished file.
    """

    def __init__(self, path: Path, *, mark_cycles: bool = False) -> None:
        self._path = path
        self._unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
        self._mark_cycles = mark_cycles
        self._reference: str | None = None  # the name of rank 0's clock
        self._about: dict[str, Any] = {}
        self._ranks: dict[str, Any] = {}
        self._separator = HEAD
        self._require_place()
        self._file = self._open()

    def _require_place(self) -> None:
        try:
            require_timeline(self._path)
        except ArgumentError as error:
            raise FileExistsError(errno.EEXIST, str(error), str(self._path)) from None

    def _open(self) -> IO[str]:
        if self._path.name.endswith(".gz"):
            return io.TextIOWrapper(gzip.open(self._unfinished, "xb", compresslevel=3), encoding="utf-8")
        return self._unfinished.open("x", encoding="utf-8")

    def add(self, part: Part) -> None:
        """Write a rank's events.

        Add rank 0 first, if it takes part: other ranks with the same clock then need no alignment.
        """
        if part.rank == 0:
            self._reference = part.who["clock"]
        if not self._about:
            self._about = {name: part.who[name] for name in ("job", "size", "versions")}
        alignment = part.alignment(self._reference)
        try:
            for event in events_of(part, alignment, mark_cycles=self._mark_cycles):
                self._file.write(self._separator + _encode(event))
                self._separator = ",\n"
        except BaseException:
            self.discard()
            raise
        # Write the readings even if both clocks are the same, because they then show their own accuracy.
        readings = [
            {"offset_us": each.offset_ns / 1000, "error_us": each.error_ns / 1000, "at_us": each.at_ns / 1000}
            for each in part.readings
        ]
        same = part.rank == 0 or alignment.start is None
        end = part.end or {}
        self._ranks[str(part.rank)] = {
            **{name: part.who[name] for name in ("host", "pid", "wall_s")},
            "clock": "rank 0's" if same else f"aligned, give or take {alignment.error_ns / 1000:g} us",
            "readings": readings,
            "is_complete": part.end is not None and not end["fault"],
            "dropped_events": end.get("dropped", 0),
            **({"fault": end["fault"]} if end.get("fault") else {}),
        }

    def lack(self, rank: int, why: str) -> None:
        """Record in the file that `rank` is missing."""
        self._ranks[str(rank)] = {"is_missing": why}

    def close(self) -> None:
        """Finish the file and move it to its path."""
        ranks = {rank: self._ranks[rank] for rank in sorted(self._ranks, key=int)}
        metadata = {**self._about, "written_by": f"multiring {VERSION}", "read_me": _READ_ME, "ranks": ranks}
        start = "" if self._separator == ",\n" else self._separator
        try:
            self._file.write(f'{start}\n],"displayTimeUnit":"ms","metadata":{json.dumps(metadata)}}}\n')
            self._file.close()
            self._require_place()
            self._unfinished.replace(self._path)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the unfinished file."""
        with contextlib.suppress(OSError):  # for example, the disk is full
            self._file.close()
        self._unfinished.unlink(missing_ok=True)


def merge(paths: Sequence[Path], path: Path) -> Mapping[int, str]:
    """Write the timeline `path` from parts.

    Return the missing ranks, each with the reason.

    Raises:
        ArgumentError: a file is not a part, or belongs to another job or to a rank that was already read.
        OSError: a file cannot be read, or `path` cannot be written.
    """
    parts: dict[int, Part] = {}
    for each in paths:
        try:
            part = read_part(each.read_bytes())
        except ArgumentError as error:
            raise ArgumentError(f"{os.fspath(each)}: {error}") from None
        first = next(iter(parts.values()), part)
        if part.rank in parts or part.who["timeline"] != first.who["timeline"]:
            whose = f"rank {part.rank} of job {part.who['job']}"
            raise ArgumentError(
                f"{os.fspath(each)} belongs to {whose}; want one part of each rank, all of one timeline"
            )
        parts[part.rank] = part
    if not parts:
        raise ArgumentError("no parts to merge")
    first = next(iter(parts.values()))
    missing = {rank: "it left no part here" for rank in range(first.who["size"]) if rank not in parts}
    file = TraceFile(path, mark_cycles=first.who["mark_cycles"])
    for rank in sorted(parts):
        file.add(parts[rank])
    for rank, why in missing.items():
        file.lack(rank, why)
    file.close()
    return missing
