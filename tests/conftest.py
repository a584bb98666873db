"""Settings all tests share."""

from hypothesis import settings

# The same examples in every run: a failure is a fact about the code, never about the day. No deadline for
# one example, as a loaded machine would fail it; pytest's timeout bounds the test.
settings.register_profile("multiring", derandomize=True, deadline=None, max_examples=50, print_blob=True)
settings.load_profile("multiring")
