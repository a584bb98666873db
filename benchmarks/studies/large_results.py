"""Measure how long large results of `horovod.run(hosts=...)` take to come back over ssh (as root).

    sudo .venv/bin/python benchmarks/studies/large_results.py [--megabytes 1,30,300]

Two virtual hosts with sshd have a rank each. Each rank returns an array of so many megabytes; the caller compares every
element. A time is from the call to the result. The peaks of memory are those of the calling process and of its
launcher, which has the arrays of both ranks.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import commit, machine
from tests.support.ssh_hosts import ssh_hosts

LIBRARY = """
import numpy as np
import multiring

def large(megabytes):
    group = multiring.init()
    total = np.ones(1)
    group.all_reduce(total)
    assert total[0] == 2.0
    return np.arange(megabytes * 125_000, dtype=np.int64) + group.rank
"""
SCRIPT = """
import json, resource, sys, time
import numpy as np
from multiring.horovod import run
import library

megabytes = int(sys.argv[1])
began = time.monotonic()
results = run(library.large, (megabytes,), num_proc=2, hosts="host0:1,host1:1")
seconds = time.monotonic() - began
for rank, result in enumerate(results):
    assert result.nbytes == megabytes * 1_000_000
    assert np.array_equal(result, np.arange(megabytes * 125_000, dtype=np.int64) + rank)
peaks = [resource.getrusage(each).ru_maxrss / 1000 for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print("told", json.dumps([seconds, *peaks]))
"""


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", default="1,30,300", help="sizes of a rank's result")
    sizes = [int(each) for each in parser.parse_args().megabytes.split(",")]
    print(f"# Large results over ssh, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{' '.join(sys.argv)}` at commit {commit()}, {machine()}, load {os.getloadavg()[0]:.0f}\n")
    print("| MB of each of two ranks | seconds | peak of the caller | of its launcher |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name, ssh_hosts(2, Path(name)) as hosts:
        hosts.write("library.py", LIBRARY)
        hosts.write("script.py", SCRIPT, [0])
        for size in sizes:
            done = hosts.run(0, ["python", "script.py", str(size)])
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
            seconds, *peaks = json.loads(done.stdout.rpartition("told ")[2])
            print(f"| {size} | {seconds:.1f} | {peaks[0]:.0f} MB | {peaks[1]:.0f} MB |", flush=True)
            for host in (0, 1):
                assert hosts.wait_until_gone(host) == []
    return 0


if __name__ == "__main__":
    sys.exit(main())
