"""Settings for all tests."""

import os
import signal
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from tests.support.mpi_leftovers import files_of_mpi, remove_leftovers
from tests.support.user_environment import forget_user

# A process started in the background (nohup, a shell's &) ignores these signals, and so do its child processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Every run uses the same examples, so that failures can be repeated. Single examples have no deadline, because a loaded
# machine would miss it; pytest's timeout limits the test.
settings.register_profile("multiring", derandomize=True, deadline=None, max_examples=50, print_blob=True)
settings.load_profile("multiring")


def pytest_configure(config: pytest.Config) -> None:
    """Take nothing of the user's over, and leave nothing. The processes of xdist get the first one's environment."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="multiring-tests-")
        config.add_cleanup(folder.cleanup)
        forget_user(os.environ, Path(folder.name))
        config.add_cleanup(partial(remove_leftovers, files_of_mpi()))
