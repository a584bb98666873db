"""How many cores' time a rank may use."""

import os

from multiring._limits.cpu_limit import cpu_limit


def cores_of_rank(host_ranks: int) -> float:
    """Return the number of cores whose time this rank can use, which need not be whole.

    Args:
        host_ranks: the number of ranks on this host. They share the time that a limit of the control group allows, and
            the cores, unless this process is bound to some of them.
    """
    own, every, limit = len(os.sched_getaffinity(0)), os.cpu_count() or 1, cpu_limit()
    # A rank that is bound to some cores does not share these cores.
    cores = float(own) if own < every else own / host_ranks
    return cores if limit is None else min(cores, limit / host_ranks)
