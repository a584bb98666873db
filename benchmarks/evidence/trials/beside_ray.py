"""Compare trials and copies between members of a population with Ray Tune's on the same eight places, by turns.

    .ci/with-clusters python benchmarks/evidence/trials/beside_ray.py [--only trials,copies] [--divide N]

The first run of `.ci/with-clusters` fetches Ray. A round starts each side once, as its user would: multiring by
`multiring run`, Ray by a script that calls `ray.init`. The side that begins changes from round to round.

`trials`: 40 trials whose durations differ by 10:1, slept through in ten parts with a report after each, eight at a
time. Both sides get the same durations in the same order. Ray reuses its actors and writes no logs, which makes it
faster than its defaults do. `copies`: a model and its optimizer of 100 MB that one of two members copies from the other
after each round. Ray's members are class trainables that keep their actors, with checkpoints in shared memory.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # lets this script import from the repository root

from benchmarks.evidence.support.claims import Claim, report

from multiring._settings import inherited_environment

HERE = Path(__file__).resolve().parent
PLACES, TRIALS, LONGEST_S, ROUNDS = 8, 40, 10.0, 5
SIZE_BYTES, COPIES = 100_000_000, 8
# Ray then writes no files for TensorBoard, and no results as CSV and JSON beside the study; it may start slowly; and it
# leaves no token in the user's home, with which each later cluster of this host would ask for one.
RAY_VARIABLES = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_AUTH_MODE": "disabled",
}
SIDES = ("multiring", "Ray Tune")
_MOST_S = 600.0


def one(side: str, case: str, places: int, *numbers: Any) -> Any:
    """Run one side in a process of its own; return its figures, and when it was started."""
    program = str(HERE / ("rank.py" if side == "multiring" else "ray_side.py"))
    start = [sys.executable, "-m", "multiring", "run", "-n", str(places)] if side == "multiring" else [sys.executable]
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "output.json"
        words = [*start, program, case, str(output), json.dumps([*numbers, places])]
        began_s = time.time()
        environment = inherited_environment() | RAY_VARIABLES
        subprocess.run(  # noqa: S603 -- our own program
            words, check=True, timeout=_MOST_S, stdout=sys.stderr, env=environment
        )
        return {"began_s": began_s, **json.loads(output.read_text())}


def by_turns(case: str, places: int, rounds: int, *numbers: Any) -> dict[str, list[Any]]:
    """Run both sides in each round; return their figures by side."""
    found: dict[str, list[Any]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            found[side].append(one(side, case, places, *numbers))
            print(f"# round {number}, {side}: {json.dumps(found[side][-1])[:300]}", file=sys.stderr)
    return found


def trials(count: int, rounds: int) -> Iterator[Claim]:
    """Compare the ranks' time in training, and the time of the first step."""
    chance = Random(1)  # noqa: S311 -- no secret
    durations = [LONGEST_S * 10 ** -chance.random() for _ in range(count)]
    found = by_turns("beside", PLACES, rounds, durations)
    work_s = sum(durations)
    shares: dict[str, list[float]] = {}  # of the time since the command was given
    inner: dict[str, list[float]] = {}  # of the time since the first trial began
    firsts: dict[str, list[float]] = {}  # from the command to the first step
    alls: dict[str, list[float]] = {}  # from the command until all places train
    calls: dict[str, list[float]] = {}  # from the call of the study, in a job that stands, to the first step
    for side, several in found.items():
        for each in several:
            begins = sorted(began_s for began_s, _ in each["spans"])
            end_s = max(ended_s for _, ended_s in each["spans"])
            if len(each["spans"]) != count:
                raise AssertionError(f"{side} ran {len(each['spans'])} of {count} trials")
            shares.setdefault(side, []).append(work_s / PLACES / (end_s - each["began_s"]))
            inner.setdefault(side, []).append(work_s / PLACES / (end_s - begins[0]))
            firsts.setdefault(side, []).append(begins[0] - each["began_s"])
            alls.setdefault(side, []).append(begins[PLACES - 1] - each["began_s"])
            calls.setdefault(side, []).append(begins[0] - each["called_s"])
    ours, peer = SIDES
    setting = f"{count} trials of durations 10:1, {PLACES} at a time, ten reports each, {rounds} rounds by turns"
    yield Claim(
        text=f"{setting}: no smaller share of all rank-seconds in training than Ray Tune's, from the command to the "
        "last trial's end",
        figure=f"{spread(shares, '.1%')}; from the first trial's begin {spread(inner, '.1%')}; {state()}",
        holds=statistics.median(shares[ours]) >= statistics.median(shares[peer])
        and statistics.median(inner[ours]) >= statistics.median(inner[peer]),
    )
    yield Claim(
        text=f"{setting}: no later first step than Ray Tune's, from the command, and from the call in a job that "
        "stands",
        figure=f"from the command {spread(firsts, '.2f', ' s')}; until all {PLACES} train {spread(alls, '.2f', ' s')}; "
        f"from the call {spread(calls, '.3f', ' s')}; {state()}",
        holds=statistics.median(firsts[ours]) <= statistics.median(firsts[peer])
        and statistics.median(calls[ours]) <= statistics.median(calls[peer]),
    )


def copies(count: int, rounds: int) -> Iterator[Claim]:
    """Compare the time for which a member that copies another one does not train."""
    found = by_turns("copies", 2, rounds, SIZE_BYTES, count)
    seconds = {side: [one_s for each in several for one_s in each["seconds"]] for side, several in found.items()}
    wrong = {side: sum(len(each["wrong"]) for each in several) for side, several in found.items()}
    ours, peer = SIDES
    yield Claim(
        text="a model and its optimizer of 100 MB that a member of a population copies from another one on one host: "
        "the member stands still for 0.5 s at most (aim 0.2 s), and for no longer than Ray Tune's",
        figure=f"{spread(seconds, '.3f', ' s')}, of {len(seconds[ours])} and {len(seconds[peer])} copies in {rounds} "
        f"rounds by turns; {wrong[ours]} and {wrong[peer]} had other values than the copied member's; {state()}",
        holds=statistics.median(seconds[ours]) <= min(0.5, statistics.median(seconds[peer])) and not wrong[ours],
    )


def spread(values: dict[str, list[float]], form: str, unit: str = "") -> str:
    """Return median and range of each side."""
    shown = []
    for side, several in values.items():
        median, least, most = statistics.median(several), min(several), max(several)
        shown.append(f"{side} {median:{form}}{unit} ({least:{form}} to {most:{form}})")
    return ", ".join(shown)


def state() -> str:
    """Return the machine's load, and the versions of both sides."""
    return f"load {os.getloadavg()[0]:.0f}, Ray {version('ray')}, Optuna {version('optuna')}"


CLAIMS = {
    "trials": lambda share: trials(max(2 * PLACES, TRIALS // share), max(2, ROUNDS // share)),
    "copies": lambda share: copies(max(4, COPIES // share), max(2, ROUNDS // share)),
}

if __name__ == "__main__":
    try:
        version("ray")
    except PackageNotFoundError:
        sys.exit(
            "beside_ray: Ray is not installed; give the command with .ci/with-clusters before it, which fetches Ray"
        )
    sys.exit(report(CLAIMS, __doc__ or ""))
