"""Compare the start of a job on 2 hosts with 2 ranks each by ssh, srun and mpiexec (as root).

    sudo .venv/bin/python benchmarks/promises/launch_hosts.py [--rounds 9] [--only ssh,slurm]

The hosts are virtual, one pair with sshd and one pair with Slurm, of the packages that `make ssh-test` and
`make slurm-test` install. mpiexec is MPICH's (`multiring bench --install mpich`), which reaches the hosts by ssh, and
in a Slurm allocation by srun. Each round runs every command once, so all of them see the same load. A figure is the
median of the rounds.

A time is from the start of the command to the end of the program's first all_reduce on the last rank, without the
import of multiring in the ranks. The parts of a time are separated by the moments at which the last rank gets so far:
until Python runs the program, the import, `init`, the all_reduce. The ceiling is relative to mpiexec in the same round.
"""

import argparse
import compileall
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # lets this script import from the repository root

from tests.support.slurm_cluster import SlurmCluster, missing
from tests.support.ssh_hosts import HOME, SSHD, ssh_hosts

from multiring._bench.install import installed
from multiring.errors import MultiringError

ROOT = Path(__file__).parents[2]
CEILING_S = 1.5
RANKS, ON_EACH = 4, 2
_LONGEST_S = 100.0  # of a round
FILES_OF_MPICH = ("bin/mpiexec", "bin/hydra_pmi_proxy", "lib/libmpi.so.12")
PROGRAM = """
import time
marks = [time.monotonic()]
import multiring
multiring.init
marks.append(time.monotonic())
group = multiring.init()
marks.append(time.monotonic())
import numpy as np
total = np.full(1000, group.rank + 1.0)
group.all_reduce(total)
marks.append(time.monotonic())
assert total[0] == 10.0 and len(group.topology.hosts) == 2
print("marks", *marks, flush=True)
"""
PARTS = ("until Python runs", "import", "init", "all_reduce")
Run = dict[str, float]


def measure(commands: Mapping[str, Sequence[str]], rounds: int) -> list[dict[str, Run]]:
    """Run all commands `rounds` times in turn, and return the times of each."""
    return [{name: _run(words) for name, words in commands.items()} for _ in range(rounds)]


def _run(words: Sequence[str]) -> Run:
    begin = time.monotonic()
    done = subprocess.run(  # noqa: S603 -- our own commands
        words, capture_output=True, text=True, timeout=_LONGEST_S, check=False, stdin=subprocess.DEVNULL
    )
    whole = time.monotonic() - begin
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    ranks = [[float(each) for each in told.split()] for told in re.findall(r"marks ([\d. ]+)", done.stdout)]
    if not ranks:
        return {"whole": whole}
    if len(ranks) != RANKS:
        raise SystemExit(f"{' '.join(words)} ran {len(ranks)} ranks, want {RANKS}\n{done.stdout}{done.stderr}")
    moments = [begin, *(max(rank[number] for rank in ranks) for number in range(len(PARTS)))]
    parts = {name: after - before for name, before, after in zip(PARTS, moments, moments[1:], strict=False)}
    return {**parts, "figure": moments[-1] - begin - parts["import"], "whole": whole}


def _parts_of_the_launcher() -> dict[str, list[str]]:
    return {
        "(python)": [sys.executable, "-c", "pass"],
        "(import of multiring)": [sys.executable, "-c", "import multiring; multiring.init"],
        "(import of the launcher)": [sys.executable, "-m", "multiring", "run", "--help"],
        "(import of an agent)": [sys.executable, "-c", "import multiring._launch.host_agent"],
    }


@contextlib.contextmanager
def mpich() -> Iterator[Path]:
    """Copy MPICH to a folder that ordinary users of all hosts can read."""
    home = installed("mpich")
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="multiring-launch-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for each in FILES_OF_MPICH:
            (folder / each).parent.mkdir(exist_ok=True)
            shutil.copy(home / each, folder / each)
        shutil.copytree(home / "lib/mpich", folder / "lib/mpich", symlinks=True)  # libraries of its library
        yield folder


def by_ssh(home: Path, rounds: int) -> list[dict[str, Run]]:
    """Measure on two hosts with sshd."""
    with tempfile.TemporaryDirectory() as name, ssh_hosts(2, Path(name)) as hosts:
        program = str(hosts.write("first_step.py", PROGRAM))
        places = f"host0:{ON_EACH},host1:{ON_EACH}"
        mpiexec = [str(home / "bin/mpiexec"), "-launcher", "ssh", "-hosts", places, "-n", str(RANKS)]
        run = [sys.executable, "-m", "multiring", "run", "--hosts", places, program]
        commands = {
            "mpiexec": [*mpiexec, sys.executable, program],
            "multiring run --hosts": run,
            "(ssh host1 true)": ["ssh", "-oBatchMode=yes", "host1", "true"],
            **_parts_of_the_launcher(),
        }
        paths = {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "MPI4PY_LIBMPI": str(home / "lib/libmpi.so.12")}
        process = hosts.start(0, _inside(json.dumps(commands), rounds), HOME, **paths)
        out, err = process.communicate(timeout=_LONGEST_S * rounds)
        return _told(process.returncode, out.decode(), err.decode())


def _inside(commands: str, rounds: int) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--inside", commands, "--rounds", str(rounds)]


def _told(code: int, out: str, err: str) -> list[dict[str, Run]]:
    if code:
        raise SystemExit(out + err)
    rounds: list[dict[str, Run]] = json.loads(out.splitlines()[-1])
    return rounds


def by_slurm(home: Path, rounds: int) -> list[dict[str, Run]]:
    """Measure in an allocation of two hosts of a Slurm."""
    with SlurmCluster(2, environment={"OMP_NUM_THREADS": "1"}) as cluster:
        program = cluster.program("first_step.py", PROGRAM)
        nodes = ["-N2", f"-n{RANKS}"]
        mpiexec = [str(home / "bin/mpiexec"), "-launcher", "slurm", "-ppn", str(ON_EACH), "-n", str(RANKS)]
        commands = {
            "mpiexec": [*mpiexec, sys.executable, program],
            "srun": ["srun", *nodes, sys.executable, program],
            "srun --mpi=pmi2": ["srun", "--mpi=pmi2", *nodes, sys.executable, program],
            "multiring run": [sys.executable, "-m", "multiring", "run", program],
            "(srun true)": ["srun", *nodes, "true"],
            **_parts_of_the_launcher(),
        }
        inside = cluster.program("measure.json", json.dumps(commands))
        library = str(home / "lib/libmpi.so.12")
        process = cluster.user("salloc", *nodes, *_inside(inside, rounds), MPI4PY_LIBMPI=library)
        out, err = process.communicate(timeout=_LONGEST_S * rounds)
        return _told(process.returncode, out, err)


def report(title: str, rounds: Sequence[Mapping[str, Run]]) -> bool:
    """Print the medians of all commands, and return whether the ceiling holds."""
    print(f"\n{title}, {len(rounds)} rounds, load {os.getloadavg()[0]:.1f}; seconds")
    holds = True
    for name in rounds[0]:
        runs = [each[name] for each in rounds]
        middle = {part: statistics.median(run[part] for run in runs) for part in runs[0]}
        if "figure" not in middle:
            print(f"  {name:26} {middle['whole']:6.2f}")
            continue
        more = [each[name]["figure"] - each["mpiexec"]["figure"] for each in rounds]
        parts = ", ".join(f"{part} {middle[part]:.2f}" for part in PARTS)
        parts += f"; to the command's end {middle['whole']:.2f}"
        print(f"  {name:26} {middle['figure']:6.2f} without the import; {parts}")
        if name != "mpiexec":
            is_below = statistics.median(more) <= CEILING_S
            holds &= is_below
            spread = f"{statistics.median(more):+.2f} [{min(more):+.2f}, {max(more):+.2f}]"
            print(
                f"  {'':26} {spread} relative to mpiexec, ceiling {CEILING_S:+g}: {'holds' if is_below else 'MISSED'}"
            )
    return holds


def main() -> int:
    """Measure and print; 1 if a ceiling is missed, 2 if something is not installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="ssh,slurm")
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # the commands to measure on this host, for this program
    options = parser.parse_args()
    if options.inside:
        text = options.inside if options.inside.startswith("{") else Path(options.inside).read_text("utf-8")
        print(json.dumps(measure(json.loads(text), options.rounds)))
        return 0
    kinds = {"ssh": by_ssh, "slurm": by_slurm}
    only = options.only.split(",")
    if set(only) - set(kinds):
        parser.error(f"--only {options.only}: want names of {', '.join(kinds)}")
    absent = [] if os.geteuid() == 0 else ["root"]
    absent += [str(SSHD)] if "ssh" in only and not SSHD.exists() else []
    absent += missing() if "slurm" in only else []
    if absent:
        print(f"needs {', '.join(absent)}", file=sys.stderr)
        return 2
    # The hosts' user may not write bytecode here.
    compileall.compile_dir(ROOT / "src", quiet=1)
    compileall.compile_dir(ROOT / "tests/support", quiet=1)
    holds = True
    try:
        with mpich() as home:
            for kind in only:
                holds &= report(kind, kinds[kind](home, options.rounds))
    except MultiringError as error:
        print(f"multiring: {error}", file=sys.stderr)
        return 2
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
