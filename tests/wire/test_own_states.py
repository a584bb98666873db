"""States of which each rank has its own: no lost rank loses any, because a peer has a copy.

The programs train with momentum that is divided among the ranks, in float64. What they end with is compared with the
same steps in one process, which has as many ranks at each step.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.elastic_scripts import ends_in

FEATURES, STEPS = 12, 12
PROGRAM = """
import json, os, random, signal, sys, time
from pathlib import Path
import numpy as np
import multiring.adapters as ma
from multiring._frontend.elastic.peer_copies import PeerCopies
from multiring._settings import Settings
from multiring.adapters import elastic
from multiring.errors import StateError

samples = np.random.default_rng(0).standard_normal((100, {features}))
wanted = samples @ np.arange({features})
most, settings = int(sys.argv[3]), Settings.from_environment()
born, acts = int(settings.intake or settings.rank or 0), json.loads(sys.argv[1])
ma.init()
random.seed(born)


copies = []


def wait_for_copies():
    # A rank that dies before its copy has come to its holder takes its last commit with it.
    for each in copies:
        each.finish()
    ma.allreduce(np.zeros(1))


def act(where):
    number = acts.get(f"{{born}} {{where}}")
    if number is None:
        return
    others = [each for each in acts if each.endswith(f" {{where}}") and int(each.split()[0]) != born]
    for each in others:  # at the same moment: a rank that is killed later may have given its state to another holder
        other, place = int(each.split()[0]), Path(f"pid-{{born}}-{{where}}")
        place.write_text(str(os.getpid()))
        if born > other:
            time.sleep(600)
        while not (found := Path(f"pid-{{other}}-{{where}}")).exists() or not found.read_text():
            time.sleep(0.01)
        os.kill(int(found.read_text()), number)
    os.kill(os.getpid(), number)


def part(rank, size):
    return slice(rank * {features} // size, (rank + 1) * {features} // size)


def divided_anew(values, change):
    assert sorted(values) == list(range(change.former_size))
    return np.concatenate([values[rank] for rank in sorted(values)])[part(change.rank, change.size)].copy()


def keep(self, *, keep=PeerCopies.keep, **words):
    copies[:] = [self]
    act(f"keeps {{state.step}}")
    keep(self, **words)
    act(f"sends {{state.step}}")


PeerCopies.keep = keep
state = elastic.ObjectState(
    bcast_object=ma.broadcast_object, get_rank=ma.rank, gather_object=ma.allgather_object,
    step=0, weights=np.zeros({features}), sizes=[], drawn=elastic.OwnValue([]), randomness=elastic.Randomness(),
    moments=elastic.OwnValue(np.zeros({features})[part(ma.rank(), ma.size())], divided_anew),
    weight=elastic.OwnValue(np.zeros(int(sys.argv[2]))),
)


@elastic.run
def train(state):
    while state.step < {steps} or most and state.sizes[-3:] != [most] * 3:
        act(f"begins {{state.step}}")
        if any(where.endswith(f" copied {{state.step}}") for where in acts):
            wait_for_copies()
            act(f"copied {{state.step}}")
        at = (7 * state.step + ma.rank()) % 100
        gradient = np.asarray(ma.allreduce((samples[at] @ state.weights - wanted[at]) * samples[at]))
        state.moments = 0.9 * state.moments + gradient[part(ma.rank(), ma.size())]
        state.drawn = [*state.drawn, random.random()]
        state.weights = state.weights - 0.01 * np.concatenate(ma.allgather_object(state.moments))
        state.sizes = [*state.sizes, ma.size()]
        state.step += 1
        state.commit()


try:
    train(state)
except StateError as error:
    print("ERROR", state.step, error, flush=True)
    sys.exit(3)
print("END", json.dumps([born, state.sizes, state.weights.tolist(), state.drawn]), flush=True)
ma.shutdown()
"""
KILL, TERM = 9, 15


def run(folder: Path, acts: dict[str, int], *words: str, floats: int = 1, most: int = 0) -> Any:
    script = folder / "program.py"
    script.write_text(PROGRAM.format(features=FEATURES, steps=STEPS))
    launch = ["-m", "multiring", "run", *words, str(script), json.dumps(acts), str(floats), str(most)]
    return subprocess.run(
        [sys.executable, *launch], capture_output=True, text=True, check=False, timeout=300, cwd=folder
    )


def trained(sizes: list[int]) -> np.ndarray[Any, Any]:
    """Return the weights after steps of so many ranks."""
    samples = np.random.default_rng(0).standard_normal((100, FEATURES))
    wanted, weights, moments = samples @ np.arange(FEATURES), np.zeros(FEATURES), np.zeros(FEATURES)
    for step, size in enumerate(sizes):
        rows = [(7 * step + rank) % 100 for rank in range(size)]
        moments = 0.9 * moments + (samples[rows] @ weights - wanted[rows]) @ samples[rows] / size
        weights = weights - 0.01 * moments
    return weights


def drawn(born: int, count: int) -> list[float]:
    """Return the numbers that a rank draws which no failure has disturbed."""
    import random  # noqa: PLC0415

    generator = random.Random(born)  # noqa: S311 -- no secret
    return [generator.random() for _ in range(count)]


CASES: dict[str, tuple[dict[str, int], list[int], int]] = {
    # acts, the numbers of ranks of the first steps, and the length of each rank's own state that only weigh
    "one after the other": ({"0 copied 3": KILL, "2 copied 6": KILL}, [3] * 3 + [2] * 3 + [1] * 6, 1),
    "before a copy is sent": ({"1 keeps 5": KILL}, [3] * 4 + [2] * 8, 1),
    "while a copy is sent": ({"1 sends 5": KILL}, [3] * 4, 1_000_000),
    "hands over and leaves": ({"0 begins 4": TERM, "1 begins 7": TERM}, [3] * 5 + [2] * 3 + [1] * 4, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_lost_rank_loses_nothing(tmp_path: Path, case: str) -> None:
    acts, first, floats = CASES[case]
    done = run(tmp_path, acts, "-n", "3", "--min-ranks", "1", floats=floats)
    assert done.returncode == 0, done.stderr
    ends = ends_in(done.stdout)
    assert len(ends) == 3 - len(acts), done.stderr
    for born, sizes, weights, numbers in ends:
        assert sizes[: len(first)] == first
        assert np.abs(np.array(weights) - trained(sizes)).max() < 1e-10
        assert numbers == drawn(born, len(sizes))  # steps that were done twice have the same random numbers


def test_newcomers_get_their_part(tmp_path: Path) -> None:
    acts = {"1 begins 3": KILL, "0 begins 5": TERM}
    done = run(tmp_path, acts, "-n", "3", "--min-ranks", "1", "--max-ranks", "3", most=3)
    assert done.returncode == 0, done.stderr
    ends = ends_in(done.stdout)
    assert sorted(len(numbers) == len(sizes) for _, sizes, _, numbers in ends) == [False, False, True]
    for _, sizes, weights, _ in ends:
        assert sizes == ends[0][1]
        assert sizes.count(3) >= 3
        assert 2 in sizes
        assert np.abs(np.array(weights) - trained(sizes)).max() < 1e-10


def test_two_that_had_each_others_copy_are_told(tmp_path: Path) -> None:
    done = run(tmp_path, {"1 begins 3": KILL, "2 begins 3": KILL}, "-n", "4", "--min-ranks", "1")
    errors = {line.partition("ERROR ")[2] for line in done.stdout.splitlines() if "ERROR " in line}
    assert len(errors) == 1, done.stderr
    [error] = errors
    assert error.startswith("3 elastic.run: the own states of rank 1 (copy on rank 2) are lost")
    assert "The job has saved no checkpoint with `save`" in error
    assert sum("ERROR " in line for line in done.stdout.splitlines()) == 2
    assert done.returncode != 0


SHARES = """
import time
import numpy as np
import multiring.adapters as ma
from multiring.adapters import elastic

ma.init()
samples = np.random.default_rng(0).standard_normal((31, 5))
state = elastic.ObjectState(
    bcast_object=ma.broadcast_object, get_rank=ma.rank, gather_object=ma.allgather_object,
    weights=np.zeros(5), shares=elastic.SpeedShares(),
)
for step in range(4):
    part, weight = state.shares.part(31), state.shares.weight(31)
    with state.shares.computing(31):
        mine = samples[part.start : part.stop]
        gradient = ((mine @ state.weights - 1)[:, None] * mine).mean(axis=0)
        time.sleep(len(part) * (0.004 if ma.rank() else 0.04))
    state.weights = state.weights - 0.1 * np.asarray(ma.allreduce(gradient * weight))
    state.commit()
truth = np.zeros(5)
for step in range(4):
    truth = truth - 0.1 * ((samples @ truth - 1)[:, None] * samples).mean(axis=0)
assert np.abs(truth - state.weights).max() < 1e-12
counts = ma.allgather_object([len(each) for each in state.shares.parts(31)])
assert counts[0] == counts[1] and sum(counts[0]) == 31, counts
assert counts[0][1] > counts[0][0], counts
ma.shutdown()
"""


def test_shares_follow_speeds_and_change_no_sum(tmp_path: Path) -> None:
    script = tmp_path / "shares.py"
    script.write_text(SHARES)
    launch = [sys.executable, "-m", "multiring", "run", "-n", "2", str(script)]
    done = subprocess.run(launch, capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


STOPPED = """
import multiring.adapters as ma
from multiring.adapters import elastic

ma.init()
parts = {}


class State(elastic.ObjectState):
    def _own_parts(self):
        return parts


state = State(bcast_object=ma.broadcast_object, get_rank=ma.rank, gather_object=ma.allgather_object, step=0)
parts["randomness"] = elastic.Randomness()
state.commit()
assert state._own.kept().own
parts.clear()  # as when a job shrinks to one rank, which compresses nothing
state.commit()
parts["randomness"] = elastic.Randomness()
assert not state._own.kept().own, "an old commit would come back"
assert not state.must_sync(wanted=False)
state.commit()
assert sorted(state._own.kept().own) == [1]
"""


def test_a_commit_without_own_parts_ends_those_before(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED], capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
