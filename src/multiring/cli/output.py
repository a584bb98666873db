"""Standard output, whose reader may go."""

import os
import signal
import sys

from multiring.errors import MultiringError

READER_GONE = 128 + signal.SIGPIPE  # what a shell says of a tool that wrote to a pipe without a reader


class ReaderGoneError(MultiringError, RuntimeError):
    """Whoever read standard output, like `head -1`, has ended; nothing is wrong, and nobody is to be told."""


def counted(number: int, what: str) -> str:
    """Return so many of what is called `what` where it is one: "1 shard", "2 shards"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def show(text: str) -> None:
    """Print `text` as a line, at once.

    Raises:
        ReaderGoneError: nobody reads standard output any more; from now on it leads nowhere.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The interpreter flushes once more as it ends, and would complain:
        # https://docs.python.org/3/library/signal.html#note-on-sigpipe.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        raise ReaderGoneError("nobody reads standard output any more") from None
