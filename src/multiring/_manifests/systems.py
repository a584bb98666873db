"""The objects of a job for each system: Kubernetes' Job, Kubeflow Trainer's TrainJob, and the MPI operator's MPIJob."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from multiring._manifests.pod_job import PodJob
from multiring._manifests.pods import HOPELESS_CODES, pod_spec, run_command

Document = dict[str, Any]


def kubernetes(job: PodJob) -> list[Document]:
    """Return a headless Service and an Indexed Job.

    Each pod's index is its node rank. Pod 0 is reached as NAME-0.NAME, because the Service has the job's name. A failed
    pod is replaced, as often as all pods can be lost in `max_restarts` restarts. A pod that the cluster evicts does not
    count.
    """
    job.check_host_name(f"{job.name}-{job.pods - 1}")
    selector = {"batch.kubernetes.io/job-name": job.name}
    spec = pod_spec(job, "ranks", run_command(job, _nodes(job, "JOB_COMPLETION_INDEX", f"{job.name}-0")))
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        # The pods must find each other before they are ready.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector},
    }
    return [
        service,
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": _metadata(job),
            "spec": {
                "completionMode": "Indexed",
                "completions": job.pods,
                "parallelism": job.pods,
                "backoffLimit": job.pods * job.max_restarts,
                "podFailurePolicy": {
                    "rules": [{"action": "Ignore", "onPodConditions": [_evicted()]}, _hopeless("ranks")]
                },
                "template": {"spec": {"restartPolicy": "Never", "subdomain": job.name, **spec}},
            },
        },
    ]


def kubeflow(job: PodJob) -> list[Document]:
    """Return a TrainingRuntime and a TrainJob of Kubeflow Trainer v2.

    Kubeflow gives the pods torchrun's variables PET_*, which `multiring run` reads. After a failure the JobSet starts
    all pods again.
    """
    job.check_host_name(f"{job.name}-node-0-{job.pods - 1}")
    pod = {"restartPolicy": "Never", **pod_spec(job, "node", run_command(job, ()))}
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainingRuntime",
            "metadata": _metadata(job),
            "spec": {
                "mlPolicy": {"numNodes": job.pods, "torch": {}},
                "template": {
                    "spec": {
                        "failurePolicy": {
                            "maxRestarts": job.max_restarts,
                            "rules": [
                                {
                                    "name": "hopeless",
                                    "action": "FailJobSet",
                                    "onJobFailureReasons": ["PodFailurePolicy"],
                                }
                            ],
                        },
                        "replicatedJobs": [
                            {
                                "name": "node",
                                "template": {
                                    "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                                    "spec": {
                                        "backoffLimit": 0,
                                        "podFailurePolicy": {"rules": [_hopeless("node")]},
                                        "template": {"spec": pod},
                                    },
                                },
                            }
                        ],
                    }
                },
            },
        },
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": _metadata(job),
            "spec": {
                "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
                "trainer": {"numNodes": job.pods, "numProcPerNode": job.ranks_per_pod},
            },
        },
    ]


def mpi_operator(job: PodJob) -> list[Document]:
    """Return an MPIJob of the MPI operator, version v2beta1.

    The launcher's pod is node 0, and worker K is node K + 1: the operator labels the pods with these numbers. No MPI
    and no ssh is used. With restarts, failed containers are started again until the launcher's Job ends.
    """
    names = [f"{job.name}-launcher", f"{job.name}-worker-{max(job.pods - 2, 0)}"]
    job.check_host_name(max(names, key=len))
    index = {
        "name": "REPLICA_INDEX",
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['training.kubeflow.org/replica-index']"}},
    }
    policy = "OnFailure" if job.max_restarts else "Never"
    spec = pod_spec(job, "ranks", run_command(job, _nodes(job, index["name"], names[0])), [index])
    replicas = {"Launcher": 1, **({"Worker": job.pods - 1} if job.pods > 1 else {})}
    return [
        {
            "apiVersion": "kubeflow.org/v2beta1",
            "kind": "MPIJob",
            "metadata": _metadata(job),
            "spec": {
                "slotsPerWorker": job.ranks_per_pod,
                "runLauncherAsWorker": True,
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.max_restarts},
                "mpiReplicaSpecs": {
                    role: {"replicas": count, "restartPolicy": policy, "template": {"spec": spec}}
                    for role, count in replicas.items()
                },
            },
        }
    ]


SYSTEMS: Mapping[str, Callable[[PodJob], list[Document]]] = MappingProxyType(
    {"kubernetes": kubernetes, "kubeflow": kubeflow, "mpi-operator": mpi_operator}
)


def _nodes(job: PodJob, index: Any, first: str) -> list[str]:
    """Return the launcher's options for a node.

    `index` names the variable that has the node's number, and `first` is the host name of node 0.
    """
    numbers = ["--nodes", str(job.pods), "--node-rank", f"$({index})"]
    return [*numbers, "--meet", f"{first}.{job.name}:{job.port}", "-n", str(job.ranks_per_pod)]


def _metadata(job: PodJob) -> Document:
    return {"name": job.name, **({"namespace": job.namespace} if job.namespace else {})}


def _evicted() -> Document:
    return {"type": "DisruptionTarget", "status": "True"}


def _hopeless(container: str) -> Document:
    """Return the rule that ends the job at once if another start could not end differently."""
    codes = {"containerName": container, "operator": "In", "values": list(HOPELESS_CODES)}
    return {"action": "FailJob", "onExitCodes": codes}
