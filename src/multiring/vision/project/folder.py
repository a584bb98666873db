"""`VisionProject`: a folder of pictures and their labels."""

import sqlite3
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any

from multiring._arguments import require_flag, require_path, require_text, require_whole
from multiring.data.readers.limits import Limits
from multiring.errors import ArgumentError, DataError, StateError
from multiring.vision.labels import outside, require_class_name, require_label
from multiring.vision.pictures import DEFAULT_LIMITS
from multiring.vision.project import history
from multiring.vision.project.history import Labels
from multiring.vision.project.moves import moved_files
from multiring.vision.project.records import ImageRecord, Labelling, PictureSummary, ScanResult
from multiring.vision.project.scanning import COLUMNS, DATABASE, RUNS, Found, Measured, differs, files_below, measured
from multiring.vision.project.schema import create_database, open_database, transaction
from multiring.vision.project.statements import (
    MOST_NUMBER,
    stated_change,
    stated_frames,
    stated_groups,
    stated_labels,
    stated_names,
)

_IMAGES = f"SELECT path, digest, problem, is_missing, group_name, video, frame, {', '.join(COLUMNS)} FROM images"  # noqa: S608 -- own names
_BATCH = 256  # pictures that a scan writes at a time
_MOST_THREADS = 1024


class VisionProject:
    """A folder of pictures, with their labels in its file labels.sqlite and results in its folder runs.

    Several processes may use a project at a time, on one machine: SQLite's WAL lets one write while others read, and a
    writer waits for the other. A network file system has no such locks. An object belongs to the thread that made it.

    Use `VisionProject.create` or `VisionProject.open`; close it, or use it in a `with` statement.

    Attributes:
        folder: the project's folder.
    """

    def __init__(self, folder: Path, database: sqlite3.Connection) -> None:
        self.folder = folder
        self._database = database

    @classmethod
    def create(cls, folder: Path | str) -> "VisionProject":
        """Make a folder a project, which it must not be yet. Its pictures are read by `scan`.

        Raises:
            ArgumentError: `folder` is no path.
            StateError: the folder is a project already.
            OSError: the folder cannot be made or written.
        """
        folder = require_path("folder", folder)
        folder.mkdir(parents=True, exist_ok=True)
        create_database(folder / DATABASE)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: Path | str) -> "VisionProject":
        """Open a project.

        Raises:
            ArgumentError: `folder` is no path.
            DataError: the folder is no project, or its file is damaged or of a newer multiring.
        """
        folder = require_path("folder", folder)
        return cls(folder, open_database(folder / DATABASE))

    @classmethod
    def is_project(cls, folder: Path | str) -> bool:
        """Return whether the folder has a labels.sqlite."""
        return (Path(folder) / DATABASE).is_file()

    def close(self) -> None:
        """Close the project's file."""
        self._database.close()

    def __enter__(self) -> "VisionProject":  # noqa: PYI034 -- Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def runs(self) -> Path:
        """The folder for results, which is made if it is missing."""
        place = self.folder / RUNS
        place.mkdir(exist_ok=True)
        return place

    # ---- pictures ----

    def scan(self, limits: Limits = DEFAULT_LIMITS, *, threads: int = 4) -> ScanResult:
        """Read the folder's new and changed pictures, and note the missing ones.

        A picture whose file moved keeps its labels, if one file has the bytes that one missing picture had. That holds
        for files that exchanged their names, too. A file is read again if its size or its time of modification changed.
        A file with new content in the place of a picture keeps that picture's labels, and is reported as changed.

        Args:
            limits: the largest file and picture; what exceeds them counts as unreadable.
            threads: how many pictures are decoded at a time.

        Returns:
            What was found. A file that cannot be decoded is no error.

        Raises:
            ArgumentError: `threads` is not a whole number from 1 to 1,024.
        """
        here, refused = files_below(self.folder)
        rows = self._database.execute("SELECT path, size_bytes, modified_ns, is_missing, digest FROM images").fetchall()
        known = {row[0]: Found(path=row[0], size_bytes=row[1], modified_ns=row[2]) for row in rows}
        digests = {row[0]: row[4] for row in rows}
        back = {row[0] for row in rows if row[3]}
        fresh = [each for each in here if known.get(each.path) != each or each.path in back]
        gone = set(known) - {each.path for each in here}
        added: list[str] = []
        changed: list[str] = []
        batch: list[Measured] = []
        maybe_moved: list[Measured] = []
        # The places from which a picture may have moved: nothing is there, or another file may be.
        left = gone | {each.path for each in fresh if each.path in known}
        former_digests = {digests[path] for path in left} - {""}
        for each in measured(self.folder, fresh, limits, require_whole("threads", threads, 1, _MOST_THREADS)):
            is_known = each.found.path in known
            is_same = is_known and each.digest == digests[each.found.path]
            if not is_same and (is_known or each.digest in former_digests):
                maybe_moved.append(each)
                continue
            if not is_known:
                added.append(each.found.path)
            batch.append(each)
            if len(batch) == _BATCH:  # an interrupted scan goes on from here
                self._write(batch)
                batch.clear()
        moved = moved_files({each.found.path: each.digest for each in maybe_moved}, digests, gone)
        gone -= {former for former, _ in moved}
        arrived = {path for _, path in moved}
        stay = set(known) - {former for former, _ in moved}
        for each in maybe_moved:
            if each.found.path not in arrived:
                (changed if each.found.path in stay else added).append(each.found.path)
        self._write([*batch, *maybe_moved], moved, gone)
        bad = self._database.execute(
            "SELECT path FROM images WHERE problem IS NOT NULL AND NOT is_missing ORDER BY path"
        )
        return ScanResult(
            added=tuple(sorted(added)),
            changed=tuple(sorted(changed)),
            moved=tuple(moved),
            missing=tuple(sorted(gone)),
            unreadable=tuple(row[0] for row in bad),
            refused=tuple(refused),
        )

    def _write(
        self, batch: Iterable[Measured], moved: Iterable[tuple[str, str]] = (), gone: Iterable[str] = ()
    ) -> None:
        """Write what a scan has read, as one transaction."""
        names = ("path", "size_bytes", "modified_ns", "digest", "problem", *COLUMNS)
        updates = ", ".join(f"{name} = excluded.{name}" for name in names[1:])
        statement = (
            f"INSERT INTO images ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "  # noqa: S608 -- own names
            f"ON CONFLICT (path) DO UPDATE SET {updates}, is_missing = 0"
        )
        rows = [
            (each.found.path, each.found.size_bytes, each.found.modified_ns, each.digest, each.problem, *each.values)
            for each in batch
        ]
        with transaction(self._database):
            # Two steps, because files may have exchanged their names. No path of a file has this character.
            self._database.executemany(
                "UPDATE images SET path = char(0) || path WHERE path = ?", [(former,) for former, _ in moved]
            )
            self._database.executemany(
                "UPDATE images SET path = ? WHERE path = char(0) || ?", [(path, former) for former, path in moved]
            )
            self._database.executemany(statement, rows)
            self._database.executemany("UPDATE images SET is_missing = 1 WHERE path = ?", [(path,) for path in gone])

    def images(self) -> tuple[ImageRecord, ...]:
        """Return all pictures that a scan has found, in the order of their paths, missing and unreadable ones too."""
        return tuple(_record(row) for row in self._database.execute(f"{_IMAGES} ORDER BY path"))

    def image(self, path: str) -> ImageRecord:
        """Return one picture.

        Raises:
            ArgumentError: the project has no such picture.
        """
        path = require_text("picture", path)
        row = self._database.execute(f"{_IMAGES} WHERE id = ?", (self._image(path),)).fetchone()
        return _record(row)

    def require_unchanged(self, paths: Iterable[str]) -> None:
        """Raise DataError if the files of pictures are not those of the last scan, so that labels may be wrong.

        A file of the same size and time of modification counts as unchanged, and is not read.

        Raises:
            DataError: a file is gone, cannot be read, or has another content. The text names the first one.
        """
        rows = self._database.execute("SELECT path, size_bytes, modified_ns, digest FROM images").fetchall()
        known = {row[0]: (Found(path=row[0], size_bytes=row[1], modified_ns=row[2]), row[3]) for row in rows}
        problems: list[str] = []
        for path in paths:
            try:
                if differs(self.folder, *known[path]):
                    problems.append(f"picture {path!r} was changed since the last scan")
            except FileNotFoundError:
                problems.append(f"picture {path!r} is gone since the last scan")
            except OSError as error:
                problems.append(f"picture {path!r} cannot be read: {error.strerror or error}")
        if problems:
            others = len(problems) - 1
            more = f", and {others} more {'is' if others == 1 else 'are'} changed or gone" if others else ""
            raise DataError(
                f"{problems[0]}{more}. Put the files back, or run `multiring vision check {self.folder}` and see "
                "whether the labels still hold; if files are gone for good, make another split"
            )

    def frames_of(self, video: str) -> tuple[ImageRecord, ...]:
        """Return the pictures that are frames of a video, in the order of their numbers."""
        video = require_text("video", video)
        rows = self._database.execute(f"{_IMAGES} WHERE video = ? ORDER BY frame, path", (video,))
        return tuple(_record(row) for row in rows)

    def summaries(self, since: int = -1) -> tuple[PictureSummary, ...]:
        """Return what a list shows of each picture, in the order of their paths.

        Args:
            since: the number of a change. Only pictures whose labels changed after it are returned; -1: all.
        """
        return tuple(history.summaries(self._database, require_whole("since", since, -1, MOST_NUMBER)))

    def set_group(self, path: str, group: str | None) -> None:
        """State the group of a picture, which no split divides; None takes it back.

        Raises:
            ArgumentError: the project has no such picture, or the group is no text.
        """
        self.set_groups({require_text("picture", path): group})

    def set_groups(self, groups: Mapping[str, str | None]) -> None:
        """State the groups of several pictures, as one change. See `set_group`."""
        with transaction(self._database):
            for path, group in stated_groups(groups).items():
                self._database.execute("UPDATE images SET group_name = ? WHERE id = ?", (group, self._image(path)))

    def set_frame(self, path: str, video: str | None, frame: int | None) -> None:
        """State that a picture is a frame of a video, by the video's name and the frame's number.

        Raises:
            ArgumentError: the project has no such picture, only one of `video` and `frame` is given, the video is no
                text, or the frame not a whole number from 0 on.
        """
        if (video is None) != (frame is None):
            raise ArgumentError(f"video {video!r} and frame {frame!r}: give both, or neither")
        self.set_frames({require_text("picture", path): None if video is None or frame is None else (video, frame)})

    def set_frames(self, frames: Mapping[str, tuple[str, int] | None]) -> None:
        """State for several pictures which frames of videos they are, as one change. See `set_frame`."""
        with transaction(self._database):
            for path, of in stated_frames(frames).items():
                self._database.execute(
                    "UPDATE images SET video = ?, frame = ? WHERE id = ?", (*(of or (None, None)), self._image(path))
                )

    # ---- classes ----

    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes, in the order in which they were added."""
        return tuple(row[0] for row in self._database.execute("SELECT name FROM classes ORDER BY id"))

    def add_class(self, name: str) -> None:
        """Add a class. Nothing happens if there is one of the name.

        Raises:
            ArgumentError: the name has no visible character, a control character, or a space at an end.
        """
        require_class_name(name)
        with transaction(self._database):
            self._database.execute("INSERT OR IGNORE INTO classes (name) VALUES (?)", (name,))

    def rename_class(self, name: str, new: str) -> None:
        """Give a class another name, in all labels.

        Raises:
            ArgumentError: there is no class `name`, or there is a class `new`, or no class can have that name.
        """
        require_class_name(new)
        require_text("class", name)
        with transaction(self._database):
            if new in self.classes():
                raise ArgumentError(f"class {new!r} is there already: choose another name")
            self._require_classes({name})
            self._database.execute("UPDATE classes SET name = ? WHERE name = ?", (new, name))

    def _require_classes(self, names: set[str]) -> dict[str, int]:
        known = dict(self._database.execute("SELECT name, id FROM classes").fetchall())
        for name in sorted(names - set(known)):
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ArgumentError(f"class {name!r} is not in the project: add it first{hint}")
        return known

    # ---- labels ----

    def labelling(self, path: str) -> Labelling | None:
        """Return the labelling of a picture, or None if nobody ever labelled it."""
        return self.labellings(require_text("picture", path)).get(path)

    def labellings(self, path: str | None = None, *, video: str | None = None) -> dict[str, Labelling]:
        """Return the labelling of each picture that ever had one, by path; or of a picture, or of a video's frames."""
        return history.labellings(self._database, self._class_names(), *stated_names(path, video))

    def set_labels(
        self,
        path: str,
        labels: Labels,
        author: str,
        *,
        after: int | None = None,
        digest: str | None = None,
        outside_too: bool = False,
    ) -> int:
        """Replace the labels of a picture, and return the number of the change.

        Args:
            path: the picture.
            labels: all its labels. An empty tuple means "seen, nothing in it". None means "not labelled". A label that
                is given twice, equal in every field, counts once.
            author: who says so.
            after: the number of the change that the author has seen last, 0 for none. If the picture has another one,
                nothing is changed.
            digest: the digest of the file that the author has seen. If the picture has another one, nothing is changed.
            outside_too: accept labels that leave the picture, which `check` reports.

        Raises:
            ArgumentError: the project has no such picture or class, or there is no author.
            DataError: a label is malformed or leaves the picture.
            StateError: somebody else changed the labels since `after`, or a scan found another file.
        """
        return self.set_many_labels(
            {require_text("picture", path): labels},
            author,
            after=None if after is None else {path: after},
            digests=None if digest is None else {path: digest},
            outside_too=outside_too,
        )

    def set_many_labels(
        self,
        labels: Mapping[str, Labels],
        author: str,
        *,
        after: Mapping[str, int] | None = None,
        digests: Mapping[str, str] | None = None,
        outside_too: bool = False,
    ) -> int:
        """Replace the labels of several pictures as one change, which one undo takes back. See `set_labels`.

        `after` and `digests` have the values of pictures by path. If one is outdated, nothing is changed at all.
        """
        if not require_text("author", author).strip():
            raise ArgumentError("author: want a name")
        outside_too = require_flag("outside_too", outside_too)
        labels = stated_labels(labels)
        stated = [each for some in labels.values() for each in some or ()]
        for each in stated:
            require_label(each)
        with transaction(self._database):
            classes = self._require_classes({each.class_name for each in stated})
            change = history.begin_change(self._database, author)
            for path, some in labels.items():
                image = self._image(path)
                self._require_unchanged(path, image, (after or {}).get(path), (digests or {}).get(path))
                if not outside_too:
                    self._require_inside(path, image, some)
                history.add_labelling(self._database, change, image, some, classes)
        return change

    def undo(self, author: str, change: int | None = None) -> tuple[str, ...]:
        """Take back a change of the author that is not taken back yet, and return the paths of its pictures.

        Args:
            author: who made the change.
            change: the number of the change; None is the author's last one. A program that an author has opened
                twice must give the number, else it takes back what the other one did.

        Raises:
            StateError: there is no such change, or somebody changed one of its pictures later.
        """
        with transaction(self._database):
            return history.undo_change(self._database, require_text("author", author), stated_change(change))

    def history(self, path: str) -> tuple[Labelling, ...]:
        """Return all labellings that a picture had, oldest first."""
        return tuple(history.history(self._database, self._class_names(), require_text("picture", path)))

    def _class_names(self) -> dict[int, str]:
        return dict(self._database.execute("SELECT id, name FROM classes").fetchall())

    def _image(self, path: str) -> int:
        row = self._database.execute("SELECT id FROM images WHERE path = ?", (path,)).fetchone()
        if row is None:
            raise ArgumentError(f"picture {path!r} is not in the project {str(self.folder)!r}: scan the folder")
        found: int = row[0]
        return found

    def _require_inside(self, path: str, image: int, labels: Labels) -> None:
        width, height = self._database.execute("SELECT width, height FROM images WHERE id = ?", (image,)).fetchone()
        if width is None and labels:
            raise DataError(f"picture {path!r} cannot be read, so it cannot be labelled")
        for each in labels or ():
            if how := outside(each, width, height):
                raise DataError(f"picture {path!r}: {each.class_name!r} is outside the picture: {how}")

    def _require_unchanged(self, path: str, image: int, after: int | None, digest: str | None) -> None:
        last, found = self._database.execute(
            "SELECT IFNULL((SELECT MAX(change_id) FROM labellings WHERE image_id = images.id), 0), digest FROM images "
            "WHERE id = ?",
            (image,),
        ).fetchone()
        if after is not None and last != after:
            raise StateError(f"picture {path!r} was changed meanwhile (change {last}, not {after}): read it again")
        if digest is not None and found != require_text("digest", digest):
            raise StateError(
                f"picture {path!r} is another file now (digest {found[:12] or 'unreadable'}, not {digest[:12]}): read "
                "it again"
            )


def _record(row: tuple[object, ...]) -> ImageRecord:
    names = ("path", "digest", "problem", "is_missing", "group", "video", "frame", *COLUMNS)
    values: dict[str, Any] = dict(zip(names, row, strict=True))
    if values["problem"] is not None:
        values |= dict(zip(COLUMNS, (0, 0, "", "", 0, 0, False, False, "", b""), strict=True))
    values["problem"] = values["problem"] or ""
    for name in ("is_missing", "is_transparent", "is_turned"):
        values[name] = bool(values[name])
    return ImageRecord(**values)
