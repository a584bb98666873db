"""The pods of a job, which are the same for every system: container, user, volumes and resources."""

from collections.abc import Sequence
from typing import Any

from multiring._manifests.pod_job import SCRATCH, SECRET_FOLDER, SHARED_MEMORY, PodJob
from multiring._settings import environment_of

USER = 1000  # of the image that packaging/Containerfile makes
SECRET_KEY = "secret"  # noqa: S105 -- a key's name
# multiring's exit code for invalid input, and a shell's codes for a program that does not exist or cannot be executed.
# Another start could not end differently.
HOPELESS_CODES = (2, 126, 127)
_AFTER_GRACE_S = 15  # for the launcher to kill the ranks that are left after the grace, and to end


def run_command(job: PodJob, place: Sequence[str]) -> list[str]:
    """Return the command of a container.

    `place` are the words that tell the launcher where it is. The kubelet replaces $(NAME) in them. The other words
    reach the launcher unchanged.
    """
    restarts = ["--max-restarts", str(job.max_restarts)] if job.max_restarts else []
    fixed = ["--grace", str(job.grace_s), *restarts, "--", *job.command]
    return ["multiring", "run", *place, *map(verbatim, fixed)]


def verbatim(word: str) -> str:
    """Return `word` in such a form that the kubelet, which expands $(NAME) and $$, gives it back unchanged."""
    return word.replace("$", "$$")


def pod_spec(
    job: PodJob, container: str, command: Sequence[str], variables: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return the specification of a pod whose container has the name `container` and runs `command`.

    `variables` are the container's variables in addition to the job's.
    """
    resources = job.resources
    amounts = {
        **({"cpu": resources.cpus} if resources.cpus else {}),
        **({"memory": resources.memory} if resources.memory else {}),
        **({"nvidia.com/gpu": str(resources.gpus)} if resources.gpus else {}),
    }
    # The user may choose another HOME. Kubernetes refuses a list that has a variable twice.
    settings = {
        "HOME": SCRATCH,
        **environment_of(secret_file=f"{SECRET_FOLDER}/{SECRET_KEY}"),
        **{name: verbatim(text) for name, text in job.variables.items()},
    }
    mounts = [("secret", SECRET_FOLDER), ("shared-memory", SHARED_MEMORY), ("scratch", SCRATCH)]
    claims = [(f"volume-{number}", claim, path) for number, (claim, path) in enumerate(job.volumes.items())]
    return {
        "automountServiceAccountToken": False,
        # Kubernetes would set variables with the names of other services. One named multiring-NAME would set
        # variables that look like settings of multiring.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": job.grace_s + _AFTER_GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": container,
                "image": job.image,
                "command": list(command),
                "env": [*({"name": name, "value": text} for name, text in settings.items()), *variables],
                **({"resources": {"requests": amounts, "limits": amounts}} if amounts else {}),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [
                    *({"name": name, "mountPath": path, "readOnly": name == "secret"} for name, path in mounts),
                    *({"name": name, "mountPath": path} for name, _, path in claims),
                ],
            }
        ],
        "volumes": [
            {
                "name": "secret",
                "secret": {
                    "secretName": job.secret_name,
                    "defaultMode": 0o440,
                    "items": [{"key": SECRET_KEY, "path": SECRET_KEY}],
                },
            },
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": resources.shared_memory_size}},
            {"name": "scratch", "emptyDir": {}},
            *({"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, claim, _ in claims),
        ],
    }
