"""Start ranks on this machine, and leave none behind."""

from multiring.launch.job import CommandError as CommandError
from multiring.launch.local import run_local as run_local
