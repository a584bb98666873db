"""Measure how long a network's compute takes, alone on a core: `PYTHON step_pace.py CASE.json`.

It writes the medians over the case's steps as a `Pace`; warm-up steps do not count.
"""

import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch

from multiring._bench.workers.step_case import ANSWER, FileRendezvous, Pace, read_case
from multiring._bench.workers.step_task import StepTask


def measure(task: StepTask, steps: int, warmup: int) -> Pace:
    """Return the medians over `steps` steps."""
    arrived: list[tuple[str, float]] = []
    for name, parameter in task.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call] # torch's own
            lambda _, name=name: arrived.append((name, time.perf_counter()))
        )
    optimizer = task.optimizer()
    forwards, optimizers, backwards = [], [], []
    for turn in range(warmup + steps):
        optimizer.zero_grad()
        arrived.clear()
        start = time.perf_counter()
        loss = task.forward(task.model)
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call] # torch's own
        backward = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        if turn >= warmup:
            forwards.append(forward - start)
            optimizers.append(end - backward)
            at = [forward, *(when for _, when in arrived)]
            backwards.append({name: when - before for (name, when), before in zip(arrived, at, strict=False)})
    order = [name for name, _ in arrived]
    return Pace(
        forward_s=statistics.median(forwards),
        backward=tuple((name, statistics.median(each[name] for each in backwards)) for name in order),
        optimizer_s=statistics.median(optimizers),
    )


def main() -> None:
    """Measure, and write the answer."""
    case = read_case()
    torch.set_num_threads(case.threads)
    pace = measure(StepTask(case, 0), case.steps, case.warmup)
    FileRendezvous(Path(case.out_dir), 0, 1).tell(ANSWER, {"wrong": "", **asdict(pace)})


if __name__ == "__main__":
    main()
