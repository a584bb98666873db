"""A rank that calls a function and stores its result or error: in a folder, or in an inherited file.

Usage: `python -m multiring._launch.function_rank FOLDER`, or `... files:CALL,OUTCOME` with two descriptors.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from multiring._launch.pickled_call import FILES, CallFiles, CallFolder, Returned, failure_of
from multiring._settings import Settings
from multiring.errors import StateError


def main(arguments: Sequence[str]) -> None:
    """Call the function and store its result.

    An exception is stored, and then ends this process.

    Raises:
        StateError: this process is not a rank.
    """
    rank = Settings.from_environment().rank
    if rank is None:
        raise StateError("MULTIRING_RANK is not set: only multiring.run starts this module; call multiring.run")
    call: CallFiles | CallFolder
    where = arguments[0]
    call = CallFiles.inherited(where.removeprefix(FILES)) if where.startswith(FILES) else CallFolder(Path(where))
    try:
        call.leave(rank, Returned(call.call()))
    except BaseException as error:
        call.leave(rank, failure_of(error))
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
