"""Train on digits with each wire type between hosts, and compare with float32.

The claims cover the accuracy and the bytes sent.
"""

import math
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.evidence.jobs.job import ROOT
from benchmarks.evidence.support.claims import Claim, shown

LAB = "--hosts 2 --slots 2"
SEEDS = 5
EPOCHS, FEW_EPOCHS = 20, 2
RUN_S = 600.0
WIRES = {
    "fp16": "--wire fp16",
    "bf16": "--wire bf16",
    "int8": "--wire int8",
    "int8 with error feedback": "--wire int8 --error-feedback",
}
# These options save bytes at the cost of accuracy. The accuracy is reported without a floor.
TOLD = {"PowerSGD of rank 4": "--powersgd 4"}
_FOUND = re.compile(r"(\d+) bytes of gradients a step.*test accuracy ([\d.]+)%", re.DOTALL)


def digits(share: int) -> Iterator[Claim]:
    """Yield the accuracy of the digits example after training with each wire type.

    The example itself fails if the ranks' parameters differ in any bit after a step.
    """
    seeds = range(1, max(SEEDS // share, 2) + 1)
    epochs = EPOCHS if share == 1 else FEW_EPOCHS
    plain, wrong = learned("", seeds, epochs)
    yield Claim(
        text=f"digits with float32 between hosts, {len(seeds)} seeds", figure=text_of(plain, wrong), holds=not wrong
    )
    for name, options in {**WIRES, **TOLD}.items():
        coded, wrong = learned(options, seeds, epochs)
        within = bool(plain) and bool(coded) and is_as_good([each for _, each in coded], [each for _, each in plain])
        has_floor = name in WIRES
        yield Claim(
            text=f"digits with {name}"
            + (": float32's accuracy, within 2 standard errors" if has_floor else " (no floor)"),
            figure=text_of(coded, wrong),
            holds=not wrong and (within or not has_floor),
        )


def learned(options: str, seeds: range, epochs: int) -> tuple[list[tuple[int, float]], str]:
    """Train with several seeds; return bytes per step and accuracies, and any error.

    The accuracy is in percent. The error text is "" if all runs ended well.
    """
    found: list[tuple[int, float]] = []
    for seed in seeds:
        words = [*options.split(), "--seed", str(seed), "--epochs", str(epochs)]
        program = [sys.executable, str(ROOT / "examples" / "digits_torch.py"), *words]
        command = [sys.executable, "-m", "multiring", "lab", *LAB.split(), "--", *program]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)  # noqa: S603 -- our own
        except subprocess.TimeoutExpired:
            return found, f"seed {seed}: no end within {RUN_S:g} s"
        match = _FOUND.search(done.stdout)
        if done.returncode != 0 or match is None:
            return found, f"seed {seed}: exit code {done.returncode}: {(done.stdout + done.stderr)[-1000:]}"
        found.append((int(match[1]), float(match[2])))
    return found, ""


def is_as_good(coded: list[float], plain: list[float]) -> bool:
    """Return whether `coded` has the accuracy of `plain`, within two standard errors."""
    error = math.sqrt(sum(statistics.variance(each) / len(each) for each in (coded, plain)))
    return statistics.mean(coded) >= statistics.mean(plain) - 2 * error


def text_of(found: list[tuple[int, float]], wrong: str) -> str:
    """Describe the accuracies and the bytes of gradients in words."""
    if wrong:
        return shown([wrong])
    accuracies = [each for _, each in found]
    error = statistics.stdev(accuracies) / math.sqrt(len(accuracies))
    listed = ", ".join(f"{each:.2f}" for each in accuracies)
    return f"{statistics.mean(accuracies):.2f} % +- {error:.2f} ({listed}), {found[0][0]} bytes of gradients a step"
