"""Check an MPIJob against the documented fields of the MPI operator, version v2beta1.

Source: github.com/kubeflow/mpi-operator at v0.8.2: pkg/apis/kubeflow/v2beta1/types.go (fields and their types), and
pkg/apis/kubeflow/validation/validation.go (the rules that the operator checks itself).
"""

from collections.abc import Iterator, Mapping
from typing import Any

_RUN_POLICY: dict[str, type | tuple[type, ...]] = {
    "cleanPodPolicy": str,
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "backoffLimit": int,
    "schedulingPolicy": dict,
    "suspend": bool,
    "managedBy": str,
}
_SPEC: dict[str, type | tuple[type, ...]] = {
    "slotsPerWorker": int,
    "runLauncherAsWorker": bool,
    "runPolicy": dict,
    "mpiReplicaSpecs": dict,
    "sshAuthMountPath": str,
    "launcherCreationPolicy": str,
    "mpiImplementation": str,
}
_REPLICA: dict[str, type | tuple[type, ...]] = {"replicas": int, "template": dict, "restartPolicy": str}
_CHOICES = {
    "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"),
    "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
    "cleanPodPolicy": ("None", "Running", "All"),
    "restartPolicy": ("Never", "OnFailure"),
}
_LONGEST_LABEL = 63


def mistakes_of(job: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the MPIJob. The pods' templates are not checked."""
    return list(_mistakes(job))


def _mistakes(job: Mapping[str, Any]) -> Iterator[str]:
    if (job.get("apiVersion"), job.get("kind")) != ("kubeflow.org/v2beta1", "MPIJob"):
        yield "apiVersion and kind"
    yield from _fields("", job, {"apiVersion": str, "kind": str, "metadata": dict, "spec": dict}, ("spec", "metadata"))
    spec = job.get("spec", {})
    yield from _fields("spec", spec, _SPEC, ("slotsPerWorker", "mpiReplicaSpecs", "runPolicy"))
    yield from _fields("spec.runPolicy", spec.get("runPolicy", {}), _RUN_POLICY, ("cleanPodPolicy",))
    roles = spec.get("mpiReplicaSpecs", {})
    if "Launcher" not in roles or not set(roles) <= {"Launcher", "Worker"}:
        yield f"spec.mpiReplicaSpecs has {sorted(roles)}"
    for role, replica in roles.items():
        where = f"spec.mpiReplicaSpecs.{role}"
        yield from _fields(where, replica, _REPLICA, tuple(_REPLICA))
        count = replica.get("replicas", 0)
        if count != 1 if role == "Launcher" else count < 1:
            yield f"{where}.replicas is {count}"
        if not replica.get("template", {}).get("spec", {}).get("containers"):
            yield f"{where}.template has no container"
    workers = roles.get("Worker", {}).get("replicas", 1)
    if len(f"{job['metadata']['name']}-worker-{workers - 1}") > _LONGEST_LABEL:
        yield "the pods' host names are too long"


def _fields(
    where: str, found: Mapping[str, Any], known: Mapping[str, type | tuple[type, ...]], needed: tuple[str, ...]
) -> Iterator[str]:
    yield from (f"{where}.{name} is missing" for name in needed if name not in found)
    for name, value in found.items():
        if name not in known:
            yield f"{where}.{name} is unknown"
        elif not isinstance(value, known[name]) or (isinstance(value, bool) and known[name] is int):
            yield f"{where}.{name} is {value!r}"
        elif isinstance(value, int) and value < 0:
            yield f"{where}.{name} is {value}"
        elif name in _CHOICES and value not in _CHOICES[name]:
            yield f"{where}.{name} is {value!r}"
