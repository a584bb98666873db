"""Compare random launches with the same programs run without a launcher.

    python benchmarks/evidence/launching/main.py [--seconds 1800] [--seed 1] [--only FAMILY,...] [--against CHECKOUT]

The families vary endings, outputs, environments and workers. They compare exit codes and output bytes.
benchmarks/evidence/support/cases.py explains the options and the records. All jobs run on this machine. The family
`addresses` needs root, and `host_lines` needs MPICH's mpiexec (`multiring bench --install mpich`). Without these, the
two families do nothing.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.launching import input as given
from benchmarks.evidence.launching import jobs
from benchmarks.evidence.launching import programs as bare
from benchmarks.evidence.support.cases import Family, Topic, main

FAMILIES = (
    Family(name="endings", run=jobs.endings, case_s=5.0, deadline_s=150.0, aims=["launch_04.py", "launch_20.py"]),
    Family(name="outputs", run=jobs.outputs, aims=["launch_03.py", "launch_26.py"]),
    Family(name="settings", run=given.settings, case_s=3.0, deadline_s=90.0, aims=["launch_09.sh", "launch_10.sh"]),
    Family(name="workers", run=jobs.workers, case_s=7.0, deadline_s=90.0, aims=["bug_10_spawn_workers.py"]),
    Family(name="children", run=jobs.children, case_s=7.0, deadline_s=90.0, aims=["bug_11_child_programs.py"]),
    Family(name="leftovers", run=jobs.leftovers, case_s=3.0, aims=["launch_05.py"]),
    Family(name="streams", run=given.streams, case_s=3.0, aims=["launch_06.sh"]),
    Family(name="scripts", run=given.scripts, case_s=2.0, aims=["launch_07.sh"]),
    Family(name="options", run=given.options, case_s=2.0, aims=["launch_08.sh"]),
    Family(name="horovodrun", run=given.horovodrun, case_s=3.0, aims=["launch_18.sh"]),
    Family(name="env_options", run=given.env_options, case_s=2.0, aims=["launch_21.sh"]),
    Family(name="readers_gone", run=given.readers_gone, case_s=3.0, aims=["launch_17.sh"]),
    Family(name="plans", run=given.plans, case_s=8.0, deadline_s=120.0, aims=["launch_01.sh"]),
    Family(name="devices", run=given.devices, case_s=4.0, deadline_s=90.0, aims=["launch_19.sh"]),
    Family(name="ignored_options", run=given.ignored_options, case_s=10.0, deadline_s=200.0, aims=["launch_16.sh"]),
    Family(name="limits", run=given.limits, case_s=4.0, deadline_s=90.0, aims=["bug_08_ulimit_v.py"]),
    Family(name="remains", run=given.remains, case_s=8.0, deadline_s=120.0, aims=["bug_09_slurm_leftovers.py"]),
    Family(name="bars", run=jobs.bars, case_s=5.0, aims=["launch_23.py"]),
    Family(name="host_lines", run=given.host_lines, case_s=5.0, deadline_s=90.0, aims=["launch_12.sh"]),
    Family(name="addresses", run=given.addresses, case_s=15.0, deadline_s=120.0, aims=["bug_13_addresses.py"]),
    Family(name="programs", run=bare.programs, case_s=2.0, deadline_s=150.0),
    Family(name="signals", run=bare.signals, case_s=4.0, deadline_s=90.0),
    Family(name="commands", run=bare.commands, case_s=1.0, deadline_s=90.0),
    Family(name="endings_torch", run=jobs.endings_torch, case_s=8.0, deadline_s=150.0, aims=["launch_02.py"]),
)
SHOWS = {
    "bug_08_ulimit_v.py": ["limit -f: not named"],
    "bug_09_slurm_leftovers.py": [
        "remains: variables of srun --pty are not named",
        "remains: variables of torchrun are not named",
    ],
    "bug_10_spawn_workers.py": ["workers join: spawn", "workers join: forkserver"],
    "bug_11_child_programs.py": ["child joins:"],
    "bug_13_addresses.py": ["addresses: a shared one is not named"],
    "launch_01.sh": ["plan: a saved one is refused"],
    "launch_02.py": ["victim named: torch's hook"],
    "launch_03.py": ["lines mixed: one file"],
    "launch_04.py": ["late end: timeline"],
    "launch_05.py": ["left behind: without our variables"],
    "launch_06.sh": ["closed stream: >&-", "closed stream: 2>&-"],
    "launch_07.sh": ["script: executable, and names no interpreter"],
    "launch_08.sh": ["option: another one is named"],
    "launch_09.sh": ["setting MULTIRING_INIT_TIMEOUT_S:"],
    "launch_10.sh": ["setting MULTIRING_SEGMENT_BYTES:"],
    "launch_12.sh": ["hosts: lines mixed"],
    "launch_16.sh": ["plan of data: an option is ignored"],
    "launch_17.sh": ["reader gone: a word, or another code"],
    "launch_18.sh": ["horovodrun: another option is named for -np", "horovodrun: a traceback of --mpi-args"],
    "launch_19.sh": ["device: replaced by a timeline"],
    "launch_20.py": ["victim named: catches, leaves and ends", "victim named: catches, says so and ends"],
    "launch_21.sh": ["env: replaced without a word"],
    "launch_23.py": ["bar and line in one line: on different streams"],
    "launch_26.py": ["line cut: one file", "line cut: two files"],
}
TOPIC = Topic(name="launching", program="evidence/launching/main.py", families=FAMILIES, shows=SHOWS)

if __name__ == "__main__":
    sys.exit(main(TOPIC))
