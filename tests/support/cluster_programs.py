"""What the ranks of the clusters' tests do. `python -m tests.support.cluster_programs` is one rank of a digits run."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import multiring
from multiring._settings import Settings


def learn_digits(steps: int) -> dict[str, Any]:
    """Train a small network on the digits, and return the rank's numbers, losses and accuracy."""
    import torch  # noqa: PLC0415 -- the driver of a cluster does not need it
    from sklearn.datasets import load_digits  # noqa: PLC0415 -- as above

    import multiring.torch as mt  # noqa: PLC0415 -- as above

    mt.init()
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = mt.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), model.named_parameters()
    )
    mt.broadcast_parameters(model.state_dict(), root_rank=0)
    size, rank, losses = mt.size(), mt.rank(), []
    for step in range(steps):
        chosen = torch.arange(rank, 64, size) + 64 * step
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[chosen % 1500]), labels[chosen % 1500])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(mt.allreduce(loss.detach())))
    with torch.no_grad():
        accuracy = float((model(images[1500:]).argmax(1) == labels[1500:]).float().mean())
    return {
        "rank": rank,
        "size": size,
        "local": (mt.local_rank(), mt.local_size()),
        "host": socket.gethostname(),
        "losses": losses,
        "accuracy": accuracy,
    }


def raise_on(rank: int) -> None:
    """Raise on one rank, while the others wait without a collective."""
    if multiring.init().rank == rank:
        raise ZeroDivisionError(f"rank {rank} divides")
    time.sleep(1000)


def raise_while_others_reduce(rank: int) -> None:
    """Raise on one rank, while the others are in a collective."""
    group = multiring.init()
    group.barrier()
    if group.rank == rank:
        raise ZeroDivisionError(f"rank {rank} divides")
    group.all_reduce(np.zeros(4))


def leave_children(rank: int) -> None:
    """Start detached processes on every rank, then raise on one rank."""
    group = multiring.init()
    subprocess.Popen(["/bin/sleep", "4321"], start_new_session=True)
    group.barrier()
    if group.rank == rank:
        raise ZeroDivisionError(f"rank {rank} divides")
    time.sleep(1000)


def be_killed(rank: int) -> None:
    """Kill the process of one rank with SIGKILL, while the others wait without a collective."""
    group = multiring.init()
    subprocess.Popen(["/bin/sleep", "4322"], start_new_session=True)
    group.barrier()
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def kill_parent_worker(rank: int) -> None:
    """Kill the cluster's worker that keeps one rank; the rank's launcher is between them."""
    group = multiring.init()
    group.barrier()
    if group.rank == rank:
        launcher = Path(f"/proc/{os.getppid()}/status").read_text(encoding="ascii")
        (worker,) = [line.split()[1] for line in launcher.splitlines() if line.startswith("PPid:")]
        os.kill(int(worker), signal.SIGKILL)
    time.sleep(1000)


def tell_numbers() -> tuple[int, int, int, int, str]:
    """Return the rank's numbers without a collective."""
    group = multiring.init()
    return group.rank, group.size, multiring.local_rank(), multiring.local_size(), socket.gethostname()


def find_secret(folders: list[str]) -> list[str]:
    """Return the places of this host where the job's secret is, while all ranks run.

    The memory of a process is no such place, and its initial environment only if other users may read it.
    """
    group = multiring.init()
    secret = (Settings.from_environment().secret or "").encode()
    assert len(secret) == 64
    group.barrier()
    processes = [folder for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    found = [str(each) for each in processes if _holds(each / "cmdline", secret)]
    for each in processes:
        with contextlib.suppress(OSError):
            mode = (each / "environ").stat()
            if _holds(each / "environ", secret) and (mode.st_mode & 0o077 or mode.st_uid != os.getuid()):
                found.append(f"{each}/environ")
    for top in folders:
        for folder, _, names in os.walk(top):
            found += [str(path) for path in (Path(folder) / name for name in names) if _holds(path, secret)]
    group.barrier()
    return found


def _holds(path: Path, secret: bytes) -> bool:
    try:
        is_kept = path.is_file() and path.stat().st_size < 1 << 26
        return is_kept and secret in path.read_bytes()
    except OSError:
        return False


def wait_while_there(path: str) -> None:
    """Use a slot of the cluster until a file is gone, a minute at most."""
    Path(f"{path}-{os.getpid()}-{threading.get_ident()}").touch()
    until = time.monotonic() + 240
    while Path(path).exists() and time.monotonic() < until:
        time.sleep(0.05)


class Counter:
    """An executable of RayExecutor."""

    def __init__(self, start: int) -> None:
        self.value = start

    def count(self) -> int:
        self.value += 1
        return self.value


def horovod_sum(base: float) -> tuple[int, float, str | None]:
    """Sum over the ranks with Horovod's names, and return a variable, too."""
    import horovod.torch as hvd  # noqa: PLC0415 -- the ranks have it on their path
    import torch  # noqa: PLC0415 -- as above

    hvd.init()
    total = hvd.allreduce(torch.tensor([base + hvd.rank()]), op=hvd.Sum)
    return hvd.rank(), float(total[0]), os.environ.get("SPICE")


def tell_place() -> tuple[int, int, str | None]:
    """Return the rank, the number of ranks and a variable."""
    group = multiring.init()
    return group.rank, group.size, os.environ.get("SPICE")


if __name__ == "__main__":
    result = learn_digits(int(sys.argv[1]))
    if result["rank"] == 0:
        sys.stdout.write(f"{json.dumps(result)}\n")
