"""What ranks have predicted so far: the folder OUT.parts, from which a killed job goes on.

Each process appends to a file of its own, a line for each chunk, so no process waits for another, and a line that a
kill cut off belongs to the end of a file. Lines are only added. The chunks of a cut-off line are predicted again.

Rank 0 holds a lock in the folder, because two jobs of one OUT would remove each other's parts.
"""

import errno
import io
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from multiring._file_locks import try_lock
from multiring._replacing import replace_file, words_of
from multiring.errors import ArgumentError, DataError

_KEY = "multiring_predictions"
_JOB, _PART, _LOCK = "job.json", "part-{}.jsonl", ".lock"
_ANY = "[0-9a-f]" * 16
_PATIENCE_S = 5.0  # for a killed job's rank 0, which may end a moment after its launcher
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EMLINK}  # of file systems without hard links

# The number of an input or of a chunk of pictures, and the number of the chunk in a video.
ChunkId = tuple[int, int]
Records = list[dict[str, Any]]


class PartFolder:
    """The folder OUT.parts of a job.

    Attributes:
        folder: its path.
    """

    def __init__(self, out: Path) -> None:
        if not out.name:
            raise ArgumentError(f"{str(out)!r} is a folder: want the name of a file for the answers")
        self.folder = out.with_name(f"{out.name}.parts")
        self._out = out
        self._lock = -1

    def begin(self, job: Mapping[str, Any]) -> None:
        """Make the folder for a job, or find the job there to go on with, and lock it. One rank calls it.

        Args:
            job: the model, the inputs and the options.

        Raises:
            ArgumentError: the folder is of another job, another process predicts to the same file, or there is a file
                already.
        """
        if not self._out.parent.is_dir():
            raise ArgumentError(f"{str(self._out)!r}: there is no folder {str(self._out.parent)!r}")
        if not self.folder.exists():
            require_new(self._out)
        self._lock = self._locked()
        try:
            # A kill between the last two steps of a job leaves the whole result and some of its parts.
            if not self.is_of(job):
                require_new(self._out)
            self._begin(job)
        except BaseException:
            self.release()
            raise

    def _locked(self) -> int:
        """Return the descriptor of the folder's lock, which the kernel releases if the process is killed."""
        deadline = time.monotonic() + _PATIENCE_S
        while (file := self._try_lock()) is None:
            if time.monotonic() > deadline:
                raise ArgumentError(
                    f"another prediction writes to {str(self._out)!r}: wait for its end, or give another --out"
                )
            time.sleep(0.05)
        return file

    def _try_lock(self) -> int | None:
        """Return the descriptor of the lock; None if another job has it, or has removed the folder just now."""
        path = self.folder / _LOCK
        self.folder.mkdir(exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return None
        if try_lock(file) and _is_at(file, path):
            return file
        os.close(file)
        return None

    def release(self) -> None:
        """Give the lock back. The parts stay; a folder without any is removed."""
        if self._lock < 0:
            return
        with suppress(OSError):  # it was removed, or others have put files into it
            if [each.name for each in self.folder.iterdir()] == [_LOCK]:
                (self.folder / _LOCK).unlink()
                self.folder.rmdir()
        os.close(self._lock)
        self._lock = -1

    def _begin(self, job: Mapping[str, Any]) -> None:
        text, path = _text(job), self.folder / _JOB
        if path.exists() and path.read_bytes() not in {b"", text}:
            raise ArgumentError(
                f"{str(self.folder)!r} has the parts of another job, with another model, other inputs or options: "
                "remove the folder, or give another --out"
            )
        with _writing(path):
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
        self.release()


class PartWriter:
    """Appends chunks to a new file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("xb")

    def add(self, chunk: ChunkId, records: Sequence[Mapping[str, Any]]) -> None:
        """Add the records of a chunk. They outlive a kill of the process.

        Raises:
            DataError: they cannot be written, for example because the disk is full. Earlier chunks are kept.
        """
        text = json.dumps({"chunk": chunk, "records": records}, ensure_ascii=False, allow_nan=False)
        with _writing(self._path):
            self._file.write(text.encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file. What it has outlives a power failure.

        Raises:
            DataError: it cannot be written.
        """
        with _writing(self._path):
            try:
                os.fsync(self._file.fileno())
            finally:
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


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an error of a write, which does not name its file, into a sentence."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{words_of(error, path)}. The answers so far are kept") from error


def _is_at(file: int, path: Path) -> bool:
    """Return whether an open file still has its path: the job that held its lock may have removed it."""
    try:
        here, there = os.fstat(file), path.stat()
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def require_new(out: Path) -> None:
    """Raise ArgumentError if there is a file or folder at `out`, which a prediction never replaces.

    Raises:
        ArgumentError: there is one.
    """
    if os.path.lexists(out):
        raise ArgumentError(f"{str(out)!r} is there already: remove it, or give another name")


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
        DataError: there is a file at `out` by now, or the disk is full.
    """
    beside = out.with_name(f".{out.name[:100]}.{secrets.token_hex(8)}.new")
    try:
        with _writing(out), beside.open("xb") as file:
            for each in data:
                file.write(each)
            file.flush()
            os.fsync(file.fileno())
        try:
            _named(beside, out)
        except FileExistsError:
            raise DataError(f"{str(out)!r} was made meanwhile, and was left as it is: give another --out") from None
    finally:
        beside.unlink(missing_ok=True)


def _named(beside: Path, out: Path) -> None:
    """Give a file the name `out`, which must be free."""
    try:
        os.link(beside, out)  # unlike a rename, it replaces nothing
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        beside.replace(out)
