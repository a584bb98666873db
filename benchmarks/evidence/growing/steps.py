"""Compare the steps of a fixed job with those of jobs that go on without lost ranks, while nothing fails.

    python benchmarks/evidence/growing/steps.py [--rounds 60] [--steps 60] [--ranks 2]

Three jobs train the same MLP with torch on this host, with one thread a rank: a fixed one, one with `--min-ranks`, and
one with `--max-ranks`, too. They take turns: each makes `--steps` steps while the others wait for a byte, which costs
no CPU time. The elastic ones run under `elastic.run`, and commit after each turn, which is timed apart. The ratio of a
round is the fixed job's time over the elastic one's; the table has its median, with an exact 95 % interval.
"""

import argparse
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import commit, machine

from multiring._settings import inherited_environment

KINDS: dict[str, Sequence[str]] = {
    "fixed": (),
    "min-ranks": ("--min-ranks", "1"),
    "max-ranks": ("--min-ranks", "1", "--max-ranks"),
}
WIDTHS = {"small": 128, "large": 1024}  # of the hidden layers
LEFT_OUT, FLOOR, DEADLINE_S = 3, 0.99, 120.0


def main() -> int:
    """Run the jobs in turns, and print a table; return 1 if an elastic job is slower."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="turns of each job")
    parser.add_argument("--steps", type=int, default=60, help="steps of a turn")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each job")
    parser.add_argument("--rank", nargs=3, metavar=("KIND", "WIDTH", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        kind, width, folder = arguments.rank
        train(kind, int(width), Path(folder), arguments.steps)
        return 0
    print(f"# Elastic steps, {time.strftime('%Y-%m-%d %H:%M')}\n\n`{' '.join(sys.argv)}` at {commit()}, {machine()}\n")
    print(
        "| model | job | step, median | fixed / elastic (95 % interval) | a commit | load |\n|---|---|---|---|---|---|"
    )
    misses = 0
    for name, width in WIDTHS.items():
        times, commits = measured(width, arguments)
        for kind, found in times.items():
            ratios = sorted(one / other for one, other in zip(times["fixed"], found, strict=True))
            low, high = interval(ratios)
            is_met = median(ratios) >= FLOOR
            misses += not is_met
            told = f"{median(ratios):.3f} ({low:.3f} to {high:.3f}){'' if is_met else ' MISSED'}"
            step_ms = f"{1e3 * median(found) / arguments.steps:.2f} ms"
            kept = f"{1e3 * median(commits[kind]):.2f} ms" if kind != "fixed" else ""
            shown = [name, kind, step_ms, told if kind != "fixed" else "", kept, f"{os.getloadavg()[0]:.1f}"]
            print("|", " | ".join(shown), "|", flush=True)
    print(f"\n{'MISSED' if misses else 'holds'}: medians of at least {FLOOR}; a wide interval says little")
    return int(misses > 0)


def measured(width: int, arguments: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of each turn, and of each commit, by the kind of job."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    commits: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ends = [f"{kind}-{rank}" for kind in KINDS for rank in range(arguments.ranks)]
        for each in [*ends, *KINDS]:
            os.mkfifo(folder / each)
        jobs = [started(kind, width, folder, arguments) for kind in KINDS]
        # Opened for both directions, neither waits for the other end.
        pipes = {each: os.open(folder / each, os.O_RDWR) for each in [*ends, *KINDS]}
        kinds = list(KINDS)
        for turn in range(arguments.rounds + LEFT_OUT):
            for place in range(len(kinds)):  # each kind is first, second and last as often
                kind = kinds[(place + turn) % len(kinds)]
                for rank in range(arguments.ranks):
                    os.write(pipes[f"{kind}-{rank}"], b"1")
                if not select.select([pipes[kind]], [], [], DEADLINE_S)[0]:
                    raise SystemExit(f"the job {kind} does not answer for {DEADLINE_S:.0f} s")
                took, kept = map(float, os.read(pipes[kind], 100).split())  # one line, written at once
                if turn >= LEFT_OUT:
                    times[kind].append(took)
                    commits[kind].append(kept)
        for pipe in pipes.values():
            os.close(pipe)
        for job in jobs:
            if job.wait(DEADLINE_S):
                raise SystemExit(f"a job ended with exit code {job.returncode}")
    return times, commits


def started(kind: str, width: int, folder: Path, arguments: argparse.Namespace) -> "subprocess.Popen[bytes]":
    """Start a job of a kind."""
    ranks = str(arguments.ranks)
    most = [ranks] if kind == "max-ranks" else []
    launch = [sys.executable, "-m", "multiring", "run", "-n", ranks, *KINDS[kind], *most]
    own = [__file__, "--steps", str(arguments.steps), "--rank", kind, str(width), str(folder)]
    environment = inherited_environment() | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*launch, *own], env=environment, stderr=subprocess.DEVNULL)  # noqa: S603 -- this program


def train(kind: str, width: int, folder: Path, steps: int) -> None:
    """Make steps whenever a byte comes, as a rank."""
    import torch  # noqa: PLC0415 -- after the number of threads is set
    from torch import nn  # noqa: PLC0415

    import multiring.torch as mt  # noqa: PLC0415

    mt.init()
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model = nn.Sequential(*layers)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
    inputs, classes = torch.randn(16, 64), torch.randint(0, 10, (16,))
    turns = (folder / f"{kind}-{mt.rank()}").open("rb", buffering=0)
    answer = (folder / kind).open("w") if mt.rank() == 0 else None

    def turn(keep: Callable[[], object]) -> None:
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), classes).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
        took = time.perf_counter() - began
        began = time.perf_counter()
        keep()
        if answer is not None:
            answer.write(f"{took} {time.perf_counter() - began}\n")
            answer.flush()

    if kind == "fixed":
        while turns.read(1):
            turn(lambda: None)
    else:
        state = mt.elastic.TorchState(model, optimizer, turns=0)

        @mt.elastic.run
        def train(state: Any) -> None:
            while turns.read(1):
                state.turns += 1
                turn(state.commit)

        train(state)
    mt.shutdown()


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Return an interval with the median of a distribution, of which these are drawn, in at least 95 % of cases."""
    count, cut, below = len(ordered), 0, 0.0
    while (below := below + math.comb(count, cut) / 2**count) <= 0.025:
        cut += 1
    return ordered[max(0, cut - 1)], ordered[min(count - 1, count - cut)]


if __name__ == "__main__":
    sys.exit(main())
