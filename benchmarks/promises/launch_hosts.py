"""Time from the command to the first step on two virtual hosts with two ranks each, by ssh and by mpiexec.

    sudo .venv/bin/python benchmarks/promises/launch_hosts.py [--turns 9]

Each turn runs `multiring run --hosts` once by ssh and once by Hydra's mpiexec, which reaches the hosts by the same
sshd. The time ends with rank 0's first all_reduce. The time in which rank 0 imports numpy and multiring is taken off.
The exit code is 1 if the median by ssh is more than 1.5 s above that by mpiexec.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.support.ssh_hosts import RUN, SshHosts, ssh_hosts

from multiring._bench.install import installed

MOST_S = 1.5
PROGRAM = """
import time
began = time.time()
import numpy, multiring
imported = time.time()
group = multiring.init()
group.all_reduce(numpy.ones(4))
if group.rank == 0:
    print("first", repr(time.time()), repr(imported - began), flush=True)
"""


def seconds(hosts: SshHosts, launcher: str, folder: Path) -> float:
    """Return the seconds to the first step, without the imports."""
    path = f"{folder}/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
    words = [*RUN, "--launcher", launcher, "--hosts", "host0:2,host1:2", "--", "python", "first.py"]
    began = time.time()
    done = hosts.run(0, words, PATH=path, HYDRA_LAUNCHER="ssh")
    [line] = [line for line in done.stdout.splitlines() if "first" in line] or [done.stderr]
    _, at, imports = line.rsplit(None, 2)
    return float(at) - began - float(imports)


def main() -> int:
    """Measure, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    folder = installed("mpich")
    times: dict[str, list[float]] = {"ssh": [], "mpiexec": []}
    with tempfile.TemporaryDirectory() as keys, ssh_hosts(2, Path(keys), [folder]) as hosts:
        hosts.write("first.py", PROGRAM)
        for _ in range(turns):
            for launcher, found in times.items():
                found.append(seconds(hosts, launcher, folder))
    for launcher, found in times.items():
        print(
            f"{launcher:8} median {statistics.median(found):.2f} s of {turns}: {min(found):.2f} to {max(found):.2f} s"
        )
    return int(statistics.median(times["ssh"]) > statistics.median(times["mpiexec"]) + MOST_S)


if __name__ == "__main__":
    sys.exit(main())
