"""Grade predicted times of plans in labs that are drawn by a seed.

    sudo python benchmarks/evidence/foresight/labs.py [--seed 1] [--labs 14] [--file F]

Each lab is built twice. In each, `multiring probe` measures the links, and all plans of three sizes are timed. A plan's
time in one building is predicted with the constants that were probed in the other one, so no prediction knows the
building that grades it. Repeatability is the relative difference of a plan's two times. Each building is a line of the
file, and is left out if it is there; the summary is that of all lines with this seed. Sums whose bytes per link are
between 1/4 and 8 token buckets of the lab are listed and do not count: how full the buckets are decides their times.
Nor do those during which less than a quarter of this machine's cores was idle: all hosts of a lab share its cores, so
their ranks waited for a core, and hosts of their own would not.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.jobs.job import ROOT, LabJob
from benchmarks.evidence.planner.main import JOB_S, RANK

from multiring.lab import parse_rate
from multiring.lab.network import burst_bytes

Plans = dict[str, tuple[float, float]]  # by the plan, its predicted and its measured seconds

KIB = 2**10
BUILDINGS = 2  # of each lab
MOST_RANKS = 8
LEAST_IDLE = 0.25  # of the cores of the machine that has the lab
APART = 1.1  # plans whose times differ by more than this have an order


def labs_of(seed: int, count: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the options of labs, each with the sizes to time in it: one small, two large."""
    drawn = random.Random(seed)  # noqa: S311 -- labs are drawn, not secrets
    found = []
    for _ in range(count):
        hosts = drawn.choice((2, 3, 4, 6, 8))
        slots = drawn.randint(1, MOST_RANKS // hosts)
        rate = drawn.choice((50, 100, 200, 400, 800))
        words = f"--hosts {hosts} --slots {slots} --link {rate}mbit"
        kind = drawn.choice(("plain", "racks", "rails"))
        if kind == "racks" and hosts % 2 == 0 and hosts > 2:
            words += f" --rack 2 --uplink {rate // 2 * drawn.choice((1, 2))}mbit"
        if kind == "rails":
            words += f" --rail {rate // drawn.choice((1, 2, 4))}mbit"
        second_bytes = rate * 125_000
        sizes = drawn.choice((1, 4, 16)) * KIB, *sorted(second_bytes // drawn.randint(2, 16) // 64 * 64 for _ in "ab")
        found.append((words, tuple(dict.fromkeys(sizes))))
    return found


def built(lab: str, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Build a lab, and return what its rank 0 measured for each size.

    Raises:
        TimeoutError: it did not measure all sizes in time.
    """
    with LabJob(lab, RANK, "plans", ",".join(map(str, sizes))) as job:
        job.wait_for(lambda heard: len(heard) == len(sizes), JOB_S)
        return list(job.heard)


def plans_of(word: dict[str, Any]) -> Plans:
    """Return the predicted and the measured seconds of each plan, by the plan."""
    keys = ("algorithm", "grid", "shares", "segment_bytes")
    return {
        json.dumps([each[key] for key in keys]): (each["predicted_s"], median(each["seconds"]))
        for each in word["plans"]
    }


def why_excluded(lab: str, words: Sequence[dict[str, Any]]) -> str:
    """Return why the times of a sum in a lab, one word for each building, do not count; "" if they do.

    The bytes per link are those that a host must send in any plan: 2 (hosts - 1) / hosts of the sum.
    """
    options = dict(zip(*[iter(lab.split())] * 2, strict=True))
    hosts = int(options["--hosts"])
    rates = [parse_rate(options[name]) for name in ("--link", "--rail", "--uplink") if name in options]
    sent_bytes = 2 * (hosts - 1) / hosts * words[0]["size"]
    if any(burst_bytes(rate) / 4 < sent_bytes < 8 * burst_bytes(rate) for rate in rates):
        return "token buckets"
    idle = min(median(word["plans"][0]["idle"]) for word in words)
    return f"{idle:.0%} of the cores idle" if idle < LEAST_IDLE else ""


def errors_of(predicted: Plans, measured: Plans) -> tuple[float, float] | None:
    """Return the relative error of the chosen plan's predicted time, and by how much its two measured times differ.

    Returns:
        None if the two buildings have no plan in common.
    """
    chosen = next((plan for plan in predicted if plan in measured), None)
    if chosen is None:
        return None
    expected, before = predicted[chosen]
    return abs(expected / measured[chosen][1] - 1), abs(before / measured[chosen][1] - 1)


def ordered(predicted: Plans, measured: Plans) -> Iterator[bool]:
    """Yield for each pair of plans whose measured times differ clearly whether their order was predicted."""
    for a, b in combinations([plan for plan in predicted if plan in measured], 2):
        ratio = measured[a][1] / measured[b][1]
        if max(ratio, 1 / ratio) > APART:
            yield (predicted[a][0] < predicted[b][0]) == (ratio < 1)


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Return the errors of the chosen plans, the repeatability, and the order of plans."""
    sums: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for each in records:
        for word in each["words"]:
            sums.setdefault((each["lab"], word["size"]), []).append(word)
    counted, orders, listed = [], [], []
    twice = {key: words for key, words in sums.items() if len(words) == BUILDINGS}
    for (lab, size_bytes), words in twice.items():
        one, other = map(plans_of, words)
        directions = (one, other), (other, one)
        errors = [found for each in directions if (found := errors_of(*each)) is not None]
        why = why_excluded(lab, words)
        if why:
            told = ", ".join(f"{error:.1%}" for error, _ in errors)
            listed.append(f"\n  {lab}: {size_bytes} bytes ({why}): errors {told}")
            continue
        counted += errors
        orders += [is_right for each in directions for is_right in ordered(*each)]
    if not counted:
        return "no sum that counts was timed in two buildings yet"
    sorted_errors = sorted(error for error, _ in counted)
    repeatability = median(apart for _, apart in counted)
    tau = (2 * sum(orders) - len(orders)) / max(1, len(orders))
    return (
        f"{len(counted)} predictions: median error {median(sorted_errors):.1%}, 95th percentile "
        f"{sorted_errors[int(0.95 * (len(counted) - 1))]:.1%}; repeatability {repeatability:.1%}; "
        f"Kendall's tau {tau:.2f} of {len(orders)} pairs of plans\n"
        f"{len(listed)} of {len(twice)} sums excluded:{''.join(sorted(listed))}"
    )


def main() -> None:
    """Build the labs that are not in the file, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--labs", type=int, default=14)
    parser.add_argument("--file", type=Path, default=ROOT / "build" / "evidence_foresight_labs.jsonl")
    arguments = parser.parse_args()
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.file.read_text().splitlines() if arguments.file.exists() else []
    records = [each for each in map(json.loads, lines) if each["seed"] == arguments.seed]
    done = {(each["lab"], each["building"]) for each in records}
    for building in range(BUILDINGS):
        for lab, sizes in labs_of(arguments.seed, arguments.labs):
            if (lab, building) in done:
                continue
            try:
                words = built(lab, sizes)
            except TimeoutError as error:
                print(f"{lab}: {error}", flush=True)
                continue
            records.append({"seed": arguments.seed, "lab": lab, "building": building, "words": words})
            with arguments.file.open("a") as out:
                out.write(json.dumps(records[-1]) + "\n")
            print(f"{lab}: {len(words)} sizes", flush=True)
    print(summary(records))


if __name__ == "__main__":
    main()
