"""Kill random parts of jobs on several hosts while they start or work (as root).

    sudo .venv/bin/python benchmarks/evidence/launching/kills.py [--seconds 1800] [--only ssh,nodes,torchrun,srun,run]
        [--results FILE]
    sudo .ci/with-clusters python benchmarks/evidence/launching/kills.py --only ray,dask [--seconds 1800] ...

The hosts are two virtual ones with sshd (ssh, nodes, torchrun), and two with a real Slurm (srun, and run: `multiring
run` in an allocation). For ray and dask they are the nodes of a cluster, and clusters.py says what a case is.

A case starts a job of four ranks, and sometimes a second one beside it. At a random moment it kills a random process of
the first job, or presses Ctrl-C once or twice. The job must end in bounded time with an exit code other than 0, and
name what was lost, once (after Ctrl-C it need not). No process and no file of it may be left on any host. The second
job must end well.

The results file has a line for each case; a further run goes on with the next seed.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.launching.clusters import FRAMEWORKS, Cluster, cluster_case, clusters
from benchmarks.evidence.support.claims import commit, machine
from tests.support.slurm_cluster import HOME as SLURM_HOME
from tests.support.slurm_cluster import USER_NUMBER, SlurmCluster
from tests.support.ssh_hosts import HOME as SSH_HOME
from tests.support.ssh_hosts import UID, SshHosts, ssh_hosts

if TYPE_CHECKING:
    import subprocess

RANKS = 4
START_S, AT_WORK_S, GONE_S = 6.0, 120.0, 60.0
PROGRAM = """
import os, subprocess, sys, time
import numpy as np, multiring
if "leave" in sys.argv:
    subprocess.Popen(["sleep", "100000"], start_new_session=True)
group = multiring.init()
sys.stdout.write(f"\\nrank {group.rank} at work\\n")
sys.stdout.flush()
for step in range(int(sys.argv[1])):
    total = np.full(1000, group.rank + 1.0)
    group.all_reduce(total)
    assert total[0] == 10.0
    time.sleep(0.02)
sys.stdout.write(f"\\nrank {group.rank} is done\\n")
"""
FOR_EVER, SHORT = "1000000", "900"
MODULES = {"ray": "ray", "dask": "distributed"}  # of .ci/with-clusters


@dataclass(frozen=True, kw_only=True, slots=True)
class Victim:
    """A process of a job: its host, how `ps` shows it, and what the job must say of its death (None: nothing)."""

    host: int
    shown: str
    says: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """How a job is started: the commands by host, and what may be killed.

    Attributes:
        interrupted: the process that gets Ctrl-C, as `ps` shows it.
        limit_s: how long the job may take to end, with the time-outs of the launcher and a busy machine.
    """

    commands: tuple[tuple[str, ...], ...]
    victims: dict[str, Victim]
    interrupted: str
    limit_s: float = 100.0


RANK = r"^\S*python\S* (-u )?\S*work\.py"
LOST_RANK = r"rank \d+ .*failed: killed by SIGKILL"
A_RANK = {f"a rank of host{host}": Victim(host=host, shown=RANK, says=LOST_RANK) for host in (0, 1)}


def kinds(steps: str, port: int) -> dict[str, Kind]:
    """Return the kinds of jobs, for a number of steps and a port that no other job uses."""
    run = (sys.executable, "-m", "multiring", "run")
    meet = ("--nodes", "2", "--meet", f"host0:{port}", "-n", "2", "work.py", steps, "leave")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2")
    place = (
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=host0:{port}",
        f"--rdzv-id={port}",
        "--rdzv-conf=join_timeout=60",
        "work.py",
        steps,
    )
    agents = {
        f"the agent of host{host}": Victim(host=host, shown="_launch.host_agent", says=f"host{host}") for host in (0, 1)
    }
    launcher = Victim(host=0, shown=r"multiring run --hosts", says=None)
    nodes = {
        f"node {node}": Victim(
            host=node, shown=f"multiring run --node-rank {node}", says=None if node == 0 else "host1|node 1"
        )
        for node in (0, 1)
    }
    step = Victim(host=1, shown="slurmstepd", says=r"host1|node \d|rank \d")
    return {
        "ssh": Kind(
            commands=((*run, "--hosts", "host0:2,host1:2", "work.py", steps, "leave"),),
            victims={
                **A_RANK,
                **agents,
                "the launcher": launcher,
                "ssh": Victim(host=0, shown=r"^ssh -T", says="host1"),
                "the session of sshd": Victim(host=1, shown=r"sshd: learner", says="host1"),
            },
            interrupted="multiring run --hosts",
        ),
        "nodes": Kind(
            commands=tuple((*run, "--node-rank", str(node), *meet) for node in (0, 1)),
            victims={**A_RANK, **nodes},
            interrupted="multiring run --node-rank 0",
        ),
        "torchrun": Kind(
            commands=(torchrun + place, torchrun + place),
            victims={
                **{
                    name: Victim(host=each.host, shown=RANK, says=r"rank|SIGKILL|Signal 9|Rendezvous")
                    for name, each in A_RANK.items()
                },
                "the agent of host1": Victim(
                    host=1, shown="torch.distributed.run", says=r"rank|SIGKILL|Signal|host|Rendezvous"
                ),
            },
            interrupted="torch.distributed.run",
            limit_s=300.0,
        ),
        "srun": Kind(
            commands=(("srun", "-N2", f"-n{RANKS}", "python", "/opt/programs/work.py", steps),),
            victims={
                **{
                    name: Victim(host=each.host, shown=RANK, says=r"task \d+: Killed|rank \d")
                    for name, each in A_RANK.items()
                },
                # Not slurmstepd: srun of Slurm 22.05 then waits for it without a limit, though all ranks have ended.
                "srun": Victim(host=0, shown="^srun -N2", says=None),
            },
            interrupted="^srun -N2",
        ),
        "run": Kind(
            commands=(("salloc", "-N2", f"-n{RANKS}", "multiring", "run", "/opt/programs/work.py", steps, "leave"),),
            victims={
                **A_RANK,
                "the agent of host1": agents["the agent of host1"],
                "slurmstepd": step,
                "the launcher": Victim(host=0, shown=r"python\S* \S*multiring run", says=None),
                "srun": Victim(host=0, shown="^srun ", says=r"host|node|srun"),
            },
            interrupted=r"python\S* \S*multiring run",
        ),
    }


class Site:
    """Two virtual hosts and an ordinary user.

    Args:
        made: the hosts with sshd, or with Slurm.
    """

    def __init__(self, made: SshHosts | SlurmCluster) -> None:
        self._made = made
        self.is_slurm = isinstance(made, SlurmCluster)
        self._user, self._home = (USER_NUMBER, SLURM_HOME) if self.is_slurm else (UID, str(SSH_HOME))
        self._started: list[subprocess.Popen[Any]] = []
        if isinstance(made, SlurmCluster):
            made.program("work.py", PROGRAM)
        else:
            made.write("work.py", PROGRAM)

    def script(self, host: int, text: str) -> str:
        """Return the output of a shell script of root on a host."""
        if isinstance(self._made, SlurmCluster):
            return self._made.root("sh", "-c", text, host=host)
        return self._made.as_root(self._made.lab.hosts[host], text)

    def start(self, host: int, name: str, command: Sequence[str]) -> "subprocess.Popen[Any]":
        """Start a command of the user; its output goes to files of the host."""
        words = (
            "sh",
            "-c",
            f'exec "$@" >{self._home}/{name}-{host}.out 2>{self._home}/{name}-{host}.err',
            "sh",
            *command,
        )
        variables = {"MULTIRING_INIT_TIMEOUT_S": "60"}
        if "--nodes" in command:
            variables["MULTIRING_SECRET"] = "of these jobs"  # noqa: S105 -- as in a test
        if isinstance(self._made, SlurmCluster):
            started: subprocess.Popen[Any] = self._made.user(*words, host=host, **variables)
        else:
            started = self._made.start(host, words, SSH_HOME, **variables)
        self._started.append(started)
        return started

    def close(self) -> None:
        """Kill what was started, and reap it: a host with a child that nobody has waited for does not end."""
        for each in self._started:
            each.kill()
            each.communicate()

    def told(self, job: "Running", kind: str) -> str:
        """Return what a job has written: kind is out or err."""
        hosts = range(len(job.commands))
        return "".join(
            self.script(host, f"cat {self._home}/{job.name}-{host}.{kind} 2>/dev/null || true") for host in hosts
        )

    def processes(self, host: int) -> list[tuple[int, str]]:
        """Return the number and command line of each process on a host that is the user's, or serves the user."""
        found = []
        for line in self.script(host, "ps -eo pid=,uid=,stat=,args= ww").splitlines():
            pid, user, state, shown = line.split(maxsplit=3)
            if "Z" not in state and (int(user) == self._user or "slurmstepd" in shown):
                found.append((int(pid), shown))
        return found

    def left(self, hosts: int = 2) -> list[str]:
        """Return the user's processes on all hosts."""
        return [f"host{host}: {shown}" for host in range(hosts) for _, shown in self.processes(host)]

    def files(self) -> set[str]:
        """Return the user's files on all hosts, without the outputs of jobs."""
        look = f"find /tmp /dev/shm /run /var/tmp {self._home} -user {self._user} 2>/dev/null || true"
        names = {f"host{host}: {name}" for host in (0, 1) for name in self.script(host, look).splitlines()}
        return {name for name in names if not re.search(r"/torchelastic_|/job-\d+\w*-\d\.(out|err)$", name)}

    def clean(self) -> None:
        """End everything of the user."""
        if self.is_slurm:
            self.script(0, f"scancel -u {self._user}")
        for host in (0, 1):
            self.script(host, f"pkill -9 -u {self._user} || true")
        if isinstance(self._made, SlurmCluster):
            with contextlib.suppress(AssertionError):
                self._made.wait_for_idle()


@dataclass(slots=True, eq=False)
class Running:
    """A job that runs: its name, and its command on each host."""

    name: str
    commands: list["subprocess.Popen[Any]"]

    @property
    def codes(self) -> list[int | None]:
        """The exit codes of its commands."""
        return [command.poll() for command in self.commands]

    @property
    def has_ended(self) -> bool:
        """Whether all commands have ended."""
        return None not in self.codes


def start(site: Site, kind: Kind, name: str) -> Running:
    """Start a job."""
    return Running(name, [site.start(host, name, words) for host, words in enumerate(kind.commands)])


def case(site: Site, kind_name: str, seed: int) -> dict[str, Any]:
    """Run a case, and return what was done and what was wrong."""
    random = Random(seed)  # noqa: S311 -- no secret
    before, faults = site.files(), []
    name, port = f"job-{seed}", 30_000 + seed % 1000 * 2
    beside: Running | None = None
    spared: set[tuple[int, int]] = set()
    if random.random() < 0.3:
        beside = start(site, kinds(SHORT, port + 1)[kind_name], f"{name}b")
        faults += [] if is_at_work(site, beside) else ["the job beside it does not start"]
        spared = {(host, pid) for host in (0, 1) for pid, _ in site.processes(host)}
    kind = kinds(FOR_EVER, port)[kind_name]
    job = start(site, kind, name)
    at_work = random.random() < 0.5
    delay_s = random.uniform(0, 1.0 if at_work else START_S)
    row: dict[str, Any] = {"seed": seed, "kind": kind_name, "at_work": at_work, "delay_s": round(delay_s, 2)}
    if at_work and not is_at_work(site, job):
        faults.append("it does not start")
    time.sleep(delay_s)
    row["victim"], says = (interrupt if random.random() < 0.25 else kill)(site, kind, random, spared)
    began = time.monotonic()
    wait_for(lambda: job.has_ended, kind.limit_s)
    row |= {"end_s": round(time.monotonic() - began, 1), "codes": job.codes, "beside": beside is not None}
    faults += faults_of_end(site, kind, job, says)
    # salloc ends with 0 if a signal has ended its command.
    if 0 in job.codes and (kind_name, row["victim"]) != ("run", "the launcher"):
        faults.append("exit code 0")
    if beside is not None:
        faults += faults_beside(site, beside)
    began = time.monotonic()
    wait_for(lambda: not site.left(), GONE_S)
    row["gone_s"] = round(time.monotonic() - began, 1)
    faults += [f"left: {each}" for each in (*site.left(), *sorted(site.files() - before))]
    if faults:
        faults += [site.told(job, kind)[-6000:] for kind in ("out", "err")]
        print(row, *faults, sep="\n   ", file=sys.stderr, flush=True)
        site.clean()
    return {**row, "faults": faults}


def faults_of_end(site: Site, kind: Kind, job: Running, says: str | None) -> list[str]:
    """Return what is wrong with the end of the job that has lost something."""
    err = site.told(job, "err")
    faults = [] if job.has_ended else [f"it does not end within {kind.limit_s:g} s"]
    if says is not None and not re.search(says, err):
        faults.append(f"it does not say {says}")
    faults += [f"said {count} times: {line}" for line, count in repeated(err, len(job.commands))]
    if "internal error" in err or re.search(r"multiring/_(launch|cli)/\S+\", line", err):
        faults.append("a traceback of the launcher")
    return faults


def faults_beside(site: Site, job: Running) -> list[str]:
    """Return what is wrong with the job beside it, which must end well."""
    wait_for(lambda: job.has_ended, AT_WORK_S)
    if set(job.codes) == {0} and site.told(job, "out").count("is done") == RANKS:
        return []
    return [f"the job beside it: {job.codes} {site.told(job, 'err')}"]


def kill(site: Site, kind: Kind, random: Random, spared: set[tuple[int, int]]) -> tuple[str, str | None]:
    """Kill a random process of the job that lives; return which, and what the job must say of it."""
    found = []
    for host in (0, 1):
        processes = [(pid, shown) for pid, shown in site.processes(host) if (host, pid) not in spared]
        for name, victim in kind.victims.items():
            pids = [pid for pid, shown in processes if re.search(victim.shown, shown)]
            if victim.host == host and pids:
                # A launcher and srun have helpers of the same command line, which were started later.
                found.append((name, victim, pids if victim.shown == RANK else [min(pids)]))
    if not found:
        return interrupt(site, kind, random, spared)
    name, victim, pids = random.choice(sorted(found, key=lambda each: each[0]))
    pid = random.choice(pids)
    site.script(victim.host, f"kill -9 {pid} || true")
    return name, victim.says


def interrupt(site: Site, kind: Kind, random: Random, spared: set[tuple[int, int]]) -> tuple[str, str | None]:
    """Press Ctrl-C once or twice; srun ends after two presses only. Return this, and what the job must say."""
    times = 2 if kind.interrupted.startswith("^srun") else random.choice((1, 1, 2))
    for number in range(times):
        for pid, shown in site.processes(0):
            if re.search(kind.interrupted, shown) and (0, pid) not in spared:
                site.script(0, f"kill -INT {pid} || true")
        time.sleep(0.3 * (times - 1 - number))
    return f"Ctrl-C, {times} times", None


def repeated(err: str, hosts: int) -> Iterator[tuple[str, int]]:
    """Return lines of the launcher that a terminal has shown more than once."""
    counts = Counter(line for line in err.splitlines() if line.startswith("multiring: ") and "waiting for" not in line)
    for line, count in counts.items():
        if count > hosts:
            yield line, count


def is_at_work(site: Site, job: Running) -> bool:
    """Wait until all ranks of a job are at work, and return whether they are."""

    def are_at_work() -> bool:
        return site.told(job, "out").count("at work") == RANKS

    wait_for(lambda: are_at_work() or job.has_ended, AT_WORK_S)
    return are_at_work() and not job.has_ended


def wait_for(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait until a condition holds, and return whether it did in time."""
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


@contextlib.contextmanager
def sites(names: Sequence[str]) -> Iterator[dict[str, Site | Cluster]]:
    """Start the hosts that jobs of these kinds need."""
    with contextlib.ExitStack() as stack:
        made: dict[str, Site | Cluster] = {}
        if frameworks := [name for name in names if name in FRAMEWORKS]:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            made |= stack.enter_context(clusters(frameworks, place))
        if over_ssh := [name for name in names if name in ("ssh", "nodes", "torchrun")]:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            site = Site(stack.enter_context(ssh_hosts(2, folder)))
            stack.callback(site.close)
            made |= dict.fromkeys(over_ssh, site)
        if by_slurm := [name for name in names if name in ("srun", "run")]:
            site = Site(stack.enter_context(SlurmCluster(2, shared=True, cpus=8)))
            stack.callback(site.close)
            made |= dict.fromkeys(by_slurm, site)
        yield made


def main() -> int:
    """Run cases, and print a table; return 1 if a case was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800.0, help="time for new cases")
    parser.add_argument("--only", default="ssh,run,nodes,srun,torchrun", help="kinds of jobs")
    parser.add_argument("--results", type=Path, default=Path("build/kills.jsonl"), help="file with a line a case")
    arguments = parser.parse_args()
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    # A shell ignores SIGINT in its background commands, and their children inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    names = arguments.only.split(",")
    for name in MODULES.keys() & set(names):
        if find_spec(MODULES[name]) is None:
            parser.error(f"{name} is not installed here: start this program by `.ci/with-clusters python`")
    text = arguments.results.read_text() if arguments.results.exists() else ""
    done = [json.loads(line) for line in text.splitlines()]
    until_s = time.monotonic() + arguments.seconds
    with sites(names) as made:
        while time.monotonic() < until_s:
            seed = len(done)
            name = names[seed % len(names)]
            site = made[name]
            done.append(cluster_case(site, seed) if isinstance(site, Cluster) else case(site, name, seed))
            with arguments.results.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            shown = {key: value for key, value in done[-1].items() if key not in ("faults", "says")}
            print(shown, *done[-1]["faults"], sep="\n   ", file=sys.stderr, flush=True)
    print(f"# Killed parts of jobs, {time.strftime('%Y-%m-%d %H:%M')}\n")
    print(f"`{' '.join(sys.argv)}` at commit {commit()}, {machine()}, load {os.getloadavg()[0]:.0f}\n")
    print("| started by | cases | at work | beside another job | wrong | until the end, median | longest |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        rows = [row for row in done if row["kind"] == name]
        times = sorted(row["end_s"] for row in rows) or [0.0]
        counts = [len(rows), *(sum(bool(row[key]) for row in rows) for key in ("at_work", "beside", "faults"))]
        print("|", " | ".join(map(str, [name, *counts, f"{times[len(times) // 2]} s", f"{times[-1]} s"])), "|")
    return 1 if any(row["faults"] for row in done) else 0


if __name__ == "__main__":
    sys.exit(main())
