"""`multiring run --max-ranks`: newcomers replace lost ranks, and get the ranks' state at a commit.

What the programs end with is compared with the same steps in one process, which has as many ranks at each step.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.elastic_scripts import ends_in
from tests.wire.test_shrinking import FEATURES, trained

from multiring._launch.intake_point import FormationOpening, IntakePoint
from multiring._launch.live_record import read_record
from multiring._runtime.failures.formation_place import intake_proof
from multiring._runtime.failures.launcher_channel import LauncherChannel

PROGRAM = """
import json, os, signal, sys
import numpy as np
import multiring.adapters as ma
from multiring._runtime.job import forming
from multiring._settings import Settings
from multiring.adapters import elastic

number, deaths, most = Settings.from_environment().intake, json.loads(sys.argv[1]), int(sys.argv[2])


def die(where):
    if deaths.get(str(number)) == where:
        os.kill(os.getpid(), signal.SIGKILL)


def joining(*words, join=forming.join_job):
    die("forms")
    return join(*words)


forming.join_job = joining
die("starts")
samples = np.random.default_rng(0).standard_normal((100, {features}))
wanted = samples @ np.arange({features})
firsts = ma.ProcessSet([0, 2])
ma.init(process_sets=[firsts])
assert number < 3 or ma.size() == len(ma.allgather_object(number)) == 1  # a newcomer is alone until `train`
state = elastic.ObjectState(
    bcast_object=ma.broadcast_object, get_rank=ma.rank, gather_object=ma.allgather_object,
    step=0, weights=np.zeros({features}), sizes=[],
)
committed = 0


@elastic.run
def train(state):
    global committed
    assert state.step >= committed, f"step {{committed}} was committed, and is lost"
    while state.sizes.count(most) < 5:
        at = (7 * state.step + ma.rank()) % len(samples)
        gradient = (samples[at] @ state.weights - wanted[at]) * samples[at]
        die("is in" if number > 2 else f"begins step {{state.step}}")
        if firsts.included():
            assert np.asarray(ma.allreduce(np.ones(1), op="sum", process_set=firsts))[0] == firsts.size()
        state.weights = state.weights - 0.01 * np.asarray(ma.allreduce(gradient))
        state.sizes = [*state.sizes, ma.size()]
        state.step += 1
        state.commit()
        committed = state.step


train(state)
print("END", json.dumps([number, ma.rank(), firsts.ranks, state.sizes, state.weights.tolist()]))
ma.shutdown()
"""
DEATHS = {
    "rank 0": ({"0": "begins step 3"}, [1, 2, 3, 4], [1]),
    "newcomers": ({"3": "starts", "4": "is in", "2": "begins step 2"}, [0, 1, 5, 6], [0]),
    "while forming": ({"1": "forms", "3": "forms"}, [0, 2, 4, 5], [0, 1]),
}


def run(folder: Path, program: str, *words: str, ranks: int, most: int, options: Sequence[str] = ()) -> Any:
    script = folder / "program.py"
    script.write_text(program)
    launch = ["-m", "multiring", "run", "-n", str(ranks), "--min-ranks", "1", "--max-ranks", str(most), *options]
    return subprocess.run(
        [sys.executable, *launch, str(script), *words],
        capture_output=True, text=True, check=False, timeout=500, cwd=folder,
    )  # fmt: skip


@pytest.mark.parametrize("case", DEATHS)
def test_newcomers_replace_lost_ranks(tmp_path: Path, case: str) -> None:
    deaths, left, firsts = DEATHS[case]
    program = PROGRAM.format(features=FEATURES)
    record = tmp_path / "record.jsonl"
    done = run(tmp_path, program, json.dumps(deaths), "4", ranks=3, most=4, options=["--record", str(record)])
    assert done.returncode == 0, done.stderr
    hosts = {each["rank"]: each["host"] for each in read_record(record.read_bytes()) if each["kind"] == "newcomer"}
    assert hosts == dict.fromkeys(range(3, left[-1] + 1), os.uname().nodename)
    ends = sorted(ends_in(done.stdout))
    assert [end[0] for end in ends] == left, done.stderr
    assert sorted(end[1] for end in ends) == [0, 1, 2, 3]
    for _, _, ranks, sizes, weights in ends:
        assert sizes == ends[0][3]
        assert sizes[-5:] == [4] * 5
        assert ranks == firsts  # the newcomers are in no set but that of all ranks
        assert np.abs(np.array(weights) - trained(sizes)).max() < 1e-10


LIMITED = """
import os, signal, time
import multiring.adapters as ma
from multiring._settings import Settings
from multiring.adapters import elastic

number = Settings.from_environment().intake
ma.init()
state = elastic.ObjectState(
    bcast_object=ma.broadcast_object, get_rank=ma.rank, gather_object=ma.allgather_object,
    step=0, replaced=False, after=0,
)


@elastic.run
def train(state):
    while state.after < 20:
        if (number == 1 and state.step == 3) or (number == 2 and state.replaced):
            os.kill(os.getpid(), signal.SIGKILL)
        numbers = ma.allgather_object(number)
        state.replaced = state.replaced or 3 in numbers
        state.after += 2 not in numbers
        time.sleep(0.05)  # longer in all than a newcomer needs, if one were started
        state.step += 1
        state.commit()


train(state)
print("END", number)
"""


def test_lost_ranks_are_replaced_up_to_a_limit(tmp_path: Path) -> None:
    done = run(tmp_path, LIMITED, ranks=3, most=3, options=["--reset-limit", "1"])
    assert done.returncode == 0, done.stderr
    assert {line.partition("END ")[2] for line in done.stdout.splitlines() if "END" in line} == {"0", "3"}
    assert "rank 3 is started as a newcomer" in done.stderr
    assert "the limit of --reset-limit is reached: no more newcomers are started" in done.stderr
    assert "rank 4" not in done.stderr


FAILING = """
import os, signal
from pathlib import Path
import multiring.adapters as ma
from multiring._settings import Settings
from multiring.adapters import elastic

number = Settings.from_environment().intake
ma.init()
state = elastic.ObjectState(
    bcast_object=ma.broadcast_object, get_rank=ma.rank, gather_object=ma.allgather_object, step=0
)


def have_failed():
    pids = [path.name.partition("-")[2] for path in Path().glob("failed-*")]
    return len(pids) == 3 and not any((Path("/proc") / pid).exists() for pid in pids)  # the launcher has seen it


@elastic.run
def train(state):
    while not ma.broadcast_object(have_failed()):
        if number >= 2:
            Path(f"failed-{os.getpid()}").touch()
            # Equal errors at one commit would end the job; whether rank 0 commits between them is a matter of time.
            raise ValueError(f"a bad sample of {number}")
        if number == 1 and state.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        state.step += 1
        state.commit()


train(state)
print("END", number)
"""


def test_newcomers_that_fail_at_once_are_not_replaced_for_ever(tmp_path: Path) -> None:
    done = run(tmp_path, FAILING, ranks=2, most=2)
    assert done.returncode == 0, done.stderr
    assert "END 0" in done.stdout
    assert done.stderr.count("is started as a newcomer") == 3, done.stderr
    assert "3 newcomers in a row have ended before their first commit: no more are started" in done.stderr


def test_who_is_refused(tmp_path: Path) -> None:
    for words, text in (
        (["-n", "2", "--max-ranks", "3"], "--max-ranks 3: want --min-ranks, too"),
        (["-n", "3", "--min-ranks", "1", "--max-ranks", "2"], "--max-ranks 2 of 3 ranks: want at least 3"),
        (
            ["-n", "3", "--min-ranks", "1", "--max-ranks", "4", "--reset-limit", "-1"],
            "--reset-limit -1: want a whole number, 0 to",
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "multiring", "run", *words, "true"],
            capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert text in done.stderr, done.stderr


def test_a_number_stands_for_one_process(tmp_path: Path) -> None:
    address = f"\0{tmp_path}"
    point = IntakePoint(address, "a job", [("secret", "a job")], 2, FormationOpening(lambda *_: None), lambda _: None)
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            with selectors.PollSelector() as poll:
                point.watch(poll)
                for key, _ in poll.select(0.05):
                    key.data()

    server = threading.Thread(target=serve)
    server.start()
    try:
        wrong, right = (intake_proof(secret, "a job", 0) for secret in (b"another", b"secret"))
        with pytest.raises(ConnectionError, match="refused"):
            LauncherChannel(address, 0, wrong)
        with pytest.raises(ConnectionError, match="refused"):
            LauncherChannel(address, 1, intake_proof(b"secret", "a job", 1))
        with contextlib.closing(LauncherChannel(address, 0, right)):
            with pytest.raises(ConnectionError, match="refused"):
                LauncherChannel(address, 0, right)
            assert point.is_complete
    finally:
        is_over.set()
        server.join(240)
        point.close()
