"""The tables of labels.sqlite, and how a file of them is opened."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from multiring.errors import DataError, StateError

APPLICATION = 0x6D767069  # "mvpi": tells our file from other SQLite files
VERSION = 1
_BUSY_S = 30.0

_TABLES = """
CREATE TABLE images (
    id INTEGER PRIMARY KEY,
    path TEXT NOT NULL UNIQUE,        -- relative to the folder, with "/"
    size_bytes INTEGER NOT NULL,
    modified_ns INTEGER NOT NULL,
    digest TEXT NOT NULL,             -- SHA-256 of the file; "" if it could not be read
    problem TEXT,                     -- why the picture cannot be used; the next columns are then NULL
    width INTEGER, height INTEGER, format TEXT, mode TEXT, bits INTEGER, frames INTEGER,
    is_transparent INTEGER, is_turned INTEGER,
    pixels_digest TEXT, signature BLOB,
    is_missing INTEGER NOT NULL DEFAULT 0,
    group_name TEXT, video TEXT, frame INTEGER
);
CREATE INDEX images_by_digest ON images (digest);
CREATE TABLE classes (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE changes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    author TEXT NOT NULL,
    time TEXT NOT NULL,               -- UTC, ISO 8601
    undoes INTEGER UNIQUE REFERENCES changes (id)
);
CREATE TABLE labellings (
    change_id INTEGER NOT NULL REFERENCES changes (id),
    image_id INTEGER NOT NULL REFERENCES images (id),
    labels TEXT,                      -- a JSON list; [] is "seen, nothing in it", and NULL is "not labelled"
    PRIMARY KEY (image_id, change_id)
) WITHOUT ROWID;
CREATE INDEX labellings_by_change ON labellings (change_id);
"""


class LabelStoreError(StateError):
    """The labels cannot be written now: another process writes for long, or the disk is full. Nothing was changed."""


def create_database(path: Path) -> None:
    """Make the file with empty tables.

    Raises:
        StateError: a file is there.
        OSError: the folder cannot be written.
    """
    try:
        path.touch(exist_ok=False)  # of two processes that create the project, one gets an error
    except FileExistsError:
        raise StateError(f"{str(path)!r} is there already: open the project, or choose another folder") from None
    database = _connected(path)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        with transaction(database):
            for statement in _TABLES.split(";\n"):
                database.execute(statement)
            database.execute(f"PRAGMA application_id = {APPLICATION}")
            database.execute(f"PRAGMA user_version = {VERSION}")
    finally:
        database.close()


def open_database(path: Path) -> sqlite3.Connection:
    """Open the file of a project.

    Raises:
        DataError: the file is missing, damaged, not multiring's, or of a newer multiring.
    """
    if not path.is_file():
        raise DataError(
            f"{str(path.parent)!r} is no vision project: want a folder with {path.name}. Make it one with "
            f"`multiring vision label {path.parent}`, or with `multiring vision import` if there are labels in a file"
        )
    database = _connected(path)
    try:
        _require_ours(path, database)
        database.execute("PRAGMA foreign_keys = ON")
    except sqlite3.DatabaseError as error:
        database.close()
        raise DataError(f"{str(path)!r} cannot be read as a database: {error}") from error
    except DataError:
        database.close()
        raise
    return database


def _require_ours(path: Path, database: sqlite3.Connection) -> None:
    found = database.execute("PRAGMA application_id").fetchone()[0]
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if found != APPLICATION:
        raise DataError(f"{str(path)!r} is not a file of a vision project; it was left as it is")
    if version != VERSION:
        raise DataError(
            f"{str(path)!r} has version {version} of the tables: this multiring reads version {VERSION}; use the "
            "multiring that wrote it"
        )


def _connected(path: Path) -> sqlite3.Connection:
    # isolation_level=None: transactions begin where `transaction` begins them.
    return sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Run a block as one transaction that writes. It waits for other writers.

    Raises:
        LabelStoreError: another process wrote for longer than 30 s, or the file cannot be written, for example because
            the disk is full. Nothing was changed.
    """
    try:
        # A transaction that begins as a reader cannot become the writer after another one wrote.
        database.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            text = f"another process is writing the project's labels ({error}): try again"
            raise LabelStoreError(text) from error
        raise _unwritten(error) from error
    try:
        yield
        database.execute("COMMIT")
    except BaseException as error:
        # A failed write may have ended the transaction. If it did not, and cannot be ended, closing the file does it.
        with suppress(sqlite3.Error):
            if database.in_transaction:
                database.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError):
            raise _unwritten(error) from error
        raise


def _unwritten(error: sqlite3.Error) -> LabelStoreError:
    return LabelStoreError(
        f"the project's labels cannot be written: {error}. Nothing was changed; make room on the disk, or see who may "
        "write there, and try again"
    )
