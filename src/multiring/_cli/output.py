"""Print to standard output, whose reader may end early."""

import os
import signal
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from multiring._replacing import words_of
from multiring.errors import DataError, MultiringError

READER_GONE = 128 + signal.SIGPIPE  # a shell's exit code for a tool that wrote to a pipe without a reader


class ReaderGoneError(MultiringError, RuntimeError):
    """The reader of standard output, such as `head -1`, has ended.

    This is not an error, and nothing is printed.
    """


def counted(number: int, what: str) -> str:
    """Return a number with a noun, such as "1 shard" or "2 shards".

    `what` is the singular.
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def show(text: str) -> None:
    """Print `text` as a line and flush standard output.

    Raises:
        ReaderGoneError: no process reads standard output any more. Later output is discarded.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The interpreter flushes once more at its end, and would print an error:
        # https://docs.python.org/3/library/signal.html#note-on-sigpipe.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        raise ReaderGoneError("the reader of standard output has closed it") from None


@contextmanager
def told_files() -> Iterator[None]:
    """Turn errors of files within a block, such as a full disk, into sentences.

    Raises:
        DataError: a file could not be read or written.
    """
    try:
        yield
    except (MultiringError, BrokenPipeError):  # errors of connections are OSErrors, too
        raise
    except OSError as error:
        raise DataError(words_of(error)) from error
    except sqlite3.Error as error:
        raise DataError(f"the project's labels cannot be read or written: {error}") from error


def show_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns, aligned on the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    show("\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows))
