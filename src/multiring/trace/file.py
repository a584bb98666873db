"""The file of a timeline: all ranks' parts in one, written beside its place and put there whole."""

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
from multiring.version import VERSION

_MOST_RANKS = 1 << 20
_SHOWN = 200  # characters of a path that cannot be
_encode = json.JSONEncoder(separators=(",", ":")).encode
_READ_ME = {
    "times": "microseconds of rank 0's monotonic clock",
    "agree": "from the call to when every rank had come",
    "wire": "from then to the end: bytes on their way, or waited for",
    "reduce": "within that: this rank's processor at work; busy_us without the gaps that were too short to show",
    "algbw GB/s": "bytes of the longer side / time from agreement to end",
    "horovod": "what Horovod's timeline calls it",
}


def file_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` as the absolute path of a file that can be in its directory; a link's is that of its file.

    Raises:
        ArgumentError: it is no path, or a directory or device, or in a directory that does not exist.
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
        part_path(where, _MOST_RANKS).exists()  # its name is longer
    except OSError as error:  # a name that is too long, above all
        raise ArgumentError(f"timeline={text[:_SHOWN]!r}: {error.strerror}; want another path") from None
    require_file(where)
    return where


def part_path(path: Path, rank: int) -> Path:
    """Return where `rank` keeps its part of the timeline `path` until that is written."""
    return path.with_name(f"{path.name}.rank-{rank}.part")


def parts_of(path: Path) -> list[Path]:
    """Return the parts of the timeline `path` that are left beside it, by rank."""
    found = []
    for entry in path.parent.iterdir() if path.parent.is_dir() else ():
        rank = entry.name.removeprefix(f"{path.name}.rank-").removesuffix(".part")
        if rank.isdecimal() and entry == part_path(path, int(rank)):
            found.append((int(rank), entry))
    return [entry for _, entry in sorted(found)]


def clear(path: Path, own: Path | None = None) -> None:
    """Remove the file of an earlier timeline and its parts: what is there later is of this one.

    Args:
        path: of the file.
        own: a part that this process holds, and that stays.

    Raises:
        TakenError: another job records there now.
        ArgumentError: one of them is no timeline or part, or it cannot be removed. Then nothing was removed.
    """
    try:
        parts = [each for each in parts_of(path) if each != own]
        unfinished = unfinished_of(path)
    except OSError as error:
        raise ArgumentError(f"{path.parent} cannot be looked into for an earlier timeline: {error.strerror}") from None
    for each in parts:
        require_file(each)
        if is_held(each):
            raise TakenError(
                f"another job records its timeline there now: {str(each)!r} is in use; want another name for this one"
            )
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
    """Return what killed ranks left of the timeline `path` that they were writing."""
    name = re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.new")
    found = [each for each in path.parent.iterdir() if name.fullmatch(each.name) and each.is_file()]
    return [each for each in found if is_unfinished(each)]


class TraceFile:
    """A timeline's file while it is written; ranks come one by one, and need not come in order.

    Nothing is at `path` before `close`. Compressed where its name ends in .gz.

    Raises:
        OSError: it cannot be written, or something else is at `path`; so do `add` and `close`, and nothing is left of
            what was written.
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
        """Write a rank's events. Rank 0 comes first, if it comes: by its clock it is known whose is the same."""
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
        # What was measured is told also where the clocks are one: then it shows how good the measuring is.
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
        """Say in the file that `rank` is not in it."""
        self._ranks[str(rank)] = {"is_missing": why}

    def close(self) -> None:
        """Put the file in its place."""
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
        """Leave nothing of it."""
        with contextlib.suppress(OSError):  # the disk is full, which is why this is called
            self._file.close()
        self._unfinished.unlink(missing_ok=True)


def merge(paths: Sequence[Path], path: Path) -> Mapping[int, str]:
    """Write the timeline `path` from the parts that ranks left; return the ranks that are not in it, and why.

    Raises:
        ArgumentError: one of them is no part, or of another job than the others, or of a rank that there is already.
        OSError: one of them cannot be read, or `path` cannot be written.
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
            raise ArgumentError(f"{os.fspath(each)} is of {whose}; want one part of each rank of one timeline")
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
