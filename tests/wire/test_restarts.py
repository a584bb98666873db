"""`multiring run --max-restarts`: killed jobs start again, and their result equals that of an undisturbed job."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = '''
import os, signal, sys
from pathlib import Path
import numpy as np
from multiring._frontend import lifecycle
from multiring._frontend.checkpoint import files, saving
from multiring._gradients.buckets import GradientSpec
from multiring._gradients.options import GradientOptions
from multiring._gradients.reducer import GradientReducer
from multiring._frontend.process_sets import global_process_set, members_of

folder, kills = Path(sys.argv[1]), sys.argv[2:]
lifecycle.init()
rank, numpy = lifecycle.rank(), saving.Framework()


def die(where):
    """Kill this rank if this start of the job must end here."""
    starts = len(list(folder.glob("start-*")))
    if starts <= len(kills) and kills[starts - 1] == f"{rank}:{where}":
        os.kill(os.getpid(), signal.SIGKILL)


if rank == 0:
    (folder / f"start-{len(list(folder.glob('start-*')))}").touch()
members_of(global_process_set).group.barrier()
die("early")
np.random.seed(rank)
weights, step = np.zeros(1000), 0
if saving.is_saved(folder / "last"):
    found = saving.load(folder / "last", numpy, {})
    weights, step = found["weights"], found["step"]
reducer = GradientReducer(
    [("weights", GradientSpec.row_major("float64", (1000,)))],
    members_of(global_process_set).group,
    GradientOptions(op="average"),
)
write = files._write


def write_or_die(file, data):
    if step == 4 and file.name.endswith("safetensors"):
        write(file, data[:100])
        die("saving")
    write(file, data)


files._write = write_or_die
while step < 10:
    (gradient,) = reducer.reduce([np.random.randn(1000) + weights])
    weights = weights - 0.1 * gradient
    step += 1
    die(f"step{step}")
    if step % 2 == 0:
        saving.save(folder / "last", numpy, {"weights": weights, "step": step})
if rank == 0:
    np.save(folder / "end.npy", weights)
'''


def run(folder: Path, *kills: str, restarts: int = 3, more: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "multiring", "run", "-n", "2", "--max-restarts", str(restarts), *more]
    return subprocess.run(
        [*command, str(script), str(folder), *kills], capture_output=True, text=True, timeout=240, check=False
    )


def test_what_ranks_end_with_is_what_they_would_have(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain")
    assert plain.returncode == 0, plain.stderr
    assert "start" not in plain.stderr
    # Kills before the first checkpoint, inside a save of another rank, and between two checkpoints.
    logs = tmp_path / "logs"
    killed = run(tmp_path / "killed", "1:step1", "0:saving", "1:step7", more=("--log-dir", str(logs)))
    assert killed.returncode == 0, killed.stderr
    assert (tmp_path / "killed" / "end.npy").read_bytes() == (tmp_path / "plain" / "end.npy").read_bytes()
    assert "multiring: start 2 of at most 4: all ranks, with a new secret" in killed.stderr
    assert "multiring: start 4 of at most 4" in killed.stderr
    assert "rank 1 (pid" in killed.stderr
    assert sorted(each.name for each in logs.iterdir() if each.is_dir()) == ["restart-1", "restart-2", "restart-3"]
    assert (logs / "restart-3" / "rank-1.err").exists()


def test_restarts_end(tmp_path: Path) -> None:
    done = run(tmp_path, "0:step3", "0:step3", restarts=1)
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.count("start 2 of at most 2") == 1


def test_a_mistake_is_not_repeated_for_long(tmp_path: Path) -> None:
    done = run(tmp_path, "1:early", "1:early", "1:early", restarts=100)
    assert done.returncode == 128 + signal.SIGKILL
    assert "failed twice before its first step, so another start would fail too: not started again" in done.stderr
    assert done.stderr.count(": all ranks, with a new secret") == 1


def test_once_is_no_habit(tmp_path: Path) -> None:
    done = run(tmp_path, "1:early", "0:step3", "0:early")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_the_job_has_stopped_it(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "wait.py"
    script.write_text(
        "import sys, time, multiring\nmultiring.init()\nopen(sys.argv[1], 'a').write('x')\n"
        "multiring.world().barrier()\ntime.sleep(100)\n"
    )
    place = tmp_path / "there"
    command = [sys.executable, "-m", "multiring", "run", "-n", "2", "--max-restarts", "5", str(script), str(place)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 240
        while not (place.exists() and place.stat().st_size == 2) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(job.pid, number)
        _, said = job.communicate(timeout=240)
    assert job.returncode == 128 + number
    assert "all ranks, with a new secret" not in said


def test_mpiexec_cannot_restart() -> None:
    words = ["-m", "multiring", "run", "--launcher", "mpiexec", "--hosts", "a:1,b:1", "--max-restarts", "1", "true"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode != 0
    assert "--max-restarts 1 with --launcher mpiexec" in done.stderr
