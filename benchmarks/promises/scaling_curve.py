"""Draw how an all_reduce scales over hosts, predicted and measured (as root).

    sudo .venv/bin/python benchmarks/promises/scaling_curve.py docs/pictures/scaling.svg [--measured 2,3,4]
        [--predicted 16]

The hosts have one rank each and links of 1 Gbit/s. The array is 32 MiB of float32. Predictions and measurements come
from `multiring plan`; the measurements use virtual hosts. The program prints the measured and predicted times.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

SIZE, LINK = "32MiB", "1gbit"
PLAN = [sys.executable, "-m", "multiring", "plan", "--sizes", SIZE, "--top", "1"]


def first_row(command: list[str]) -> dict[str, float]:
    """Return the numbers of the first plan that a command prints, by column title."""
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 -- our own
    lines = [line.removeprefix("[0] ") for line in shown.splitlines()]
    head = next(i for i, line in enumerate(lines) if "predicted ms" in line)
    titles = [title for title in ("measured ms", "of predicted", "predicted ms") if title in lines[head]]
    return dict(zip(titles, map(float, lines[head + 1].split()), strict=False))


def predicted(hosts: int) -> float:
    """Return the predicted milliseconds for a number of hosts."""
    return first_row([*PLAN, "--hosts", str(hosts), "--link", LINK])["predicted ms"]


def measured(hosts: int) -> float:
    """Return the milliseconds measured in a lab."""
    lab = [sys.executable, "-m", "multiring", "lab", "--hosts", str(hosts), "--link", LINK, "--"]
    return first_row([*lab, *PLAN, "--measure", "--seconds", "4"])["measured ms"]


def main() -> None:
    """Measure, print and draw the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", type=Path)
    parser.add_argument("--measured", default="2,3,4", metavar="H,...", help="hosts to measure (default 2,3,4)")
    parser.add_argument("--predicted", type=int, default=16, metavar="H", help="predict up to H hosts (default 16)")
    options = parser.parse_args()
    found = {int(hosts): measured(int(hosts)) for hosts in options.measured.split(",")}
    foretold = {hosts: predicted(hosts) for hosts in range(2, options.predicted + 1)}
    for hosts, milliseconds in found.items():
        print(f"{hosts} hosts: {milliseconds:.1f} ms measured, {foretold[hosts]:.1f} ms predicted")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(foretold), list(foretold.values()), color="C0", label="predicted by the planner")
    axes.plot(list(found), list(found.values()), "o", color="C1", label="measured, virtual hosts on one machine")
    axes.set_xlabel("hosts of one rank, links of 1 Gbit/s")
    axes.set_ylabel("ms")
    axes.set_ylim(0)
    axes.grid(alpha=0.2)
    axes.legend()
    axes.set_title("all_reduce of 32 MiB of float32")
    figure.savefig(options.figure)


if __name__ == "__main__":
    main()
