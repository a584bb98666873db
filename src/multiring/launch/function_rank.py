"""`python -m multiring.launch.function_rank FOLDER`: a rank of `run`, which leaves in FOLDER what became of it."""

import sys
from collections.abc import Sequence
from pathlib import Path

from multiring.errors import StateError
from multiring.launch.pickled_call import CallFolder, Returned, failure_of
from multiring.settings import Settings


def main(arguments: Sequence[str]) -> None:
    """Call the function; what it raises ends this process, once it is told.

    Raises:
        StateError: this process is no rank.
    """
    rank = Settings.from_environment().rank
    if rank is None:
        raise StateError("MULTIRING_RANK is not set: this is a rank of multiring.run, which starts it")
    call = CallFolder(Path(arguments[0]))
    try:
        call.leave(rank, Returned(call.call()))
    except BaseException as error:
        call.leave(rank, failure_of(error))
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
