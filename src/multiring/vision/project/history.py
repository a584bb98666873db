"""The history of labels: every change is kept, and the last state of a picture is its labelling."""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone

from multiring.errors import StateError
from multiring.vision.labels import Label, distinct, from_json, to_json
from multiring.vision.project.records import Labelling, PictureSummary

Labels = tuple[Label, ...] | None
_LATEST = """
    SELECT images.path, labellings.labels, changes.author, changes.time, changes.id
    FROM images
    JOIN labellings ON labellings.image_id = images.id
    JOIN changes ON changes.id = labellings.change_id
    WHERE labellings.change_id = (SELECT MAX(change_id) FROM labellings WHERE image_id = images.id)
"""


def begin_change(database: sqlite3.Connection, author: str, undoes: int | None = None) -> int:
    """Add a change and return its number. Call it inside a transaction."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    row = database.execute("INSERT INTO changes (author, time, undoes) VALUES (?, ?, ?)", (author, now, undoes))
    assert row.lastrowid is not None  # noqa: S101 -- an INSERT has one
    return row.lastrowid


def add_labelling(
    database: sqlite3.Connection, change: int, image: int, labels: Labels, classes: Mapping[str, int]
) -> None:
    """Add the labels that a change gives to a picture.

    Args:
        database: the project's database, in a transaction.
        change: the number of the change.
        image: the number of the picture.
        labels: the labels, whose classes are in `classes`; equal ones count once. None: the picture is not labelled any
            more.
        classes: the number of each class by its name.
    """
    text = None
    if labels is not None:
        # Classes are stored by number, so that renaming a class changes one row.
        text = json.dumps([{**to_json(each), "class": classes[each.class_name]} for each in distinct(labels)])
    database.execute("INSERT INTO labellings VALUES (?, ?, ?)", (change, image, text))


def labellings(
    database: sqlite3.Connection, names: Mapping[int, str], path: str | None, video: str | None = None
) -> dict[str, Labelling]:
    """Return the last labelling of each picture that ever had one, or of some pictures, by path.

    Args:
        database: the project's database.
        names: the name of each class by its number.
        path: the picture, or None for all.
        video: only the frames of this video, or None for all.
    """
    where = "" if path is None else " AND images.path = :path"
    where += "" if video is None else " AND images.video = :video"
    rows = database.execute(_LATEST + where + " ORDER BY images.path", {"path": path, "video": video})
    return {row[0]: _labelling(row[1:], names) for row in rows}


def summaries(database: sqlite3.Connection, since: int) -> Iterator[PictureSummary]:
    """Yield the pictures whose labels changed after the change `since`, in the order of their paths; -1: all."""
    rows = database.execute(
        "SELECT path, digest, problem, is_missing, width, height, video, frame, json_array_length(labels), author, "
        "last FROM (SELECT *, IFNULL((SELECT MAX(change_id) FROM labellings WHERE image_id = images.id), 0) AS last "
        "FROM images) AS pictures LEFT JOIN labellings ON image_id = pictures.id AND change_id = last "
        "LEFT JOIN changes ON changes.id = last WHERE last > ? ORDER BY path",
        (since,),
    )
    for path, digest, problem, is_missing, width, height, video, frame, labels, author, change in rows:
        yield PictureSummary(
            path=path,
            digest=digest,
            problem=problem or "",
            is_missing=bool(is_missing),
            width=width or 0,
            height=height or 0,
            video=video,
            frame=frame,
            labels=labels,
            author=author or "",
            change=change,
        )


def history(database: sqlite3.Connection, names: Mapping[int, str], path: str) -> Iterator[Labelling]:
    """Yield all labellings of a picture, oldest first."""
    rows = database.execute(
        "SELECT labels, author, time, changes.id FROM labellings JOIN changes ON changes.id = change_id "
        "JOIN images ON images.id = image_id WHERE path = ? ORDER BY changes.id",
        (path,),
    )
    for row in rows:
        yield _labelling(row, names)


def _labelling(row: Sequence[object], names: Mapping[int, str]) -> Labelling:
    text, author, time, change = row
    labels = None
    if text is not None:
        # Earlier releases stored equal labels.
        labels = distinct(from_json({**each, "class": names[each["class"]]}) for each in json.loads(str(text)))
    return Labelling(labels=labels, author=str(author), time=str(time), change=int(str(change)))


def undo_change(database: sqlite3.Connection, author: str, number: int | None) -> tuple[str, ...]:
    """Take back a change of the author that is not taken back yet, and return the paths of its pictures.

    Call it inside a transaction. The pictures get the labels that they had before the change.

    Args:
        database: the project's database.
        author: who made the change and takes it back.
        number: the change; None is the author's last one.

    Raises:
        StateError: there is no such change, or somebody changed one of its pictures later.
    """
    row = database.execute(
        "SELECT MAX(id) FROM changes WHERE author = ? AND IFNULL(id = ?, 1) AND undoes IS NULL AND id NOT IN "
        "(SELECT undoes FROM changes WHERE undoes IS NOT NULL)",
        (author, number),
    ).fetchone()
    if row[0] is None:
        which = "no change" if number is None else f"no change {number}"
        raise StateError(f"{author!r} has made {which} that can be undone")
    change: int = row[0]
    touched = database.execute(
        "SELECT image_id, path FROM labellings JOIN images ON images.id = image_id WHERE change_id = ? ORDER BY path",
        (change,),
    ).fetchall()
    for image, path in touched:
        later = database.execute(
            "SELECT author, time FROM labellings JOIN changes ON changes.id = change_id WHERE image_id = ? AND "
            "changes.id > ? AND undoes IS NULL AND changes.id NOT IN "
            "(SELECT undoes FROM changes WHERE undoes IS NOT NULL) ORDER BY changes.id DESC LIMIT 1",
            (image, change),
        ).fetchone()
        if later is not None:
            raise StateError(
                f"{author!r} cannot undo the last change: {later[0]!r} changed {path!r} later, at {later[1]}; "
                "set the labels instead"
            )
    undoing = begin_change(database, author, undoes=change)
    for image, _ in touched:
        # What the picture had before: of earlier changes that are not undone, the last. `undoes IS NULL` leaves out
        # rows that only restored older labels.
        before = database.execute(
            "SELECT labels FROM labellings JOIN changes ON changes.id = change_id WHERE image_id = ? AND "
            "changes.id < ? AND undoes IS NULL AND changes.id NOT IN "
            "(SELECT undoes FROM changes WHERE undoes IS NOT NULL) ORDER BY changes.id DESC LIMIT 1",
            (image, change),
        ).fetchone()
        database.execute(
            "INSERT INTO labellings VALUES (?, ?, ?)", (undoing, image, None if before is None else before[0])
        )
    return tuple(path for _, path in touched)
