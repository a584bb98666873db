"""`multiring run --min-ranks`: the ranks go on in their processes without those that are lost.

The programs train with NumPy. What they end with is compared with the same steps in one process, which has as many
ranks at each step as the job had.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.elastic_scripts import ends_in

STEPS = 14
FEATURES = 10
PROGRAM = """
import json, logging, os, signal, sys, time
from pathlib import Path
import numpy as np
import multiring.adapters as ma
from multiring.adapters import elastic

samples = np.random.default_rng(0).standard_normal((100, {features}))
wanted = samples @ np.arange({features})
evens = ma.ProcessSet([0, 2, 4])
ma.init(process_sets=[evens])
born, deaths = ma.rank(), json.loads(sys.argv[1])


def die(where):
    if deaths.get(str(born)) == where:
        os.kill(os.getpid(), signal.SIGSTOP if where.startswith("freezes") else signal.SIGKILL)


class State(elastic.ObjectState):
    def save(self):
        super().save()
        if deaths.get(str(born)) == f"commits step {{self.step}}":
            while len(list(Path().glob(f"after-{{self.step}}-*"))) < ma.size():
                time.sleep(0.01)  # until the others have what they need of this rank for the step before
        die(f"commits step {{self.step}}")


class Agreeing(logging.Handler):
    def emit(self, record):
        if "resuming" in record.getMessage():
            die(f"agrees after step {{state.step}}")


logging.getLogger("multiring").addHandler(Agreeing())
state = State(
    bcast_object=ma.broadcast_object, get_rank=ma.rank, gather_object=ma.allgather_object,
    step=0, weights=np.zeros({features}), sizes=[],
)


@elastic.run
def train(state):
    assert state.step >= committed[0], f"step {{committed[0]}} was committed, and is lost"
    while state.step < {steps}:
        at = (7 * state.step + ma.rank()) % len(samples)
        gradient = (samples[at] @ state.weights - wanted[at]) * samples[at]
        die(f"begins step {{state.step}}")
        die(f"freezes in step {{state.step}}")
        if evens.included():
            assert np.asarray(ma.allreduce(np.ones(1), op="sum", process_set=evens))[0] == evens.size()
        state.weights = state.weights - 0.01 * np.asarray(ma.allreduce(gradient))
        state.sizes = [*state.sizes, ma.size()]
        state.step += 1
        Path(f"after-{{state.step}}-{{born}}").touch()
        state.commit()
        committed[0] = state.step


committed = [0]
train(state)
print("END", json.dumps([born, ma.rank(), evens.ranks, state.sizes, state.weights.tolist()]))
ma.shutdown()
"""


def run(folder: Path, program: str, *words: str, ranks: int, least: int, **variables: str) -> Any:
    script = folder / "program.py"
    script.write_text(program)
    settings = [word for name, text in variables.items() for word in ("--env", f"{name}={text}")]
    launch = [sys.executable, "-m", "multiring", "run", "-n", str(ranks), "--min-ranks", str(least), *settings]
    return subprocess.run(
        [*launch, str(script), *words], capture_output=True, text=True, check=False, timeout=300, cwd=folder
    )


def trained(sizes: list[int]) -> np.ndarray[Any, Any]:
    """Return the weights after steps of so many ranks."""
    samples = np.random.default_rng(0).standard_normal((100, FEATURES))
    wanted, weights = samples @ np.arange(FEATURES), np.zeros(FEATURES)
    for step, size in enumerate(sizes):
        rows = samples[[(7 * step + rank) % 100 for rank in range(size)]]
        goals = wanted[[(7 * step + rank) % 100 for rank in range(size)]]
        weights = weights - 0.01 * ((rows @ weights - goals) @ rows) / size
    return weights


DEATHS = [
    ({"0": "begins step 3", "1": "begins step 3"}, {3: 4}, []),
    # Rank 1 dies as it saves step 6. Rank 2 dies when it hears of it.
    ({"0": "begins step 2", "1": "commits step 6", "2": "agrees after step 6"}, {2: 5, 6: 3}, []),
    ({"5": "freezes in step 4"}, {4: 5}, ["rank 5 (pid"]),
]


@pytest.mark.parametrize("engine", ["auto", "tcp"])
@pytest.mark.parametrize(("deaths", "changes", "says"), DEATHS, ids=["two at once", "while agreeing", "frozen"])
def test_the_others_go_on(
    tmp_path: Path, engine: str, deaths: dict[str, str], changes: dict[int, int], says: list[str]
) -> None:
    variables = {"MULTIRING_ENGINE": engine}
    if says:  # only the time-out finds the frozen one; a busy machine may hold a living one as long
        variables |= {"MULTIRING_STALL_TIMEOUT_S": "8", "MULTIRING_STALL_WARN_S": "4"}
    program = PROGRAM.format(features=FEATURES, steps=STEPS)
    done = run(tmp_path, program, json.dumps(deaths), ranks=6, least=2, **variables)
    assert done.returncode == 0, done.stderr
    ends = sorted(ends_in(done.stdout))
    left = [rank for rank in range(6) if str(rank) not in deaths]
    assert [end[:2] for end in ends] == [[born, rank] for rank, born in enumerate(left)]
    sizes, size = [], 6
    for step in range(STEPS):
        size = changes.get(step, size)
        sizes.append(size)
    for born, _, evens, found, weights in ends:
        assert found == sizes, (born, found)
        assert evens == [rank for rank, born in enumerate(left) if born in (0, 2, 4)]
        assert np.abs(np.array(weights) - trained(sizes)).max() < 1e-10
    for text in (*says, *[f"rank {rank} was lost: killed by SIGKILL" for rank in deaths]):
        assert text in done.stderr, done.stderr
    if says:
        assert "has not answered the others, which went on without it: it is killed" in done.stderr


JOIN = "import os, signal, sys\nimport multiring\ngroup = multiring.init()\ngroup.barrier()\nrank = group.rank\n"
ELASTIC = JOIN + (
    "import multiring.adapters as ma\nfrom multiring.adapters import elastic\n"
    "state = elastic.ObjectState(\n"
    "    bcast_object=ma.broadcast_object, get_rank=ma.rank, gather_object=ma.allgather_object, step=0\n)\n"
    "@elastic.run\ndef train(state):\n    while state.step < 10:\n        step(state)\n"
    "        ma.allgather_object(rank)\n        state.step += 1\n        state.commit()\n"
)
ENDS = {
    "too few are left": (
        ELASTIC
        + "def step(state):\n    if rank == 1 and state.step == 3:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n    train(state)\nexcept multiring.errors.StateError as error:\n"
        "    print(f'saves step {state.step}: {error}')\n    sys.exit(3)\n",
        2,
        2,
        75,
        ["fewer than --min-ranks 2", "exit code 75"],
        ["saves step 3: ", "--min-ranks 2", "ave the state, and start"],
    ),
    "the program does not go on": (
        JOIN + "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ngroup.barrier()\n",
        2,
        1,
        137,
        ["rank 1 (pid", "failed: killed by SIGKILL", "rank 0 failed too: exit code 1"],
        [],
    ),
    "the same error twice": (
        ELASTIC + "def step(state):\n    if rank < 2 and state.step == 2:\n        raise ValueError('a bad sample')\n"
        "train(state)\n",
        3,
        1,
        1,
        ["ended with the same error, so the program is wrong", "ValueError: a bad sample"],
        [],
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_what_ends_the_job(tmp_path: Path, case: str) -> None:
    program, ranks, least, code, says, prints = ENDS[case]
    done = run(tmp_path, program, ranks=ranks, least=least)
    assert done.returncode == code, done.stderr
    for text in says:
        assert text in done.stderr, done.stderr
    for text in prints:
        assert text in done.stdout, done.stdout


HOLDS = (
    "import ctypes, hashlib, threading\n"
    + ELASTIC
    + """
def step(state):
    if rank == 0 and state.step == 3 and not holds:
        holds.append(True)
        words = "sha256", b"", b"", 10**9  # computes without Python's global lock until the process ends
        threading.Thread(target=hashlib.pbkdf2_hmac, args=words, daemon=True).start()
        ctypes.PyDLL(None).sleep(25)  # with the lock


holds = []
train(state)
print("END", rank, ma.size())
"""
)


def test_who_computes_with_the_global_lock_stays(tmp_path: Path) -> None:
    done = run(tmp_path, HOLDS, ranks=3, least=1, MULTIRING_STALL_TIMEOUT_S="3", MULTIRING_STALL_WARN_S="1")
    assert done.returncode == 0, done.stderr
    assert "resuming from the last commit" in done.stderr, done.stderr
    ends = sorted(line.partition("END ")[2] for line in done.stdout.splitlines() if "END " in line)
    assert ends == ["0 3", "1 3", "2 3"], done.stderr


def test_where_it_is_refused(tmp_path: Path) -> None:
    for words, text in (
        (["-n", "2", "--min-ranks", "3"], "--min-ranks 3 of 2 ranks: want at most 2"),
        (
            ["-n", "2", "--min-ranks", "1", "--timeline", "t.json"],
            "a timeline of a job that goes on without lost ranks",
        ),
        (["--hosts", "a:1,b:1", "--launcher", "mpiexec", "--min-ranks", "1"], "--min-ranks 1 with --launcher mpiexec"),
        (["--hosts", "a:1,b:1", "--min-ranks", "3"], "--min-ranks 3 of 2 ranks: want at most 2"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "multiring", "run", *words, "true"],
            capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert text in done.stderr, done.stderr


LEAVING = {
    "rank 0": ({"0": 3}, []),
    "two at once": ({"1": 4, "2": 4}, []),
    "one is replaced": ({"2": 3}, ["--max-ranks", "4"]),
}


@pytest.mark.parametrize("case", LEAVING)
def test_sigterm_to_a_rank_loses_no_step(tmp_path: Path, case: str) -> None:
    leaves, words = LEAVING[case]
    program = PROGRAM.format(features=FEATURES, steps=STEPS).replace("[0, 2, 4]", "[0, 2]")
    program = program.replace(
        'die(f"begins step {state.step}")',
        "if json.loads(sys.argv[2]).get(str(born)) == state.step and ma.size() == 4:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)",
    )
    script = tmp_path / "program.py"
    script.write_text(program)
    launch = ["-m", "multiring", "run", "-n", "4", "--min-ranks", "2", *words, str(script), "{}", json.dumps(leaves)]
    done = subprocess.run(
        [sys.executable, *launch], capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "resuming from the last commit" not in done.stderr, done.stderr
    for rank in leaves:
        assert f"rank {rank} has left, because it got SIGTERM" in done.stderr, done.stderr
    ends = ends_in(done.stdout)
    at = next(iter(leaves.values())) + 1
    for born, _, _, sizes, weights in ends:
        assert sizes[:at] == [4] * at, (born, sizes)
        assert sizes[at] == 4 - len(leaves)
        assert np.abs(np.array(weights) - trained(sizes)).max() < 1e-10
    assert len(ends) >= 4 - len(leaves), done.stderr


def test_sigterm_to_the_launcher_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    step = "def step(state):\n    state.step = 0\n    print('steps', flush=True)\n    time.sleep(0.1)\n"
    script.write_text(f"{ELASTIC}import time\n{step}train(state)\n")
    launch = [sys.executable, "-m", "multiring", "run", "-n", "2", "--min-ranks", "1", str(script)]
    with subprocess.Popen(launch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as job:
        assert job.stdout is not None
        assert "steps" in job.stdout.readline()
        job.terminate()
        _, told = job.communicate(timeout=240)
    assert job.returncode == 128 + signal.SIGTERM, told
    assert "has left" not in told
    assert "which did not stop" not in told
