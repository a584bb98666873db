"""Run a manifest's pods on virtual hosts: python -m tests.support.pod_cluster MANIFEST.yaml --secret FILE [OPTIONS].

The program takes the parts of a cluster that the pods can see. The hosts have the pods' names. A container gets the
manifest's command, expanded as the kubelet expands it, its variables and those of the controller, its user, its
volumes and a root file system that is read-only. The controller replaces failed pods as the manifest says. Not
simulated: images, seccomp, limits of CPU and memory, and scheduling. Every line of a pod has the pod's name first.

Exit code: 0 if the job succeeded, 1 if it failed.
"""

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from multiring.lab.host import Host
from multiring.lab.namespaces import Mount, NamespaceKind, mount, unshare
from multiring.lab.network import Network
from multiring.lab.plan import LabPlan

BACK_OFF_S = 0.5  # the job controller waits 10 s before it replaces a pod, and twice as long each further time
_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_PR_SET_NO_NEW_PRIVS = 38
_REMOUNT, _READ_ONLY = 32, 1  # flags of mount(2)
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def expanded(word: str, variables: Mapping[str, str]) -> str:
    """Return `word` with its references $(NAME) replaced, as the kubelet does.

    Source: third_party/forked/golang/expansion/expand.go of Kubernetes. $$ means $, and a reference to a variable that
    is not set remains.
    """

    def value(found: re.Match[str]) -> str:
        if found[1] is None:
            return "$"
        return variables.get(found[1], found[0])

    return _REFERENCE.sub(value, word)


@dataclass(slots=True)
class Pod:
    """A pod: its host name, its name in the DNS, and what the controller adds to its template."""

    host: str
    domain: str
    spec: dict[str, Any]
    variables: dict[str, str]
    labels: dict[str, str]

    @property
    def container(self) -> dict[str, Any]:
        """The pod's only container."""
        [container] = self.spec["containers"]
        return dict(container)

    def environment(self) -> dict[str, str]:
        """Return the container's variables."""
        made = dict(self.variables)
        for each in self.container["env"]:
            if "value" in each:
                made[each["name"]] = expanded(each["value"], made)
            else:
                path = each["valueFrom"]["fieldRef"]["fieldPath"]
                made[each["name"]] = self.labels[path.removeprefix("metadata.labels['").removesuffix("']")]
        return made

    def command(self) -> list[str]:
        """Return the container's command line."""
        return [expanded(word, self.environment()) for word in self.container["command"]]


@dataclass(slots=True)
class Job:
    """The pods of a manifest, and what its controller does about a failed pod.

    - replaces: how many failed pods are replaced one by one; -1 means any number.
    - restarts: how often all pods are started again.
    - hopeless: the exit codes that end the job at once.
    - decider: the pod whose end decides; None means all.
    """

    pods: list[Pod]
    replaces: int
    restarts: int
    hopeless: tuple[int, ...]
    decider: int | None = None


def job_of(documents: list[dict[str, Any]]) -> Job:
    """Return the pods that a system's controllers make of a manifest."""
    by_kind = {document["kind"]: document for document in documents}
    if "Job" in by_kind:
        return _indexed_job(by_kind["Job"], by_kind["Service"])
    if "TrainJob" in by_kind:
        return _train_job(by_kind["TrainJob"], by_kind["TrainingRuntime"])
    return _mpi_job(by_kind["MPIJob"])


def _indexed_job(job: dict[str, Any], service: dict[str, Any]) -> Job:
    name, spec = job["metadata"]["name"], job["spec"]
    template = spec["template"]["spec"]
    selected = service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert selected, service
    assert service["metadata"]["name"] == template["subdomain"], "the pods' domain is their service"
    assert spec["completionMode"] == "Indexed"
    pods = [
        Pod(f"{name}-{index}", template["subdomain"], template, {"JOB_COMPLETION_INDEX": str(index)}, {})
        for index in range(spec["completions"])
    ]
    codes = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    return Job(pods, spec["backoffLimit"], 0, tuple(code for each in codes for code in each))


def _train_job(job: dict[str, Any], runtime: dict[str, Any]) -> Job:
    name, trainer, spec = job["metadata"]["name"], job["spec"]["trainer"], runtime["spec"]["template"]["spec"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    [replicated] = spec["replicatedJobs"]
    template = replicated["template"]["spec"]["template"]["spec"]
    assert replicated["name"] == template["containers"][0]["name"] == "node"
    told = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    pods = [
        Pod(
            f"{name}-node-0-{index}",
            name,
            template,
            {**told, "PET_NODE_RANK": str(index), "JOB_COMPLETION_INDEX": str(index)},
            {},
        )
        for index in range(trainer["numNodes"])
    ]
    [rule] = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    return Job(pods, 0, spec["failurePolicy"]["maxRestarts"], tuple(rule["onExitCodes"]["values"]))


def _mpi_job(job: dict[str, Any]) -> Job:
    name, spec = job["metadata"]["name"], job["spec"]
    assert spec["runLauncherAsWorker"]
    label = "training.kubeflow.org/replica-index"
    roles = spec["mpiReplicaSpecs"]
    pods = [Pod(f"{name}-launcher", name, roles["Launcher"]["template"]["spec"], {}, {label: "0"})]
    if "Worker" in roles:
        worker = roles["Worker"]
        pods += [
            Pod(f"{name}-worker-{index}", name, worker["template"]["spec"], {}, {label: str(index + 1)})
            for index in range(worker["replicas"])
        ]
    restarts = -1 if roles["Launcher"]["restartPolicy"] == "OnFailure" else 0
    return Job(pods, restarts, 0, (), decider=0)


def _bytes_of(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)(\w*)", quantity)
    assert match is not None, quantity
    return int(match[1]) * _UNITS[match[2]]


def _volumes(pod: Pod, secret: bytes, claims: Mapping[str, Path]) -> list[tuple[str, Callable[[], None]]]:
    """Return for each mount of the container its path and the function that mounts it."""
    group = pod.spec["securityContext"]["fsGroup"]
    sources = {each["name"]: each for each in pod.spec["volumes"]}
    found: list[tuple[str, Callable[[], None]]] = []
    for each in pod.container["volumeMounts"]:
        source = sources[each["name"]]
        path = each["mountPath"]
        if "secret" in source:
            found.append((path, partial(_secret, path, secret, source["secret"], group)))
        elif "emptyDir" in source:
            limit = source["emptyDir"].get("sizeLimit")
            size = "" if limit is None else f",size={_bytes_of(limit)}"
            found.append((path, partial(mount, "tmpfs", path, "tmpfs", options=f"mode=1777{size}")))
        else:
            folder = claims[source["persistentVolumeClaim"]["claimName"]]
            found.append((path, partial(mount, str(folder), path, flags=Mount.BIND)))
    return found


def _secret(path: str, secret: bytes, told: dict[str, Any], group: int) -> None:
    mount("tmpfs", path, "tmpfs", options="mode=755")
    [item] = told["items"]
    file = Path(path) / item["path"]
    file.write_bytes(secret)
    os.chown(file, 0, group)
    file.chmod(told["defaultMode"])


def _container(pod: Pod, host: Host, secret: Path, claims: Mapping[str, Path]) -> Callable[[], None]:
    """Return the function that makes the child process the container's, between fork and exec."""
    enter, user = host.preparation(Path("/")), pod.spec["securityContext"]["runAsUser"]
    group = pod.spec["securityContext"]["runAsGroup"]
    volumes = _volumes(pod, secret.read_bytes(), claims)
    interpreter = Path(sys.base_prefix)

    def prepare() -> None:
        enter()
        unshare(NamespaceKind.MOUNT)
        mount("none", "/", flags=Mount.REC | Mount.PRIVATE)
        _show_interpreter(interpreter)
        # Folders that the runtime would make in the container's own root file system.
        mount("tmpfs", "/mnt", "tmpfs", options="mode=755")
        mount("tmpfs", "/run", "tmpfs", options="mode=755")
        for path, make in sorted(volumes, key=lambda each: each[0] == "/tmp"):  # noqa: S108 -- the pod's; the test's
            Path(path).mkdir(parents=True, exist_ok=True)
            make()
        mount("none", "/", flags=Mount(_REMOUNT | _READ_ONLY) | Mount.BIND)
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)

    return prepare


def _show_interpreter(interpreter: Path) -> None:
    """Let an ordinary user reach this Python if it lies in root's home folder."""
    home = Path("/root")
    if not interpreter.is_relative_to(home):
        return
    mount(str(interpreter), "/mnt", flags=Mount.BIND)
    mount("tmpfs", str(home), "tmpfs", options="mode=755")
    interpreter.mkdir(parents=True)
    mount("/mnt", str(interpreter), flags=Mount.BIND)


class PodCluster:
    """Runs the containers of a job, and acts for the job's controller."""

    def __init__(self, job: Job, hosts: list[Host], options: argparse.Namespace) -> None:
        self._job = job
        self._hosts = hosts
        self._options = options
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._done: set[int] = set()
        self._failures = 0
        self._restarts = 0
        self._readers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def run(self) -> int:
        """Run the job to its end."""
        for index in range(len(self._job.pods)):
            if index != self._options.absent:
                self._start(index)
        began, is_killed = time.monotonic(), self._options.kill is None
        while self._running:
            time.sleep(0.05)
            if not is_killed and self._is_time_to_kill(began):
                is_killed = True
                self._say(f"kills {self._job.pods[self._options.kill].host}")
                self._hosts[self._options.kill].signal_all(signal.SIGKILL)
            for index, process in list(self._running.items()):
                code = process.poll()
                if code is None or self._running.get(index) is not process:  # a restart has ended it
                    continue
                del self._running[index]
                self._say(f"{self._job.pods[index].host} ended with {code if code >= 0 else 128 - code}")
                verdict = self._judge(index, code if code >= 0 else 128 - code)
                if verdict is not None:
                    return self._end(verdict)
        return self._end(0 if len(self._done) == len(self._job.pods) else 1)

    def _is_time_to_kill(self, began: float) -> bool:
        if self._options.kill_file is not None:
            return Path(self._options.kill_file).exists()
        return time.monotonic() >= began + float(self._options.kill_at)

    def _judge(self, index: int, code: int) -> int | None:
        """Act on a container's end, and return the job's exit code if the job has ended."""
        job = self._job
        if code == 0:
            self._done.add(index)
            return 0 if index == job.decider else None
        if code in job.hopeless:
            self._say(f"exit code {code} fails the job")
            return 1
        self._failures += 1
        if job.replaces < 0 or self._failures <= job.replaces:
            time.sleep(BACK_OFF_S)
            self._say(f"starts {job.pods[index].host} again")
            self._start(index)
            return None
        if self._restarts < job.restarts:
            self._restarts += 1
            self._say("starts all pods again")
            self._stop_all()
            self._done.clear()
            for each in range(len(job.pods)):
                self._start(each)
            return None
        self._say(f"{self._failures} failed pods fail the job")
        return 1

    def _start(self, index: int) -> None:
        pod, host = self._job.pods[index], self._hosts[index]
        claims = dict(each.split("=", 1) for each in self._options.claim)
        made = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "HOSTNAME": pod.host}
        with host.birthplace():
            process = subprocess.Popen(
                pod.command(),
                env={**made, "OMP_NUM_THREADS": "1", **pod.environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                preexec_fn=_container(  # noqa: PLW1509 -- it makes system calls only
                    pod, host, self._options.secret, {name: Path(folder) for name, folder in claims.items()}
                ),
            )
        self._running[index] = process
        reader = threading.Thread(target=self._show, args=(pod.host, process))
        reader.start()
        self._readers.append(reader)

    def _show(self, name: str, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._write(f"{name}: {line.rstrip()}\n")

    def _say(self, text: str) -> None:
        self._write(f"cluster: {text}\n")

    def _write(self, line: str) -> None:
        with self._lock:
            sys.stdout.write(line)
            sys.stdout.flush()

    def _stop_all(self) -> None:
        """End all containers as the kubelet does: SIGTERM, and SIGKILL after the grace period."""
        grace_s = max(pod.spec["terminationGracePeriodSeconds"] for pod in self._job.pods)
        for process in self._running.values():
            process.terminate()
        until = time.monotonic() + grace_s
        for process in self._running.values():
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    def _end(self, code: int) -> int:
        self._stop_all()
        for host in self._hosts:
            host.signal_all(signal.SIGKILL)
        for reader in self._readers:
            reader.join()
        self._say("the job succeeded" if code == 0 else "the job failed")
        return code


def main() -> int:
    """Run the manifest's job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--secret", type=Path, required=True, help="a file with the content of the Secret")
    parser.add_argument("--claim", action="append", default=[], metavar="CLAIM=FOLDER")
    parser.add_argument("--absent", type=int, help="a pod that never comes")
    parser.add_argument("--kill", type=int, help="a pod to kill")
    parser.add_argument("--kill-at", default="5", metavar="S", help="seconds until then")
    parser.add_argument("--kill-file", metavar="FILE", help="kill the pod when this file exists")
    options = parser.parse_args()
    job = job_of(list(yaml.safe_load_all(options.manifest.read_text(encoding="utf-8"))))
    assert shutil.which("multiring"), "no multiring on PATH"
    plan = LabPlan(hosts=len(job.pods))
    names = ["127.0.0.1 localhost"]
    for index, pod in enumerate(job.pods):
        if index != options.absent:  # the DNS does not know a pod that has no address
            names.append(f"{plan.address(index)} {pod.host}.{pod.domain} {pod.host}")
    with ExitStack() as stack:
        hosts = []
        for pod in job.pods:
            hosts.append(Host(pod.host, "\n".join(names) + "\n"))
            stack.callback(hosts[-1].close)
        for host in hosts:
            host.wait_until_up()
        stack.callback(Network(plan, [host.network for host in hosts]).close)
        return PodCluster(job, hosts, options).run()


if __name__ == "__main__":
    sys.exit(main())
