"""Start the ranks of a job, and clean up after them.

Ranks on this machine are started directly, and ranks on other hosts by agents, or with mpiexec.
"""

from multiring._launch.allocations import (
    SlurmAllocation,
    default_ranks,
    listed_hosts,
    run_in_slurm,
    slurm_allocation,
    spread,
)
from multiring._launch.commands import CommandError
from multiring._launch.function import FunctionOptions, run, run_function
from multiring._launch.horovod import horovod_without_effect
from multiring._launch.hosts import HostsLauncher, hosts_beyond_this, run_over_hosts
from multiring._launch.job import JobOptions
from multiring._launch.local import run_local
from multiring._launch.mpiexec import parse_hostfile
from multiring._launch.nodes import NodePlace, run_node
from multiring._launch.rank_starts import die_with
from multiring._launch.torchrun_nodes import torchrun_nodes
from multiring._runtime.engines.nvml import visible_gpus
