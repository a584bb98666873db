"""What ranks have predicted so far: the folder OUT.parts, from which a killed job goes on.

Each process appends to a file of its own, a line for each chunk, so no process waits for another, and a line that a
kill cut off belongs to the end of a file. Lines are only added. The chunks of a cut-off line are predicted again.
"""

import io
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from multiring._replacing import replace_file
from multiring.errors import ArgumentError, DataError

_KEY = "multiring_predictions"
_JOB, _PART = "job.json", "part-{}.jsonl"
_ANY = "[0-9a-f]" * 16

# The number of an input or of a chunk of pictures, and the number of the chunk in a video.
ChunkId = tuple[int, int]
Records = list[dict[str, Any]]


class PartFolder:
    """The folder OUT.parts of a job.

    Attributes:
        folder: its path.
    """

    def __init__(self, out: Path) -> None:
        self.folder = out.with_name(f"{out.name}.parts")

    def begin(self, job: Mapping[str, Any]) -> None:
        """Make the folder for a job, or find the job there to go on with. One rank calls it.

        Args:
            job: the model, the inputs and the options.

        Raises:
            ArgumentError: the folder is of another job.
        """
        self.folder.mkdir(exist_ok=True)
        text, path = _text(job), self.folder / _JOB
        if path.exists() and path.read_bytes() not in {b"", text}:
            raise ArgumentError(
                f"{str(self.folder)!r} has the parts of another job, with another model, other inputs or options: "
                "remove the folder, or give another --out"
            )
        replace_file(path, text, is_ours=lambda found: found == text, what="the job")

    def is_of(self, job: Mapping[str, Any]) -> bool:
        """Return whether the folder is of this job."""
        path = self.folder / _JOB
        return path.is_file() and path.read_bytes() == _text(job)

    def done(self) -> dict[ChunkId, Records]:
        """Return the records of the finished chunks, and of videos whose end was found under (input, -1).

        Of a chunk that several starts wrote, the records are those without an error, and of these the ones with more
        frames, whatever the names of the parts are.
        """
        found: dict[ChunkId, Records] = {}
        for path in sorted(self.folder.glob(_PART.format(_ANY))):
            for line in _whole_lines(path):
                chunk = line["chunk"][0], line["chunk"][1]
                if chunk not in found or _worth(line["records"]) > _worth(found[chunk]):
                    found[chunk] = line["records"]
        return found

    def open_part(self) -> "PartWriter":
        """Return a new file for this process to append to."""
        return PartWriter(self.folder / _PART.format(secrets.token_hex(8)))

    def remove(self) -> None:
        """Remove the job's files, and the folder if nothing else is in it."""
        for path in [*self.folder.glob(_PART.format(_ANY)), self.folder / _JOB]:
            path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


class PartWriter:
    """Appends chunks to a new file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")

    def add(self, chunk: ChunkId, records: Sequence[Mapping[str, Any]]) -> None:
        """Add the records of a chunk. They outlive a kill of the process."""
        text = json.dumps({"chunk": chunk, "records": records}, ensure_ascii=False, allow_nan=False)
        self._file.write(text.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. What it has outlives a power failure."""
        os.fsync(self._file.fileno())
        self._file.close()


def _text(job: Mapping[str, Any]) -> bytes:
    return json.dumps({_KEY: 1, **job}, ensure_ascii=False, sort_keys=True).encode()


def _worth(records: Records) -> tuple[int, int, int, str]:
    """Return what decides between two records of a chunk. The larger is better."""
    errors = sum("error" in each for each in records)
    frames = sum(each["frames"] for each in records if isinstance(each.get("frames"), int))
    return -errors, frames, len(records), json.dumps(records, sort_keys=True)


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a part up to the first that is cut off or damaged."""
    with path.open("rb") as file:
        for line in file:
            try:
                told = json.loads(line)
                number, second = told["chunk"]
                is_whole = line.endswith(b"\n") and isinstance(told["records"], list)
                is_whole = is_whole and type(number) is int and type(second) is int
            except (ValueError, KeyError, TypeError):
                return
            if not is_whole:
                return
            yield told


def require_new(out: Path) -> None:
    """Raise ArgumentError if there is a file or folder at `out`, which a prediction never replaces.

    Raises:
        ArgumentError: there is one, or its folder does not exist.
    """
    if out.exists():
        raise ArgumentError(f"{str(out)!r} is there already: remove it, or give another name")
    if not out.parent.is_dir():
        raise ArgumentError(f"{str(out)!r}: there is no folder {str(out.parent)!r}")


def has_bytes(out: Path, data: Iterator[bytes]) -> bool:
    """Return whether the file at `out` has exactly these bytes. All data are taken from the iterator."""
    is_same = out.is_file()
    with out.open("rb") if is_same else io.BytesIO() as file:
        for each in data:
            is_same = is_same and file.read(len(each)) == each
        return is_same and not file.read(1)


def publish(out: Path, data: Iterator[bytes]) -> None:
    """Write the result under another name, then give it its own.

    Raises:
        DataError: there is a file at `out` by now.
    """
    beside = out.with_name(f".{out.name[:100]}.{secrets.token_hex(8)}.new")
    try:
        with beside.open("xb") as file:
            for each in data:
                file.write(each)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(beside, out)  # unlike a rename, it replaces nothing
        except FileExistsError:
            raise DataError(f"{str(out)!r} was made meanwhile, and was left as it is: give another --out") from None
    finally:
        beside.unlink(missing_ok=True)
