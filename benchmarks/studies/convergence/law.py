"""Measure the samples needed to reach a target loss, for each batch size.

A law is fitted to the numbers. The table compares the fit with the prediction from the noise scale of a small batch.
"""

import math
import statistics
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from benchmarks.studies.convergence.record import Record
from benchmarks.studies.convergence.tasks import Digits, Stream, network, samples_to
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from multiring.convergence.critical_batch import fit_critical_batch_size
from multiring.convergence.noise_scale import NoiseScale, noise_sample

BATCHES = {
    "stream": tuple(2**k for k in range(4, 14)),
    "fast": tuple(2**k for k in range(4, 14)),
    "digits": (8, 16, 32, 64, 128, 256, 512),
}
TARGETS = {"stream": 0.15, "fast": 0.15, "digits": 0.2}
RATES = (0.25, 0.5, 1.0, 2.0, 4.0)  # the swept learning rates, as multiples of `centre`
FASTER = {
    "stream": 1.0,
    "fast": 4.0,
    "digits": 1.0,
}  # The task "fast" is the stream with rates around the best rates of the first sweep.
SWEEP_SEEDS = (100, 101)
SEEDS = tuple(range(10))
SMALL = 64  # the batch at which the noise scale is measured, as four micro-batches
SMALL_RATE = 0.1
EVERY = {"stream": 1500, "fast": 900, "digits": 300}
LIMIT = {"stream": 6_000_000, "fast": 6_000_000, "digits": 400_000}


def centre(task: str, batch: int) -> float:
    """Return the middle of the swept learning rates.

    It is 0.1 at batch 64, as in a pilot run, and saturates at 0.8 for large batches (times `FASTER`).
    """
    return FASTER[task] * 0.8 / (1 + 450 / batch)


def source_of(task: str, seed: int) -> Any:
    """Return the images of `task`, with a test set.

    The test set has 4,096 generated images, or 447 digits.
    """
    if task == "digits":
        return Digits(seed)
    source: Any = Stream(seed)
    source.test = Stream(999).batch(4096)
    return source


def noise_run(task: str, seed: int) -> dict[str, Any]:
    """Train with the small batch to the target; predict the critical batch size.

    The predictions come from the noise scale of the steps.
    """
    torch.set_num_threads(1)
    source, model = source_of(task, 1000 + seed), network(1000 + seed)
    parameters: list[Tensor] = list(model.parameters())
    known = NoiseScale(window=10**6)

    def step(batch: int) -> None:
        parts = 4
        gradients = [_gradients(model, parameters, *source.batch(batch // parts)) for _ in range(parts)]
        whole = [torch.stack(each).mean(dim=0) for each in zip(*gradients, strict=True)]
        norms = [sum(float((each**2).sum()) for each in own) for own in (*gradients, whole)]
        known.add(noise_sample(norms[:parts], [batch // parts] * parts, norms[parts]))
        with torch.no_grad():
            torch._foreach_add_(parameters, whole, alpha=-SMALL_RATE)

    run = samples_to(TARGETS[task], model, source, step, batch=SMALL, every=EVERY[task], limit=LIMIT[task])
    state = known.state_dict()
    first, last = NoiseScale(), NoiseScale()
    for which, part in ((first, slice(0, 50)), (last, slice(-200, None))):
        which.load_state_dict({"window": 1000, "signals": state["signals"][part], "noises": state["noises"][part]})
    return {
        "critical": known.progress_mean(SMALL),
        "naive: first 50 steps": first.value,
        "naive: last 200 steps": last.value,
        **asdict(run),
    }


def law_run(task: str, batch: int, rate: float, seed: int) -> dict[str, Any]:
    """Train with plain SGD to the target; return the run."""
    torch.set_num_threads(1)
    source, model = source_of(task, seed), network(seed)
    parameters: list[Tensor] = list(model.parameters())

    def step(count: int) -> None:
        gradients = _gradients(model, parameters, *source.batch(count))
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-rate)

    return asdict(samples_to(TARGETS[task], model, source, step, batch=batch, every=EVERY[task], limit=LIMIT[task]))


def _gradients(model: nn.Module, parameters: list[Tensor], images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(cross_entropy(model(images), labels), parameters)


def predict(record: Record, task: str) -> dict[str, float]:
    """Return the predictions of the critical batch size, as medians over the seeds.

    The predictions come from the small batch. They are the mean from the theory, and two naive guesses.
    """
    runs = [record.run(f"{task} noise seed {seed}", partial(noise_run, task, seed)) for seed in SEEDS]
    names = ("critical", "naive: first 50 steps", "naive: last 200 steps")
    return {name: statistics.median(run[name] for run in runs) for name in names}


def measure(record: Record, task: str) -> list[tuple[int, float, list[dict[str, Any]]]]:
    """Return the best learning rate of each batch size, and ten runs with this rate."""
    rows = []
    for batch in BATCHES[task]:
        rate = _best_rate(record, task, batch)
        runs = [
            record.run(f"{task} B {batch} seed {seed}", partial(law_run, task, batch, rate, seed)) for seed in SEEDS
        ]
        rows.append((batch, rate, runs))
    return rows


def _best_rate(record: Record, task: str, batch: int) -> float:
    mean: dict[float, float] = {}
    for factor in RATES:
        rate = factor * centre(task, batch)
        found = [
            record.run(f"{task} sweep B {batch} x{factor} seed {seed}", partial(law_run, task, batch, rate, seed))[
                "samples"
            ]
            for seed in SWEEP_SEEDS
        ]
        mean[rate] = math.inf if None in found else math.exp(statistics.mean(map(math.log, found)))
    return min(mean, key=lambda rate: mean[rate])


def table(record: Record, task: str) -> str:
    """Return the table of the measurements, the fitted laws and the predictions."""
    foretold, rows = predict(record, task), measure(record, task)
    batches = [batch for batch, _, _ in rows]
    logs = [[math.log(run["samples"]) for run in runs if run["samples"] is not None] for _, _, runs in rows]
    needed = [math.exp(statistics.mean(each)) for each in logs]
    fits = {exponent: fit_critical_batch_size(batches, needed, exponent) for exponent in (1.0, 0.8, 1.2)}
    law = fits[1.0]
    lines = ["| B | rate | samples to the target, 95 % | steps | law | off | evaluations, least | reached |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for (batch, rate, runs), each, mean, off in zip(rows, logs, needed, law.residuals(batches, needed), strict=True):
        # This is Student's t with nine degrees of freedom.
        half = 2.262 * statistics.stdev(each) / math.sqrt(len(each))
        least = min(run["evaluations"] for run in runs)
        lines.append(
            f"| {batch:,} | {rate:.3g} | {mean:,.0f} ({mean * math.exp(-half):,.0f}-{mean * math.exp(half):,.0f}) | "
            f"{mean / batch:,.0f} | {law.needed(batch):,.0f} | {100 * off:+.1f} % | {least} | {len(each)}/{len(runs)} |"
        )
    lines.append("")
    for exponent, fit in fits.items():
        worst = max(map(abs, fit.residuals(batches, needed)))
        lines.append(
            f"- B^{exponent}: Emin {fit.least:,.0f}, Bc {fit.critical:,.0f}, largest residual {100 * worst:.1f} %"
        )
    for name, value in foretold.items():
        lines.append(f"- foretold Bc, {name}: {value:,.0f}, {value / law.critical:.2f} of the fit's")
    lines.append(f"- {len(record)} runs, {record.seconds / 60:.1f} minutes of one thread")
    return "\n".join(lines)
