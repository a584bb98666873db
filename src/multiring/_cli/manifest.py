"""multiring manifest: write the manifest of a job for Kubernetes, Kubeflow Trainer or the MPI operator.

The manifest is written to standard output. Each pod runs `multiring run` with --ranks-per-pod ranks. The job's secret
is no part of the manifest: the pods read it from a Secret, and the command says on standard error how to create the
Secret. docs/guide_kubernetes.md shows a whole job.
"""

import argparse
import sys
from collections.abc import Mapping

from multiring._cli.number_option import whole
from multiring._cli.output import show
from multiring._cli.run import variables_of
from multiring._manifests import SYSTEMS, PodJob, PodResources, yaml_of
from multiring.errors import ArgumentError

_PODS = whole(1, 100_000)  # Kubernetes' limit of an Indexed Job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    systems = parser.add_subparsers(dest="system", required=True, metavar="SYSTEM")
    for name, make in SYSTEMS.items():
        says = (make.__doc__ or "").partition("\n")[0].removeprefix("Return ")
        _add_options(systems.add_parser(name, help=says, description=f"Write {says}", allow_abbrev=False))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} --pods N --ranks-per-pod R --image IMAGE [OPTIONS] [--] PROGRAM [ARGUMENTS...]"
    parser.add_argument("--pods", type=_PODS, required=True, metavar="N", help="number of pods")
    parser.add_argument("--ranks-per-pod", type=_PODS, required=True, metavar="R", help="number of ranks in each pod")
    parser.add_argument("--image", default="", metavar="IMAGE", help="container image with multiring and the program")
    parser.add_argument("--name", default="train", metavar="NAME", help="the job's name (default train)")
    parser.add_argument("--namespace", default="", metavar="NAME", help="the namespace; default: kubectl's")
    parser.add_argument(
        "--gpus", type=whole(0), default=0, metavar="G", help="GPUs of each pod (default 0; not tested with GPUs)"
    )
    parser.add_argument("--cpus", default="", metavar="C", help="CPUs of each pod, like 4 or 500m; default: no limit")
    parser.add_argument("--memory", default="", metavar="SIZE", help="memory of each pod, like 16Gi; default: no limit")
    parser.add_argument(
        "--shm", default="", metavar="SIZE", help="size of /dev/shm; default: a quarter of --memory, or 1Gi"
    )
    parser.add_argument("--secret", default="", metavar="NAME", help="the Secret's name; default: NAME-secret")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable for the ranks")
    parser.add_argument(
        "--volume", action="append", default=[], metavar="CLAIM:FOLDER", help="mount a persistent volume, for results"
    )
    parser.add_argument(
        "--max-restarts", type=whole(0), default=0, metavar="N", help="start the job again after a failure (default 0)"
    )
    parser.add_argument(
        "--grace", type=whole(0), default=30, metavar="S", help="seconds for the ranks to save their work (default 30)"
    )
    parser.add_argument(
        "--port", type=whole(1024, 65_535), default=29500, metavar="PORT", help="port of pod 0 (default 29500)"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM...", help="the program of every rank")


def run(arguments: argparse.Namespace) -> int:
    """Write the manifest. Exit 0."""
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    job = PodJob(
        name=arguments.name,
        image=arguments.image,
        command=tuple(program),
        pods=arguments.pods,
        ranks_per_pod=arguments.ranks_per_pod,
        resources=PodResources(
            gpus=arguments.gpus, cpus=arguments.cpus, memory=arguments.memory, shared_memory=arguments.shm
        ),
        namespace=arguments.namespace,
        secret=arguments.secret,
        variables=variables_of(arguments.env),
        volumes=_volumes_of(arguments.volume),
        max_restarts=arguments.max_restarts,
        grace_s=arguments.grace,
        port=arguments.port,
    )
    show(yaml_of(SYSTEMS[arguments.system](job)).rstrip("\n"))
    print(_told(job), file=sys.stderr)
    return 0


def _volumes_of(words: list[str]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for word in words:
        claim, colon, folder = word.partition(":")
        if not colon or claim in found:
            raise ArgumentError(f"--volume {word!r}: want CLAIM:FOLDER, with each claim once")
        found[claim] = folder
    return found


def _told(job: PodJob) -> str:
    where = f" --namespace {job.namespace}" if job.namespace else ""
    return (
        f"multiring: the pods read the job's secret from the Secret {job.secret_name}, which is not in the manifest. "
        "Create it first, with a random value:\n"
        "    head -c 32 /dev/urandom | base64 | "
        f"kubectl create secret generic {job.secret_name}{where} --from-file=secret=/dev/stdin"
    )
