"""Grade the prediction of the slowest rank of a step on recorded runs, from the steps of one rank of the same run.

    python benchmarks/evidence/foresight/slowest_rank.py TIMELINE...

`multiring simulate` takes the slowest of N ranks to compute as long as the quantile 0.5^(1/N) of one rank's steps. Here
the steps of one rank of a run stand for a profile, and predict the median of the longest compute of all ranks. Each
rank has its turn, and the errors of all are averaged. So a slow machine, or a profile of another day, does not matter:
only whether the ranks vary independently does. The median step of the same rank is graded for comparison.
"""

import argparse
from pathlib import Path
from statistics import mean, median

from multiring._diagnosis.recorded_steps import read_steps
from multiring.planner.parallelism import Compute, Profile, Unit

UNIT = Unit(name="", parameters=0, parameter_bytes=0, seconds=0.0, output_bytes=0.0, saved_bytes=0.0)


def main() -> None:
    """Print a row for each run, and the median and the worst of all errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timelines", nargs="+", type=Path, metavar="TIMELINE", help="runs of user_script.py")
    print("| run | ranks | steps | slowest rank, ms | error of the quantile | error of the median step |")
    print("|---|---|---|---|---|---|")
    errors: list[float] = []
    plain: list[float] = []
    for path in parser.parse_args().timelines:
        recorded = read_steps(path)
        slowest = median(map(max, zip(*recorded.computes, strict=True)))
        own = [median(each) for each in recorded.computes]
        spreads = [tuple(each / middle for each in steps) for steps, middle in zip(recorded.computes, own, strict=True)]
        profiles = [Profile(units=(UNIT,), batch=1, compute=(Compute(1, 1, 1),), spread=each) for each in spreads]
        found = [
            middle * each.slowest_of(recorded.ranks) / slowest - 1 for middle, each in zip(own, profiles, strict=True)
        ]
        errors.append(mean(map(abs, found)))
        plain.append(mean(abs(middle / slowest - 1) for middle in own))
        name = path.name.removesuffix(".json.gz")
        count = len(recorded.computes[0])
        print(f"| {name} | {recorded.ranks} | {count} | {slowest * 1e3:.2f} | {errors[-1]:.1%} | {plain[-1]:.1%} |")
    for what, each in (("the quantile", errors), ("the median step", plain)):
        print(f"{what}: {len(each)} runs, median error {median(each):.1%}, worst {max(each):.1%}")


if __name__ == "__main__":
    main()
