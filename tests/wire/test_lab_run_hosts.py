"""`multiring run --hosts` in a lab with the lab's own ssh, by Hydra and by Open MPI, on every transport."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.mpi_ranks import mpi_start

from multiring.lab.host import AGENT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a lab needs root")

SUM = """
import os, sys, numpy as np, multiring
from pathlib import Path
secret = os.environ["MULTIRING_SECRET"].encode()  # which init takes out: what a rank starts is not told
group = multiring.init()
array = np.full(100_000, group.rank + 1.0)
group.all_reduce(array)
lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
shown = any(secret in line for line in lines)
has_mpi = "mpi4py.MPI" in sys.modules
sys.stdout.write(f"{os.uname().nodename} {array[0]} {multiring.local_rank()} mpi {has_mpi} shown {shown}\\n")
sys.stdout.flush()
"""


def run(mpi: str, hosts: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `multiring run --hosts HOSTS -- COMMAND` on host0 of a lab of two hosts."""
    prefix, more = mpi_start(mpi, 1)
    folders = f"{Path(prefix[0]).parent}:{Path(sys.executable).parent}"
    script = f'[ $MULTIRING_RANK = 0 ] || exit 0; PATH={Path(AGENT).parent}:$PATH; exec multiring run "$@"'
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
    allowed = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = {"PATH": f"{folders}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    lab = [sys.executable, "-m", "multiring", "lab", "--hosts", "2", "--", "sh", "-c", script, "sh"]
    return subprocess.run(
        [*lab, "--launcher", "mpiexec", "--hosts", hosts, "--", *command],
        env=kept | more | allowed | path | variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(("mpi", "engine"), [("mpich", "auto"), ("mpich", "mpi"), ("openmpi", "auto")])
def test_ranks_of_several_hosts_meet(mpi: str, engine: str, tmp_path: Path) -> None:
    script = tmp_path / "sum.py"
    script.write_text(SUM)
    done = run(mpi, "host0:2,host1:2", sys.executable, str(script), MULTIRING_ENGINE=engine)
    assert done.returncode == 0, done.stdout + done.stderr
    told = sorted(line[line.index("host") :] for line in done.stdout.splitlines() if "shown" in line)
    assert told == [f"host{h} 10.0 {r} mpi {engine == 'mpi'} shown False" for h in (0, 1) for r in (0, 1)]


def test_an_unknown_host_is_named_and_a_failure_is_passed_on() -> None:
    unknown = run("mpich", "host0:1,host9:1", "true")
    assert unknown.returncode != 0
    assert "host9" in unknown.stderr
    failed = run("mpich", "host0:1,host1:1", "sh", "-c", "exit 3")
    assert failed.returncode == 3
