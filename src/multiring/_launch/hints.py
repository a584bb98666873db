"""What the launcher says about causes that a rank's last lines show, but do not explain."""

import sys
from collections.abc import Sequence

_NO_MORE_PROCESSES = (
    "no further process or thread could be started, because the limit of processes is used up: raise it (containers: "
    "--pids-limit; Kubernetes: the node's podPidsLimit; otherwise ulimit -u), or use fewer ranks or data workers"
)
# Text in a rank's last lines -> the remedy. The kernel's words for a limit of processes are those of fork.
_REMEDIES = {
    b"No module named 'horovod'": "--horovod lets a program written for Horovod import multiring under that name: "
    "multiring run --horovod ... (docs/horovod.md)",
    b"No module named 'multiring'": f"this program's Python is not multiring's, which is {sys.executable}: activate "
    "its environment, or start the script without `python`, as in `multiring run -n 2 script.py`, to use that Python",
    b"memfd_create: Operation not permitted": "the container's seccomp profile forbids the system call memfd_create, "
    "in which ranks share memory: allow it (docs/guide_containers.md)",
    b"unable to allocate shared memory(shm)": "no space is left in /dev/shm, where PyTorch's data workers put batches: "
    "give the container a larger one (--shm-size=2g; multiring manifest --shm 2Gi), or use fewer data workers",
    b"RuntimeError: Resource temporarily unavailable": _NO_MORE_PROCESSES,
    b"BlockingIOError: [Errno 11] Resource temporarily unavailable": _NO_MORE_PROCESSES,
    b"RuntimeError: can't start new thread": _NO_MORE_PROCESSES,
}


def hints_for(lines: Sequence[bytes]) -> list[str]:
    """Return the remedies for what a rank's last lines on stderr show, each once."""
    return list(dict.fromkeys(hint for words, hint in _REMEDIES.items() if any(words in line for line in lines)))
