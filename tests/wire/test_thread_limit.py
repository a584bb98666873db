"""A kernel that refuses a thread is an error with what to do."""

import subprocess
import sys

PROGRAM = """
import os, resource
import multiring
if os.geteuid() == 0:
    os.setuid(61999)  # root has no such limit
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
multiring.init()
"""


def test_a_refused_thread_is_an_error_that_names_the_limits() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("multiring.errors.LaunchError: rank 0 cannot start a thread (Resource temporarily unavail")
    assert "`ulimit -u`" in last
