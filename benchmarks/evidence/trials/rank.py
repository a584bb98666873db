"""A rank of the studies of main.py: rank.py CASE OUTPUT NUMBERS; rank 0 writes its figures to OUTPUT as JSON.

Compute is slept through, so that the ranks do not need cores.
"""

import json
import logging
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna

import multiring
from multiring import trials
from multiring.adapters import allgather_object, allreduce

if TYPE_CHECKING:
    from collections.abc import Callable


class Coin(optuna.pruners.BasePruner):
    """Prunes half of the questions, by trial and step."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        """Return the side of the coin."""
        del study
        return Random(1000 * trial.number + (trial.last_step or 0)).random() < 0.5  # noqa: S311 -- no secret


def fill(count: int, longest_s: float, sizes: list[int]) -> dict[str, Any]:
    """Run trials whose durations differ by 10:1; return their durations, sizes and ends."""
    random = Random(1)  # noqa: S311 -- no secret
    durations = [longest_s * 10 ** -random.random() for _ in range(count)]
    ranks = [random.choice(sizes) for _ in range(count)]
    numbers = iter(range(count))

    def objective(trial: trials.Trial) -> float:
        time.sleep(durations[trial.number])
        return float(trial.params["x"])

    found = trials.run(
        objective,
        {"x": {"low": 0.0, "high": 1.0}},
        trials=count,
        ranks_per_trial=lambda _: ranks[next(numbers)] if len(sizes) > 1 else sizes[0],
    )
    ends = [(each.began_s, each.ended_s, len(each.ranks)) for each in found.trials]
    return {"durations": durations, "ranks": ranks, "ends": ends, "states": [each.state for each in found.trials]}


def ask(count: int, seconds: float) -> dict[str, Any]:
    """Run trials of ten reports; return the seconds of each rank between its trials, and in reports."""
    spans: list[tuple[float, float, float]] = []  # begin, end, seconds in reports and questions

    def objective(trial: trials.Trial) -> float:
        began_s, asking_s = time.monotonic(), 0.0
        for step in range(10):
            time.sleep(seconds / 10)
            before_s = time.monotonic()
            trial.report(trial.params["x0"] + 1 / (step + 1), step)
            trial.should_prune()  # and go on, so that all trials are as long
            asking_s += time.monotonic() - before_s
        spans.append((began_s, time.monotonic(), asking_s))
        return float(sum(trial.params.values()))

    space = {f"x{number}": {"low": 0.0, "high": 1.0} for number in range(5)}
    sampler, pruner = optuna.samplers.TPESampler(seed=1), optuna.pruners.MedianPruner()
    trials.run(objective, space, trials=count, sampler=sampler, pruner=pruner)
    return {"spans": allgather_object(spans)}


def prunes(count: int, seed: int) -> dict[str, Any]:
    """Run trials on 2 and on 3 ranks until `count` are pruned; each step has a collective of the trial's ranks."""
    wrong: list[str] = []

    def objective(trial: trials.Trial) -> float:
        for step in range(8):
            array = np.full(100, float(trial.number))
            found = allreduce(array, name="gradient")
            if found[0] != trial.number or multiring.size() != trial.params["ranks"]:
                wrong.append(f"trial {trial.number}, step {step}: {found[0]} on {multiring.size()} ranks")
            trial.report(float(step), step)
            if trial.should_prune():
                raise trials.TrialPruned
        return 0.0

    sampler = optuna.samplers.RandomSampler(seed=seed)
    found = trials.run(
        objective, {"ranks": [2, 3]}, trials=count, ranks_per_trial="ranks", sampler=sampler, pruner=Coin()
    )
    states = [(each.params["ranks"], each.state) for each in found.trials]
    return {"states": states, "wrong": [each for some in allgather_object(wrong) for each in some]}


def moves(count: int, seed: int) -> dict[str, Any]:
    """Run trials on 1 and on 2 ranks, of which some are killed from outside; write what each rank has reported."""
    own = multiring.rank()
    with Path("pids").open("a") as file:
        file.write(f"{own} {os.getpid()}\n")
    log = Path(f"reported-{own}").open("w", buffering=1)  # noqa: SIM115 -- until the process is killed

    def objective(trial: trials.Trial) -> float:
        random = Random(1000 * seed + trial.number)  # noqa: S311 -- no secret
        for step in range(6):
            time.sleep(0.05 * random.random())
            if multiring.size() > 1:
                allreduce(np.full(100, float(trial.number)), name="gradient")
            trial.report(trial.params["x"] + step, step)
            if trial.group.rank == 0:
                log.write(f"{trial.number} {step}\n")
            if trial.should_prune():
                raise trials.TrialPruned
        return float(trial.params["x"])

    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=3)
    space = {"x": {"low": 0.0, "high": 1.0}, "ranks": [1, 2]}
    found = trials.run(
        objective,
        space,
        trials=count,
        ranks_per_trial="ranks",
        sampler=sampler,
        pruner=pruner,
        storage="study.db",
    )
    total = float(np.asarray(allreduce(np.ones(1), name="after the study", op="sum"))[0])
    result = {"trials": [asdict(each) for each in found.trials], "unsaved": found.unsaved}
    Path(f"result-{own}.json").write_text(json.dumps({**result, "size": multiring.size(), "total": total}))
    return {}


def beside(durations: list[float], places: int) -> dict[str, Any]:
    """Run trials of these durations with ten reports; return when each began and ended, and when the study was called.

    All times are seconds of the wall clock, as another program starts the command.
    """
    del places
    spans: list[tuple[float, float]] = []

    def objective(trial: trials.Trial) -> float:
        began_s = time.time()
        for step in range(10):
            time.sleep(durations[trial.number] / 10)
            trial.report(1 / (step + 1), step)
        spans.append((began_s, time.time()))
        return 0.1

    called_s = time.time()
    trials.run(objective, {"x": {"low": 0.0, "high": 1.0}}, trials=len(durations))
    return {"called_s": called_s, "spans": [each for some in allgather_object(spans) for each in some]}


def copies(size_bytes: int, rounds: int, places: int = 2) -> dict[str, Any]:
    """Run a population of two members, of which one copies the other's model and optimizer after each round."""
    import torch  # noqa: PLC0415 -- only this case needs it

    del places
    torch.set_num_threads(1)
    took_s: list[float] = []

    def objective(member: trials.PopulationMember) -> None:
        side = int((size_bytes / 4 / 3 / 12) ** 0.5)  # 12 layers; Adam keeps two more values for each parameter
        model = torch.nn.Sequential(*[torch.nn.Linear(side, side) for _ in range(12)])
        optimizer = torch.optim.Adam(model.parameters(), lr=member.params["rate"])
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(1 + member.number))
        for number in range(member.rounds):
            optimizer.step()
            if member.number == 1:
                time.sleep(0.5)  # so that the other one waits, and only the copy is measured
            began_s = time.monotonic()
            is_copied = member.exchange(float(member.number), {"model": model, "optimizer": optimizer})
            if is_copied:
                took_s.append(time.monotonic() - began_s)
            sums = [float(each.detach().sum()) for each in model.parameters()]
            sums += [float(each["exp_avg_sq"].sum()) for each in optimizer.state.values()]
            seen[number] = sums, is_copied

    seen: dict[int, tuple[list[float], bool]] = {}
    trials.run_population(objective, {"rate": {"low": 1e-4, "high": 1e-3}}, rounds=rounds, quantile=0.5)
    found = allgather_object((took_s, seen))
    wrong = [number for number in range(rounds - 1) if found[0][1][number][0] != found[1][1][number][0]]
    wrong += [number for number in range(rounds - 1) if not found[1][1][number][1]]
    return {"seconds": found[1][0], "wrong": wrong}


def stored(count: int, url: str) -> dict[str, Any]:
    """Run trials whose study is in a storage; return how often it was reported as lost."""
    lost: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lost.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("multiring").addHandler(handler)

    def objective(trial: trials.Trial) -> float:
        for step in range(5):
            time.sleep(0.3)
            trial.report(trial.params["x"] + step, step)
        return float(trial.params["x"])

    found = trials.run(objective, {"x": {"low": 0.0, "high": 1.0}}, trials=count, storage=url)
    return {"unsaved": found.unsaved, "warnings": sum("the storage takes nothing" in each for each in lost)}


def main() -> None:
    """Run the case of the command line."""
    case, output, numbers = sys.argv[1:]
    multiring.init()
    cases: dict[str, Callable[..., dict[str, Any]]] = {
        "fill": fill,
        "ask": ask,
        "prunes": prunes,
        "moves": moves,
        "beside": beside,
        "copies": copies,
        "stored": stored,
    }
    found = cases[case](*json.loads(numbers))
    if multiring.rank() == 0:
        Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
