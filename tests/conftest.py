"""Settings all tests share."""

import signal

from hypothesis import settings

# Whoever starts the tests in the background (nohup, a shell's &) has them ignore these, and all processes they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples in every run: a failure is a fact about the code, never about the day. No deadline for
# one example, as a loaded machine would fail it; pytest's timeout bounds the test.
settings.register_profile("multiring", derandomize=True, deadline=None, max_examples=50, print_blob=True)
settings.load_profile("multiring")
