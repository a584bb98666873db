"""A process that ends what a rank leaves behind, for ranks that are processes of a cluster's framework.

Usage: `python -m multiring._launch.rank_watchdog JOB RANK`, with a pipe as standard input.

The rank, which is the parent, writes to the pipe when it leaves the job. After that, or after the rank's death, the
watchdog ends the processes that carry the rank's variables, because the rank has started them. The end of the pipe is
no sign of the rank's death: processes that the rank forked hold the pipe, too.
"""

import os
import select
import signal
import sys
from collections.abc import Sequence

from multiring._launch.leftovers import end_leftovers
from multiring._launch.signals import PASSED_ON

_GRACE_S = 2.0
_PAUSE_S = 0.5


def main(arguments: Sequence[str]) -> None:
    """Wait for the rank's end, then end its processes."""
    job, rank = arguments
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, *PASSED_ON):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == parent and not select.select([0], (), (), _PAUSE_S)[0]:
        pass
    end_leftovers(job, (), _GRACE_S, rank=int(rank))


if __name__ == "__main__":
    main(sys.argv[1:])
