"""Measure what the record of a running job costs a training step.

    python benchmarks/promises/live_cost.py [--calls 100000] [--seconds 20]

The cost of a step is the sum of two parts, both in CPU time:

- the code that a step runs: a count of the step, `log_metrics` with a step and two metrics, and the count of a wait for
  input; called `--calls` times in this process;
- the CPU seconds of the thread that reports, divided by the steps, as each record says them; of a job of two ranks with
  the training step of an MLP, whose gradients are reduced in several buckets.

The launcher's CPU seconds for each step are shown as well. The exit code is 1 if a step costs 50 us or more.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import multiring
import multiring.torch as mt
from multiring._launch.live_record import LiveRecord, read_record
from multiring._runtime import event_reader
from multiring._steps.step_counters import STEPS, log_metrics, with_timed_waits
from multiring._steps.step_report import decode_report, encode_report, report_in

FLOOR_S, AIM_S = 50e-6, 20e-6
WIDTHS = {"small": 256, "middle": 1024, "large": 2048}  # of the hidden layers


def main() -> int:
    """Print the costs; return 1 if one is not below the floor."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=100_000, help="calls of the code that a step runs")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each training")
    parser.add_argument("--rank-of", choices=WIDTHS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        train(WIDTHS[arguments.rank_of], arguments.seconds)
        return 0
    in_step_s = cost_in_step(arguments.calls)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; CPU time")
    print(f"code in a step, {arguments.calls} calls: {in_step_s * 1e6:.2f} us")
    print("| step | events a step | time of a step | reporting thread | launcher, a step | sum of a rank |")
    print("|---|---|---|---|---|---|")
    worst_s = 0.0
    for name in WIDTHS:
        with tempfile.TemporaryDirectory() as folder:
            worst_s = max(worst_s, judged(name, arguments.seconds, in_step_s, Path(folder)))
    verdict = "met" if worst_s < AIM_S else "floor met" if worst_s < FLOOR_S else "missed"
    print(f"worst: {worst_s * 1e6:.1f} us; floor {FLOOR_S * 1e6:.0f}, aim {AIM_S * 1e6:.0f} us: {verdict}")
    return int(worst_s >= FLOOR_S)


def cost_in_step(calls: int) -> float:
    """Return the CPU seconds of the code that a step runs."""
    STEPS.is_read = True
    batches = with_timed_waits(iter(range(calls)))
    start = time.process_time()
    for step in range(calls):
        next(batches)
        STEPS.count()
        log_metrics(step=step, loss=0.5, learning_rate=0.1)
    cost = (time.process_time() - start) / calls
    start = time.process_time()
    for _ in range(calls):
        pass
    return cost - (time.process_time() - start) / calls


def judged(name: str, seconds: float, in_step_s: float, folder: Path) -> float:
    """Train with a record, print a row, and return the cost of a step."""
    record = folder / "record.jsonl"
    command = [sys.executable, "-m", "multiring", "run", "-n", "2", "--record", str(record), "--", sys.executable]
    ended = subprocess.run(  # noqa: S603 -- this program
        [*command, __file__, "--rank-of", name, "--seconds", str(seconds)], capture_output=True, text=True, check=True
    )
    told = dict(line.partition("] ")[2].split("=") for line in ended.stdout.splitlines() if line.startswith("[0] "))
    reports = [each for each in read_record(record.read_bytes()) if each["kind"] == "steps"]
    cost_s, step_s = 0.0, 0.0
    for rank in range(2):
        own = [each for each in reports if each["rank"] == rank and each["steps"]]
        steps = own[-1]["steps"] - own[0]["steps"]
        cost_s = max(cost_s, (own[-1]["writer_cpu_s"] - own[0]["writer_cpu_s"]) / steps)
        step_s = (own[-1]["wall_s"] - own[0]["wall_s"]) / steps
    launcher_s = launcher_cost(reports) / float(told["steps"])
    total_s = in_step_s + cost_s
    print(
        f"| {name} | {float(told['events']):.1f} | {step_s * 1e3:.1f} ms | {cost_s * 1e6:.1f} us | "
        f"{launcher_s * 1e6:.2f} us | {total_s * 1e6:.1f} us |",
        flush=True,
    )
    return total_s


def launcher_cost(reports: list[dict[str, object]]) -> float:
    """Return the CPU seconds that a launcher needs to take and write these reports, measured in this process."""
    known = [report for each in reports if (report := report_in(each)) is not None]
    data = [encode_report(each) for each in known]
    record = LiveRecord(None, print)
    start = time.process_time()
    for each in data:
        report = decode_report(each)
        if report is not None:
            record.add_steps(0, report)
    return time.process_time() - start


def train(width: int, seconds: float) -> None:
    """Train an MLP on this rank for a while, and print its steps and the events of one."""
    mt.init()
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    model = nn.Sequential(*layers)
    optimizer = mt.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
    generator = torch.Generator().manual_seed(mt.rank())
    events, seen, reader, steps = 0, 0, event_reader(), 0
    stop = torch.zeros(1)
    until = time.monotonic() + seconds
    while not stop.item():
        inputs, classes = torch.randn(16, 64, generator=generator), torch.randint(0, 10, (16,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), classes)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        steps += 1
        multiring.log_metrics(step=steps, loss=loss)
        if steps % 20 == 0:
            stop = mt.allreduce(torch.tensor([float(time.monotonic() > until)]), op=mt.Max, name="stop")
            events += len(reader.take()) if steps < 400 else 0
            seen = steps if steps < 400 else seen
    if mt.rank() == 0:
        print(f"steps={steps}\nevents={events / max(1, seen)}")


if __name__ == "__main__":
    sys.exit(main())
