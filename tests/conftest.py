"""Settings for all tests."""

import signal

from hypothesis import settings

# A process started in the background (nohup, a shell's &) ignores these signals, and so do its child processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Every run uses the same examples, so that failures can be repeated. Single examples have no deadline, because a loaded
# machine would miss it; pytest's timeout limits the test.
settings.register_profile("multiring", derandomize=True, deadline=None, max_examples=50, print_blob=True)
settings.load_profile("multiring")
