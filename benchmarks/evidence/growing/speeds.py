"""Train on ranks of different speeds with equal shares of the batch, and with shares by speed.

    python benchmarks/evidence/growing/speeds.py [--by distribute] [--quota 0.5] [--steps 60] [--rounds 3]

Two ranks on this host train with NumPy in float64, with one thread each. Quotas of CPU time, by cgroups, make one of
them twice as fast as the other: one may use `--quota` of a core, the other half of that. It needs the rights to make
cgroups. Jobs with equal shares and with `SpeedShares` take turns. With `--by distribute`, the same model in torch
trains with `mt.distribute(shares="equal")` and `shares="speed"`. The ratio of their times is at most 1.5: with equal
shares a step takes as long as half of the batch on the slow rank, and at best a third of it. The first third of the
steps, with `distribute` at least 36, is left out, in which the speeds are found. The losses of all jobs must equal, to
1e-10, those of one process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import commit, machine

from multiring._settings import inherited_environment

PERIOD_US, BATCH, FEATURES, LEAST, EVERY = 10_000, 96, 400, 1.4, 5
CGROUP = Path("/sys/fs/cgroup")


def main() -> int:
    """Run the jobs, and print a table; return 1 if shares by speed do not pay."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quota", type=float, default=0.5, help="cores that the fast rank may use")
    parser.add_argument("--steps", type=int, default=60, help="steps of each job")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each kind")
    parser.add_argument("--by", choices=("state", "distribute"), default="state", help="what has the shares")
    parser.add_argument("--rank", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        train = train_by_state if arguments.by == "state" else train_by_distribute
        train(arguments.rank[0], arguments.steps, arguments.quota, Path(arguments.rank[1]))
        return 0
    seconds: dict[str, list[float]] = {"equal": [], "speed": []}
    losses, parts = [], []
    for _ in range(arguments.rounds):
        for kind, found in seconds.items():
            with tempfile.TemporaryDirectory() as name:
                words = [sys.executable, "-m", "multiring", "run", "-n", "2", *sys.argv, "--rank", kind, name]
                environment = inherited_environment() | {"OMP_NUM_THREADS": "1"}
                subprocess.run(words, env=environment, check=True)  # noqa: S603 -- our own program
                took, told, part = json.loads((Path(name) / "end").read_text())
            found.append(took)
            losses.append(told)
            parts.append(part)
    truth = trained(arguments.steps)
    worst = max(abs(one - other) for told in losses for one, other in zip(told, truth, strict=True))
    equal, speed = median(seconds["equal"]), median(seconds["speed"])
    print(
        f"# Uneven machines, {time.strftime('%Y-%m-%d %H:%M')}\n\n`{' '.join(sys.argv)}` at commit {commit()}, "
        f"{machine()}\n\n"
        "| cores of the ranks | step, equal shares | step, shares by speed | ratio | samples of the ranks "
        "| losses differ by | load |\n|---|---|---|---|---|---|---|"
    )
    cores = f"{arguments.quota:g}, {arguments.quota / 2:g}"
    told = [cores, f"{1e3 * equal:.0f} ms", f"{1e3 * speed:.0f} ms", f"{equal / speed:.2f}", parts[-1], f"{worst:.1e}"]
    print("|", " | ".join(map(str, [*told, f"{os.getloadavg()[0]:.0f}"])), "|")
    return 0 if equal / speed >= LEAST and worst < 1e-10 else 1


def samples() -> tuple[Any, Any]:
    """Return inputs and goals of one batch, on which all steps train."""
    import numpy as np  # noqa: PLC0415 -- after the number of threads is set

    inputs = np.random.default_rng(0).standard_normal((BATCH, FEATURES))
    return inputs, np.tanh(inputs @ np.linspace(-1.0, 1.0, FEATURES) / 10)


def gradient_of(weights: Any, inputs: Any, goals: Any) -> tuple[Any, float]:
    """Return the gradient of the mean loss of two layers, and that loss.

    Each sample is computed for itself, so that the time is in proportion to their number.
    """
    import numpy as np  # noqa: PLC0415 -- as above

    total, loss = np.zeros_like(weights), 0.0
    for one, goal in zip(inputs, goals, strict=True):
        for _ in range(3):  # more work, as a deeper network has
            hidden = np.tanh(weights @ one)
        error = hidden.mean() - goal
        total += 2 * error / len(hidden) * np.outer(1 - hidden**2, one)
        loss += error**2
    return total / len(inputs), loss / len(inputs)


def trained(steps: int) -> list[float]:
    """Return the losses of one process."""
    import numpy as np  # noqa: PLC0415 -- as above

    (inputs, goals), weights, losses = samples(), np.full((FEATURES, FEATURES), 1e-3), []
    for _ in range(steps):
        gradient, loss = gradient_of(weights, inputs, goals)
        weights = weights - gradient
        losses.append(float(loss))
    return losses


def train_by_state(shares: str, steps: int, quota: float, folder: Path) -> None:
    """Train as one rank; rank 0 writes down the time of a step, the losses and the shares."""
    import numpy as np  # noqa: PLC0415 -- as above

    import multiring.adapters as ma  # noqa: PLC0415 -- as above
    from multiring.adapters import elastic  # noqa: PLC0415 -- as above

    ma.init()
    group = limited(quota / (1 + ma.rank()), f"multiring-{os.getpid()}")
    try:
        inputs, goals = samples()
        state: Any = elastic.ObjectState(
            bcast_object=ma.broadcast_object,
            get_rank=ma.rank,
            gather_object=ma.allgather_object,
            weights=np.full((FEATURES, FEATURES), 1e-3),
            shares=elastic.SpeedShares(),
        )
        losses, times = [], []
        for step in range(steps):
            began = time.perf_counter()
            part, weight = state.shares.part(BATCH), state.shares.weight(BATCH)
            with state.shares.computing(BATCH):
                gradient, loss = gradient_of(
                    state.weights, inputs[part.start : part.stop], goals[part.start : part.stop]
                )
            state.weights = state.weights - np.asarray(ma.allreduce(gradient * weight))
            losses.append(float(np.asarray(ma.allreduce(np.array([loss * weight])))[0]))
            if shares == "speed" and step % EVERY == EVERY - 1:
                state.commit()
            times.append(time.perf_counter() - began)
        if ma.rank() == 0:
            told = [
                sum(times[steps // 3 :]) / len(times[steps // 3 :]),
                losses,
                [len(each) for each in state.shares.parts(BATCH)],
            ]
            (folder / "end").write_text(json.dumps(told))
        ma.shutdown()
    finally:
        free(group)


def train_by_distribute(shares: str, steps: int, quota: float, folder: Path) -> None:
    """Train as one rank with torch; rank 0 writes down the same."""
    import torch  # noqa: PLC0415 -- as above

    import multiring.torch as mt  # noqa: PLC0415 -- as above
    from multiring.torch.distributing.measuring import EVERY  # noqa: PLC0415 -- as above

    torch.set_num_threads(1)
    mt.init()
    group = limited(quota / (1 + mt.rank()), f"multiring-{os.getpid()}")
    try:
        inputs, goals = (torch.from_numpy(each) for each in samples())
        repeated = torch.utils.data.TensorDataset(inputs.repeat(steps, 1), goals.repeat(steps))
        model = torch.nn.Linear(FEATURES, FEATURES, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(model.weight, 1e-3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        data = torch.utils.data.DataLoader(repeated, BATCH)
        model, optimizer, loader = mt.distribute(model, optimizer, data, shares=shares, check=False)
        losses, times, parts = [], [], []
        began = time.perf_counter()
        for own_inputs, own_goals in loader:
            optimizer.zero_grad()
            errors = []
            for one, goal in zip(own_inputs, own_goals, strict=True):
                for _ in range(3):  # more work, as a deeper network has
                    hidden = torch.tanh(model(one))
                errors.append((hidden.mean() - goal) ** 2)
            loss = torch.stack(errors).mean()
            losses.append(float(loader.global_loss(loss)))
            loss.backward()  # type: ignore[no-untyped-call] # torch's own
            optimizer.step()
            parts = [len(own_inputs)]
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
        parts = mt.allgather(torch.tensor(parts)).tolist()
        if mt.rank() == 0:
            timed = times[max(steps // 3, EVERY + 4) :]
            (folder / "end").write_text(json.dumps([sum(timed) / len(timed), losses, parts]))
        mt.shutdown()
    finally:
        free(group)


def limited(cores: float, name: str) -> Path:
    """Limit this process to so many cores, on average over each 10 ms; return its cgroup."""
    is_v2 = (CGROUP / "cgroup.controllers").exists()
    group = (CGROUP if is_v2 else CGROUP / "cpu") / name
    group.mkdir()
    quota = str(int(PERIOD_US * cores))
    # Other work on the machine must not limit the ranks below their quotas.
    (group / ("cpu.weight" if is_v2 else "cpu.shares")).write_text(str(10_000 if is_v2 else 262_144))
    if is_v2:
        (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(quota)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    return group


def free(group: Path) -> None:
    """Leave a cgroup, and remove it."""
    (group.parent / "cgroup.procs").write_text(str(os.getpid()))
    group.rmdir()


if __name__ == "__main__":
    sys.exit(main())
