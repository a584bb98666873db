"""Kill random parts of a job on a Ray or Dask cluster of two virtual hosts, for kills.py.

Each host offers four CPUs. A case starts a driver with a job of four ranks, and sometimes a second driver beside it. At
a random moment one thing happens: a process of the job or of a node is killed, the driver gets Ctrl-C or SIGTERM, or a
rank raises. The driver must report the end of the job in bounded time, with a reason, and run a second job in the same
session. If the driver itself has ended, a new one must run its jobs. A killed node is started again. At the end, no
process, file, task, placement group or CPU of the jobs may be left.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.evidence.launching.cluster_driver import CHILD, RANKS
from tests.support.cluster_hosts import ClusterHosts, wait_for

CPUS = 4  # of each host
FOR_EVER, BESIDE = "1000000", "400"  # steps
START_S = 12.0  # a driver's start takes about as long
AT_WORK_S, NEXT_S, GONE_S = 240.0, 300.0, 90.0
DRIVER = rf"^\S*python\S* -m {re.escape('benchmarks.evidence.launching.cluster_driver')} .*/"
LEFT = re.compile(rf"sleep {CHILD}|multiring\._launch|ray::MultiringRank|launching\.cluster_driver")
LOST_RANK = r"rank \d|could not be started|did not start"
LOST_WORKER = r"rank \d|Dask worker|could not be started|not answered"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of a cluster or a job that is killed.

    Attributes:
        host: where it runs.
        shown: how `ps` shows it.
        says: what the driver must say of its death; None if the driver itself dies.
        of_node: whether its death ends the node: then nothing else may run there.
        of_cluster: whether its death ends the whole cluster, and not a single node.
    """

    host: int
    shown: str
    says: str | None
    of_node: bool = False
    of_cluster: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """How a cluster is started, and its parts.

    Attributes:
        nodes: the commands of each host.
        address: where the driver connects.
        signs: what the nodes' outputs say once they are up, for commands that stay; empty for those that return.
        limit_s: how long a job may take to end, with the framework's own time-outs and a busy machine.
    """

    nodes: tuple[tuple[str, ...], ...]
    address: str
    signs: tuple[tuple[str, ...], ...]
    parts: dict[str, Part]
    limit_s: float
    variables: dict[str, str] = field(default_factory=dict)


DRIVER_PART = Part(host=0, shown=DRIVER, says=None)
RAY_NODE = f"--num-cpus={CPUS} --object-store-memory=100000000 --disable-usage-stats"
RAY_RANK = r"^ray::MultiringRank"
DASK_NODE = f"dask worker tcp://host0:8786 --nthreads {CPUS}"
FRAMEWORKS = {
    "ray": Framework(
        nodes=(
            (f"ray start --head --include-dashboard=false {RAY_NODE}",),
            (f"ray start --address=host0:6379 {RAY_NODE}",),
        ),
        address="host0:6379",
        signs=((), ()),
        parts={
            **{f"a rank of host{host}": Part(host=host, shown=RAY_RANK, says=LOST_RANK) for host in (0, 1)},
            "the driver": DRIVER_PART,
            "the raylet of host1": Part(host=1, shown="raylet/raylet", says=LOST_RANK, of_node=True),
            "the agent of host1": Part(host=1, shown="DashboardAgent|dashboard/agent", says=LOST_RANK, of_node=True),
            "the raylet of host0": Part(host=0, shown="raylet/raylet", says=None, of_cluster=True),
            "the head's store": Part(host=0, shown="gcs_server", says=None, of_cluster=True),
        },
        limit_s=150.0,
        variables={
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": "/dev/shm",  # noqa: S108 -- the host's own
            "RAY_raylet_start_wait_time_s": "200",  # a busy machine
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "5" * 64,  # so that none in the user's home counts
        },
    ),
    "dask": Framework(
        nodes=(("dask scheduler", DASK_NODE), (DASK_NODE,)),
        address="tcp://host0:8786",
        signs=(("Scheduler at", "Registered to"), ("Registered to",)),
        parts={
            **{
                f"a rank of host{host}": Part(host=host, shown="_launch.function_rank", says=LOST_RANK)
                for host in (0, 1)
            },
            **{
                f"a rank's launcher on host{host}": Part(host=host, shown="_launch.kept_rank", says=LOST_RANK)
                for host in (0, 1)
            },
            "the driver": DRIVER_PART,
            "the worker of host1": Part(host=1, shown="multiprocessing.spawn", says=LOST_WORKER, of_node=True),
            "the nanny of host1": Part(host=1, shown="dask worker tcp", says=LOST_WORKER, of_node=True),
            "the scheduler": Part(
                host=0, shown="dask scheduler", says="Dask|tcp://host0|rank", of_cluster=True
            ),
        },
        limit_s=150.0,
        variables={"DASK_TEMPORARY_DIRECTORY": "/dev/shm/dask"},  # noqa: S108 -- as above
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver that was started: its folder, and the file of its output."""

    folder: Path
    log: Path

    @property
    def told(self) -> str:
        """Its output."""
        return self.log.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """Its exit code, or None while it runs."""
        found = re.search(r"^the driver's exit code: (\d+)$", self.told, re.MULTILINE)
        return None if found is None else int(found[1])

    def report(self, job: str) -> dict[str, Any] | None:
        """What it has said of a job."""
        lines = [line for line in self.told.splitlines() if line.startswith(f'{{"job": "{job}"')]
        return json.loads(lines[0]) if lines else None

    def is_at_work(self, ranks: int) -> bool:
        """Whether all ranks of its first job have met."""
        return len(list(self.folder.glob("at-work-*"))) == ranks


class Cluster:
    """A cluster of a framework on two virtual hosts.

    Args:
        name: the framework, a key of FRAMEWORKS.
        hosts: the hosts.
    """

    def __init__(self, name: str, hosts: ClusterHosts) -> None:
        self.name, self.hosts, self.framework = name, hosts, FRAMEWORKS[name]
        self._starts = 0

    def restart(self) -> None:
        """End everything on the hosts, and start the cluster."""
        for host in (0, 1):
            self.end_all(host)
        for host in (0, 1):
            self.start_node(host)

    def start_node(self, host: int) -> None:
        """Start the processes of a host, and wait until they are up."""
        signs = self.framework.signs[host]
        for number, command in enumerate(self.framework.nodes[host]):
            self._starts += 1
            if signs:
                log = self.hosts.start(host, f"node-{self._starts}", "bash", "-c", f"exec {command}")
                wait_for(log, signs[number], timeout_s=240)
            else:
                code, output = self.hosts.run(host, "bash", "-c", command, timeout_s=240)
                if code != 0:
                    raise RuntimeError(output)

    def end_all(self, host: int) -> None:
        """Kill all processes of a host, and remove the framework's files."""
        script = "kill -9 -1; sleep 1; rm -rf /dev/shm/ray* /dev/shm/dask* /dev/shm/session*"
        self.hosts.run(host, "bash", "-c", script, timeout_s=60)

    def drive(self, name: str, ranks: int, steps: str) -> Driver:
        """Start a driver with its two jobs on host 0."""
        folder = self.hosts.folder / name
        folder.mkdir()
        words = (sys.executable, "-m", "benchmarks.evidence.launching.cluster_driver", self.name)
        keeping = '"$@"; code=$?; echo; echo "the driver\'s exit code: $code"'
        job = (self.framework.address, str(folder), str(ranks), steps)
        return Driver(folder, self.hosts.start(0, name, "bash", "-c", keeping, "bash", *words, *job))

    def left(self) -> dict[str, Any]:
        """Return what the cluster keeps, or an empty dictionary if it does not answer."""
        command = (sys.executable, "-m", "benchmarks.evidence.launching.cluster_driver", self.name)
        try:
            _, output = self.hosts.run(0, *command, self.framework.address, timeout_s=90)
        except AssertionError:
            return {}
        lines = [line for line in output.splitlines() if line.startswith("{")]
        return json.loads(lines[-1]) if lines else {}

    @property
    def is_whole(self) -> bool:
        """Whether both nodes answer."""
        return self.left().get("threads") == 2 * CPUS

    def processes(self, host: int) -> list[tuple[int, str]]:
        """Return the number and the command line of each process on a host, without helpers.

        A helper is a child with the command line of its parent, such as the watchdog of a rank's launcher. If it is
        killed, the job goes on.
        """
        found = {}
        for line in self.hosts.run(host, "ps", "-eo", "pid=,ppid=,stat=,args=", "ww", timeout_s=60)[1].splitlines():
            pid, parent, state, *shown = line.split(maxsplit=3)
            if shown and "Z" not in state:
                found[pid] = (parent, shown[0])
        return [
            (int(pid), shown)
            for pid, (parent, shown) in found.items()
            if parent not in found or found[parent][1] != shown or not keeps_helpers(shown)
        ]

    def left_processes(self) -> list[str]:
        """Return the processes of jobs and drivers on both hosts."""
        shown = [f"host{host}: {each}" for host in (0, 1) for each in self.hosts.processes(host)]
        return [each for each in shown if LEFT.search(each)]

    def files(self) -> set[str]:
        """Return the files in the hosts' shared memory and of temporary files, without the framework's."""
        own = r"/dev/shm/(ray|dask|session_|\.multiring-lab)|/own/(ray|dask)"  # noqa: S108 -- the hosts' own
        look = f"find /dev/shm {self.hosts.folder}/own 2>/dev/null"
        names = {
            f"host{host}: {name}"
            for host in (0, 1)
            for name in self.hosts.run(host, "bash", "-c", look, timeout_s=60)[1].splitlines()
        }
        return {name for name in names if not re.search(own, name)}


def keeps_helpers(shown: str) -> bool:
    """Return whether children of a process with this command line are its helpers, if they have the same one."""
    return "_launch.kept_rank" in shown


def cluster_case(cluster: Cluster, seed: int) -> dict[str, Any]:
    """Run a case, and return what was done and what was wrong."""
    random = Random(seed)  # noqa: S311 -- no secret
    if not cluster.is_whole:
        cluster.restart()
    known = set(cluster.left().get("jobs", ()))  # a worker of Dask knows a job for a while if its driver was killed
    before, faults, began = cluster.files(), [], time.time()
    name = f"{cluster.name}-{seed}"
    act = random.choice(("kill", "kill", "kill", "node", "node", "Ctrl-C", "SIGTERM", "raise"))
    if act == "node" and random.random() < 0.25:
        act = "cluster"
    beside = None
    if act not in ("node", "cluster") and random.random() < 0.4:
        beside = cluster.drive(f"{name}b", 2, BESIDE)
        faults += [] if wait_until(lambda: beside.is_at_work(2), AT_WORK_S) else ["the job beside it does not start"]
    driver = cluster.drive(name, RANKS, FOR_EVER)
    at_work = act == "raise" or random.random() < 0.6
    delay_s = random.uniform(0, 1.0 if at_work else START_S)
    if at_work and not wait_until(lambda: driver.is_at_work(RANKS) or driver.code is not None, AT_WORK_S):
        faults.append("it does not start")
    time.sleep(delay_s)
    victim, part = _do(cluster, driver, act, random, spared=beside)
    row: dict[str, Any] = {"seed": seed, "kind": cluster.name, "at_work": at_work, "delay_s": round(delay_s, 2)}
    row |= {"victim": victim, "beside": beside is not None}
    row["end_s"], more = _end_of(cluster, driver, part)
    faults += [*more, *_faults_of_next(cluster, driver, part, name)]
    if beside is not None:
        faults += _faults_of_good(beside, 2, "the job beside it")
    row["gone_s"], more = _leftovers(cluster, part, before, known)
    faults += more
    row |= {"codes": [driver.code], "case_s": round(time.time() - began, 1)}
    if faults:
        faults.append(driver.told[-6000:])
        cluster.restart()
    return {**row, "faults": faults}


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait until a condition holds, and return whether it did in time."""
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.3)
    return True


def _do(cluster: Cluster, driver: Driver, act: str, random: Random, spared: Driver | None) -> tuple[str, Part]:
    """Do something to the job; return what, and the part that must be named."""
    mine = f"{driver.folder}/?( |$)"
    running = {host: cluster.processes(host) for host in (0, 1)}
    drivers = [pid for pid, shown in running[0] if re.search(DRIVER, shown) and re.search(mine, shown)]
    if act in ("Ctrl-C", "SIGTERM"):
        for pid in drivers:
            cluster.hosts.run(0, "kill", f"-{'INT' if act == 'Ctrl-C' else 'TERM'}", str(pid), timeout_s=60)
        return act, DRIVER_PART
    if act == "raise":
        rank = random.randrange(RANKS)
        (driver.folder / f"raise-{rank}").touch()
        return "raises", Part(host=0, shown="", says=f"rank {rank} raised(.|\n)*ZeroDivisionError: rank {rank} divides")
    found = []
    for name, part in cluster.framework.parts.items():
        pids = [pid for pid, shown in running[part.host] if re.search(part.shown, shown)]
        if part is DRIVER_PART:
            pids = drivers
        elif "rank" in name and spared is not None:
            pids = []  # it cannot be told whose rank it is
        if pids and (part.of_node, part.of_cluster) == (act == "node", act == "cluster"):
            found.append((name, part, pids))
    if not found:
        found = [("the driver", DRIVER_PART, drivers)]
    name, part, pids = random.choice(found)
    for pid in random.sample(pids, min(1, len(pids))):
        cluster.hosts.run(part.host, "kill", "-9", str(pid), timeout_s=60)
    return name, part


def _restore(cluster: Cluster, part: Part) -> None:
    """Start a node again."""
    if cluster.name == "dask" and part.shown == "multiprocessing.spawn":
        return  # its nanny starts another worker
    cluster.start_node(part.host)


def _end_of(cluster: Cluster, driver: Driver, part: Part) -> tuple[float, list[str]]:
    """Wait for the end of the first job; return after how many seconds it came, and what was wrong with it."""
    acted, limit_s = time.time(), cluster.framework.limit_s
    if part.of_node:
        _restore(cluster, part)
    wait_until(lambda: driver.report("first") is not None or driver.code is not None, limit_s)
    first = driver.report("first")
    end_s = (first["at"] if first else time.time()) - acted
    return round(end_s, 1), _faults_of_end(driver, first, part, end_s, limit_s)


def _leftovers(cluster: Cluster, part: Part, before: set[str], known: set[str]) -> tuple[float, list[str]]:
    """Wait until nothing of the jobs is left; return after how many seconds, and what is left nevertheless."""
    began = time.time()
    wait_until(lambda: not cluster.left_processes(), GONE_S)
    gone_s = round(time.time() - began, 1)
    files = cluster.files() - before
    if part.of_node or part.of_cluster:  # a nanny of Dask that is killed leaves the semaphores of its queue
        files = {each for each in files if "/sem.mp-" not in each}
    faults = [f"left: {each}" for each in (*cluster.left_processes(), *sorted(files))]
    return gone_s, faults + _faults_of_cluster(cluster, known, knows_jobs=part.says is None)


def _faults_of_end(driver: Driver, first: dict[str, Any] | None, part: Part, end_s: float, limit_s: float) -> list[str]:
    """Return what is wrong with the end of the first job."""
    if first is None and driver.code is None:
        return [f"it does not end within {limit_s:g} s"]
    faults = [] if end_s < limit_s else [f"it ends after {end_s:.0f} s"]
    if first is None:
        if part.says is not None and not re.search(part.says, driver.told):
            faults.append(f"it does not say {part.says}")
        return faults + ([] if driver.code else ["exit code 0"])
    if "error" not in first:
        return [*faults, "it returns a result"]
    if part.says is not None and not re.search(part.says, first["text"]):
        faults.append(f"it does not say {part.says}: {first}")
    if first["error"] != "LaunchError":
        faults.append(f"it is no LaunchError: {first}")
    return faults


def _faults_of_next(cluster: Cluster, driver: Driver, part: Part, name: str) -> list[str]:
    """Return what is wrong with the next job: in the same session, or by a new driver if that one is gone."""
    faults = [] if wait_until(lambda: driver.code is not None, NEXT_S) else ["the driver does not end"]
    if part.says is not None and not part.of_cluster:
        second = driver.report("second") or {}
        return faults + ([] if second.get("result") == [*range(RANKS)] else [f"the second job: {second}"])
    if part.of_cluster:
        cluster.restart()
    return faults + _faults_of_good(cluster.drive(f"{name}n", RANKS, "3"), RANKS, "the next driver")


def _faults_of_good(driver: Driver, ranks: int, shown: str) -> list[str]:
    """Return what is wrong with a driver whose jobs must end well."""
    wait_until(lambda: driver.code is not None, NEXT_S)
    reports = [driver.report(job) or {} for job in ("first", "second")]
    if driver.code == 0 and all(each.get("result") == [*range(ranks)] for each in reports):
        return []
    return [f"{shown}: code {driver.code}, {reports}: {driver.told[-2000:]}"]


def _faults_of_cluster(cluster: Cluster, known: set[str], *, knows_jobs: bool) -> list[str]:
    """Return what the cluster keeps of jobs that have ended, without the jobs that were `known` before."""
    told: dict[str, Any] = {}

    def is_clean() -> bool:
        nonlocal told
        told = cluster.left()
        jobs = set() if knows_jobs else set(told.get("jobs", ())) - known
        kept = [told.get("groups"), told.get("taken"), told.get("tasks"), jobs]
        return bool(told) and told["threads"] == 2 * CPUS and not any(kept)

    return [] if wait_until(is_clean, 60.0) else [f"left in the cluster: {told}"]


@contextmanager
def clusters(names: list[str], folder: Path) -> Iterator[dict[str, Cluster]]:
    """Start clusters on virtual hosts of their own."""
    with ExitStack() as stack:
        made = {}
        for name in names:
            own = folder / name
            (own / "own").mkdir(parents=True)
            hosts = stack.enter_context(ClusterHosts(own, TMPDIR=f"{own}/own", **FRAMEWORKS[name].variables))
            made[name] = Cluster(name, hosts)
            made[name].restart()
        yield made
