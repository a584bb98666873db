"""Start the ranks of a job, and clean up after them.

Ranks on this machine are started directly, and ranks on other hosts by agents, or with mpiexec.
"""

from typing import TYPE_CHECKING

from multiring._first_use import import_on_first_use

if TYPE_CHECKING:
    from multiring._launch.allocations import (
        SlurmAllocation,
        default_ranks,
        listed_hosts,
        run_in_slurm,
        slurm_allocation,
    )
    from multiring._launch.commands import CommandError
    from multiring._launch.function import FunctionOptions, run, run_function
    from multiring._launch.horovod import horovod_without_effect
    from multiring._launch.host_discovery import DiscoveryOptions
    from multiring._launch.hosts import HostsLauncher, hosts_beyond_this, run_over_hosts
    from multiring._launch.job import JobOptions
    from multiring._launch.local import run_local
    from multiring._launch.mpiexec import parse_hostfile, parse_hosts
    from multiring._launch.nodes import NodePlace, run_node
    from multiring._launch.rank_starts import die_with
    from multiring._launch.torchrun_variables import torchrun_nodes
    from multiring._runtime.engines.nvml import visible_gpus

import_on_first_use(
    __name__,
    {
        "multiring._launch.allocations": [
            "SlurmAllocation",
            "default_ranks",
            "listed_hosts",
            "run_in_slurm",
            "slurm_allocation",
        ],
        "multiring._launch.commands": ["CommandError"],
        "multiring._launch.function": ["FunctionOptions", "run", "run_function"],
        "multiring._launch.horovod": ["horovod_without_effect"],
        "multiring._launch.host_discovery": ["DiscoveryOptions"],
        "multiring._launch.hosts": ["HostsLauncher", "hosts_beyond_this", "run_over_hosts"],
        "multiring._launch.job": ["JobOptions"],
        "multiring._launch.local": ["run_local"],
        "multiring._launch.mpiexec": ["parse_hostfile", "parse_hosts"],
        "multiring._launch.nodes": ["NodePlace", "run_node"],
        "multiring._launch.rank_starts": ["die_with"],
        "multiring._launch.torchrun_variables": ["torchrun_nodes"],
        "multiring._runtime.engines.nvml": ["visible_gpus"],
    },
)
