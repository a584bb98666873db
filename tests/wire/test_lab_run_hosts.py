"""`multiring run --hosts` in a lab with the lab's own ssh, by Hydra and by Open MPI, on every transport."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import secret_search
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

# Each rank searches its host for the secret while all ranks run. Rank 0 keeps the secret in a file for a later search.
SEARCH = """
import os, subprocess, sys
from pathlib import Path
secret, (kept, *words) = os.environ["MULTIRING_SECRET"], sys.argv[1:]
import multiring
group = multiring.init()
if group.rank == 0:
    Path(kept).touch(0o600)
    Path(kept).write_text(secret)
group.barrier()
# The last word is a user who may read the environment of the ranks and of mpiexec: the one who runs the job.
for owners in ([str(os.getuid())], []):
    done = subprocess.run([sys.executable, *words, "-", *owners], input=secret, stdout=subprocess.PIPE, text=True)
    sys.stdout.write(f"{'found' if owners else 'of others'} {group.rank} {done.stdout}")
    sys.stdout.flush()
group.barrier()
"""
# The folders of temporary files and of the MPIs' files. /dev/shm is the host's own.
FOLDERS = "/tmp,/dev/shm,/run,/var/tmp,/var/log"  # noqa: S108 -- they are only searched


def run(mpi: str, hosts: str, *command: str, then: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `multiring run --hosts HOSTS -- COMMAND` on host0 of a lab of two hosts, and afterwards a shell script."""
    prefix, more = mpi_start(mpi, 1)
    folders = f"{Path(prefix[0]).parent}:{Path(sys.executable).parent}"
    as_a_user = f"PATH={Path(AGENT).parent}:$PATH; unset MULTIRING_SECRET"  # of the lab's own job
    script = f'[ $MULTIRING_RANK = 0 ] || exit 0; {as_a_user}; multiring run "$@"{then}'
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
    allowed = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = {"PATH": f"{folders}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    lab = [sys.executable, "-m", "multiring", "lab", "--hosts", "2", "--", "sh", "-c", script, "sh"]
    return subprocess.run(
        [*lab, "--launcher", "mpiexec", "--hosts", hosts, "--", *command],
        env=kept | more | allowed | path | variables,
        capture_output=True,
        text=True,
        timeout=240,
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


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_the_secret_is_in_no_command_line_or_environment_or_file_of_others(mpi: str, tmp_path: Path) -> None:
    script, kept = tmp_path / "search.py", tmp_path / "kept"
    script.write_text(SEARCH)
    words = [secret_search.__file__, "--folders", FOLDERS]
    look = " ".join([sys.executable, *words, "--left", "--but", str(kept), "-"])
    both = f"{look} <{kept}; ssh host1 {look} <{kept}"
    done = run(
        mpi,
        "host0:1,host1:1",
        sys.executable,
        str(script),
        str(kept),
        *words,
        then=f" && {both}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.rstrip().endswith("]")]
    found = {line[line.index("found") :] for line in told if "found" in line}
    assert found == {"found 0 []", "found 1 []"}, done.stdout
    # The search finds what is there: the environment of the ranks, which only their user can read.
    others = [json.loads(line[line.index('["/proc') :]) for line in told if "of others" in line]
    assert len(others) == 2
    assert all(path.endswith("/environ") for places in others for path in places), others
    assert [line for line in told if line.startswith("[0] [")][-2:] == ["[0] []", "[0] []"], done.stdout
    assert len(kept.read_text()) == 64
    assert kept.read_text() not in done.stdout + done.stderr
