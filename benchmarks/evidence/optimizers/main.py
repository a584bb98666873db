"""Compare the steps of Shampoo to tuned NadamW's final loss, on four small workloads.

    python benchmarks/evidence/optimizers/main.py [--only nadamw] [--jobs 2] [--device cpu] [--folder FOLDER]
    python benchmarks/evidence/optimizers/main.py [--only shampoo] [--workloads climate,unet]
    python benchmarks/evidence/optimizers/main.py --show

Each optimizer gets the same five pairs of rate and decay in each workload, with one seed. The best pair is judged with
three other seeds. The target is the mean of tuned NadamW's final held-out losses over its judging seeds. Shampoo is
judged with trainings of 0.78, 0.9 and 1.0 of NadamW's steps; its rate and decay are tuned at 0.9. Its steps to the
target are the fewest at which one of a seed's three trainings reaches it. Where the interval of their share includes 1,
the two are tied, and the workload does not count.

NadamW's trainings are in nadamw.jsonl in the folder, and Shampoo's in shampoo.jsonl. Shampoo refuses to start before
NadamW's are complete; each of its lines names the digest of nadamw.jsonl, and all lines have times. The same command,
given again, goes on. The exit code is 0 if at least three workloads need 0.9 of the steps or fewer.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 -- after the change of the import path above
from benchmarks.evidence.optimizers.runs import Line, Pool, Record, Training, add_options, told  # noqa: E402
from benchmarks.evidence.optimizers.workloads import WORKLOADS  # noqa: E402
from benchmarks.evidence.support.claims import commit, machine  # noqa: E402

# The same for both optimizers and all workloads; chosen before either was run.
PAIRS = ((1e-3, 0.1), (2e-3, 0.01), (4e-3, 0.1), (8e-3, 0.01), (16e-3, 0.1))
TUNING_SEED, JUDGING_SEEDS = 100, (1, 2, 3)
TUNED_AT = {"nadamw": 1.0, "shampoo": 0.9}
HORIZONS = {"nadamw": (1.0,), "shampoo": (0.78, 0.9, 1.0)}
FLOOR, AIM, WANTED = 0.90, 0.78, 3
T_OF_2 = 4.303  # Student's t of a 95 % interval with two degrees of freedom


def tuning(workload: str, optimizer: str) -> list[Training]:
    """Return the five tuning trials."""
    return [
        Training(
            workload=workload,
            optimizer=optimizer,
            part="tuning",
            rate=rate,
            decay=decay,
            horizon=TUNED_AT[optimizer],
            seed=TUNING_SEED,
        )
        for rate, decay in PAIRS
    ]


def judging(workload: str, optimizer: str, record: Record) -> list[Training] | None:
    """Return the trainings that judge the best trial; None while a trial is missing.

    Raises:
        SystemExit: no trial ended with a finite loss.
    """
    trials = tuning(workload, optimizer)
    if any(each.name not in record.lines for each in trials):
        return None
    best = min(trials, key=lambda each: final(record.lines[each.name]))
    if final(record.lines[best.name]) == math.inf:
        sys.exit(f"{workload}: no trial of {optimizer} ended with a finite loss; want other rates")
    return [
        Training(
            workload=workload,
            optimizer=optimizer,
            part="judging",
            rate=best.rate,
            decay=best.decay,
            horizon=horizon,
            seed=seed,
        )
        for horizon in HORIZONS[optimizer]
        for seed in JUDGING_SEEDS
    ]


def final(line: Line) -> float:
    """Return a training's last loss; infinite if it is not finite."""
    loss = line["curve"][-1][1]
    return math.inf if loss is None else float(loss)


def is_complete(workload: str, optimizer: str, record: Record) -> bool:
    """Return whether all trials and all judging trainings of a workload are recorded."""
    wanted = judging(workload, optimizer, record)
    return wanted is not None and all(each.name in record.lines for each in wanted)


def run(optimizer: str, names: Sequence[str], record: Record, pool: Pool) -> None:
    """Run the missing trainings: those that judge a workload start as soon as its trials have ended."""
    judged: set[str] = set()
    for name in names:
        for each in tuning(name, optimizer):
            pool.start(each, record)
    while True:
        for name in names:
            if name not in judged and (found := judging(name, optimizer, record)) is not None:
                judged.add(name)
                for each in found:
                    pool.start(each, record)
        if not pool.collected():
            return


def steps_to(target: float, line: Line) -> float | None:
    """Return the step at which a training reaches a loss, or None; between evaluations, logarithms are interpolated."""
    before: tuple[int, float] | None = None
    for step, loss in line["curve"]:
        if loss is None:
            return None
        if loss <= target:
            if before is None or loss == before[1]:
                return float(step)
            share = math.log(before[1] / target) / math.log(before[1] / loss)
            return float(before[0] + share * (step - before[0]))
        before = step, loss
    return None


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of three values with its 95 % interval."""
    mean = statistics.mean(values)
    half = T_OF_2 * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def show(names: Sequence[str], baselines: Record, shampoo: Record) -> int:
    """Print a table of the workloads and the judgement; return the exit code."""
    print(
        "| workload | NadamW: rate, decay | final loss, 95 % | Shampoo: rate, decay | final loss at 1.0, 95 % |", end=""
    )
    print(" share of the steps, by seed | mean, 95 % | |\n|---|---|---|---|---|---|---|---|")
    kept = {"floor": 0, "aim": 0}
    for name in names:
        if not is_complete(name, "nadamw", baselines):
            print(f"| {name} | not complete |")
            continue
        base = judging(name, "nadamw", baselines) or []
        losses = [final(baselines.lines[each.name]) for each in base]
        target, low, high = interval(losses)
        text = f"| {name} | {base[0].rate:g}, {base[0].decay:g} | {target:.4f} ({low:.4f} to {high:.4f}) |"
        if not is_complete(name, "shampoo", shampoo):
            print(f"{text} not complete |")
            continue
        own = judging(name, "shampoo", shampoo) or []
        whole = interval([final(shampoo.lines[each.name]) for each in own if each.horizon == 1.0])
        shares = []
        for seed in JUDGING_SEEDS:
            found = [steps_to(target, shampoo.lines[each.name]) for each in own if each.seed == seed]
            shares.append(min((each / WORKLOADS[name].steps for each in found if each is not None), default=math.inf))
        by_seed = ", ".join(f"{each:.3f}" if each < math.inf else "not reached" for each in shares)
        verdict, spread = judgement(shares)
        kept["floor"] += verdict in {"floor", "aim"}
        kept["aim"] += verdict == "aim"
        print(f"{text} {own[0].rate:g}, {own[0].decay:g} | {whole[0]:.4f} ({whole[1]:.4f} to {whole[2]:.4f}) |", end="")
        print(f" {by_seed} | {spread} | {verdict} |")
    print(
        f"\nAt most {FLOOR} of the steps on {kept['floor']} workloads, at most {AIM} on {kept['aim']}; want {WANTED}."
    )
    return 0 if kept["floor"] >= WANTED else 1


def judgement(shares: Sequence[float]) -> tuple[str, str]:
    """Return the verdict on the shares of three seeds, and their geometric mean with its interval."""
    if math.inf in shares:
        return "missed", "-"
    mean, low, high = (math.exp(each) for each in interval([math.log(each) for each in shares]))
    spread = f"{mean:.3f} ({low:.3f} to {high:.3f})"
    if low <= 1.0 <= high:
        return "tie", spread
    return "aim" if mean <= AIM else "floor" if mean <= FLOOR else "missed", spread


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(HORIZONS), help="run the trainings of this optimizer, and show nothing")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="some of them, separated by commas")
    add_options(parser)
    options = parser.parse_args()
    names = options.workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"unknown workloads {', '.join(unknown)}; known are {', '.join(WORKLOADS)}")
    if options.only and options.show:
        parser.error("--only and --show: want one of them")
    if not options.show:
        torch.set_num_threads(1)
        digests = {name: WORKLOADS[name].digest() for name in names}
        for optimizer in [options.only] if options.only else HORIZONS:
            complete(optimizer, names, options, told(options.device, digests))
        if options.only:
            return 0
    print(f"`{' '.join(['python', *sys.argv])}` at commit {commit()}, {machine()}\n")
    return show(names, Record(options.folder / "nadamw.jsonl"), Record(options.folder / "shampoo.jsonl"))


def complete(optimizer: str, names: Sequence[str], options: argparse.Namespace, words: Line) -> None:
    """Run an optimizer's missing trainings.

    Raises:
        SystemExit: NadamW's trainings are not complete, or were run on other data, and those of Shampoo are wanted.
    """
    baselines = Record(options.folder / "nadamw.jsonl")
    if optimizer == "shampoo":
        if missing := [name for name in names if not is_complete(name, "nadamw", baselines)]:
            sys.exit(f"{baselines.path} lacks trainings of {', '.join(missing)}; want --only nadamw before Shampoo")
        for line in baselines.lines.values():
            name = line["workload"]
            if name in names and line["data"][name] != words["data"][name]:
                sys.exit(f"{baselines.path}: NadamW was run on other data of {name}; want both on the same machine")
        words["baselines"] = baselines.digest()
    record = Record(options.folder / f"{optimizer}.jsonl", words)
    run(optimizer, names, record, Pool(options.jobs, options.device))


if __name__ == "__main__":
    sys.exit(main())
