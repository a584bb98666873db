"""Start the ranks of a job, and clean up after them.

Ranks on this machine are started directly, and ranks on other hosts with mpiexec.
"""

from multiring._launch.commands import CommandError as CommandError
from multiring._launch.function import FunctionOptions as FunctionOptions
from multiring._launch.function import run as run
from multiring._launch.function import run_function as run_function
from multiring._launch.horovod import horovod_without_effect as horovod_without_effect
from multiring._launch.hosts import run_over_hosts as run_over_hosts
from multiring._launch.job import JobOptions as JobOptions
from multiring._launch.local import die_with as die_with
from multiring._launch.local import run_local as run_local
from multiring._launch.mpiexec import parse_hostfile as parse_hostfile
