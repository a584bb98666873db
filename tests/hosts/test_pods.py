"""The pods of manifests on virtual hosts (tests/support/pod_cluster.py): they train, end and resume."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide_kubernetes.md"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")

DEADLINE_S = 240.0
SYSTEMS = ("kubernetes", "kubeflow", "mpi-operator")
# A program with a state that it saves in each step, and loads at its start. Rank 2 is on the second pod.
STEPS = """
import os, sys, time
from pathlib import Path
import numpy as np, multiring
group = multiring.init()
saved, started = Path("/mnt/results/saved"), Path("/mnt/results/started")
first = np.array([int(saved.read_text()) if saved.exists() else 0])
group.broadcast(first, root=0)
step = int(first[0])
print(f"rank {group.rank} of {group.size} from step {step} on {os.uname().nodename}", flush=True)
for step in range(step, int(sys.argv[1])):
    total = np.array([group.rank + step], np.float64)
    group.all_reduce(total)
    assert total[0] == 6 + 4 * step, total
    if group.rank == 0:
        saved.write_text(str(step + 1))
    group.barrier()
    if step == 4:
        started.touch()
    time.sleep(0.2)
print(f"rank {group.rank} has done {step + 1} steps", flush=True)
"""
SECRET = "a secret of this test"  # noqa: S105 -- it is in no manifest, command line or environment
WATCH = """
import os
from pathlib import Path
import multiring
group = multiring.init()
group.barrier()
shown = []
for process in Path("/proc").glob("[0-9]*"):
    for name in ("cmdline", "environ"):
        try:
            if b"a secret of this test" in (process / name).read_bytes():
                shown.append(f"{process.name}/{name}")
        except OSError:
            pass
print(f"rank {group.rank}: shown in {shown}", flush=True)
group.barrier()
"""


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder that the pods may write to, and the host's other users may enter."""
    folder = tmp_path / "results"
    folder.mkdir()
    os.chown(folder, 1000, 1000)
    (folder / "steps.py").write_text(STEPS)
    (folder / "watch.py").write_text(WATCH)
    shutil.copy(ROOT / "examples" / "digits_torch.py", folder)
    return folder


def manifest(results: Path, system: str, *words: str) -> Path:
    """Return the file of a manifest that `multiring manifest` has written."""
    fixed = ["--name", "digits", "--image", "registry.example/digits:1", "--pods", "2", "--ranks-per-pod", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "multiring", "manifest", system, *fixed, "--volume", "results:/mnt/results", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    file = results.parent / f"{system}.yaml"
    file.write_text(done.stdout)
    assert SECRET not in done.stdout
    return file


def cluster(file: Path, results: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the pods of a manifest."""
    secret = results.parent / "secret"
    secret.write_text(SECRET + "\n")
    secret.chmod(0o600)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MULTIRING_")}
    claims = ["--claim", f"results={results}"]
    return subprocess.run(
        [sys.executable, "-m", "tests.support.pod_cluster", str(file), "--secret", str(secret), *claims, *options],
        cwd=ROOT,
        env={**kept, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_pods_meet_and_the_secret_is_shown_nowhere(system: str, results: Path) -> None:
    file = manifest(results, system, "--", "python", "/mnt/results/watch.py")
    done = cluster(file, results)
    assert done.returncode == 0, done.stdout
    assert sorted(re.findall(r"rank \d: shown in .*", done.stdout)) == [
        f"rank {rank}: shown in []" for rank in range(4)
    ]
    assert "the job succeeded" in done.stdout


def test_pods_learn_digits(results: Path) -> None:
    command = ["python", "/mnt/results/digits_torch.py", "--steps", "40"]
    done = cluster(manifest(results, "kubernetes", "--", *command), results)
    assert done.returncode == 0, done.stdout
    learnt = re.search(r"test accuracy ([\d.]+)%.*4 ranks", done.stdout)
    assert learnt is not None, done.stdout
    assert float(learnt[1]) > 60.0, done.stdout


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_pod_is_replaced_and_the_job_resumes(system: str, killed: int, results: Path) -> None:
    file = manifest(results, system, "--max-restarts", "2", "--", "python", "/mnt/results/steps.py", "20")
    done = cluster(file, results, "--kill", str(killed), "--kill-file", str(results / "started"))
    assert done.returncode == 0, done.stdout
    for rank in range(4):
        assert f"rank {rank} has done 20 steps" in done.stdout, done.stdout
    resumed = [int(each) for each in re.findall(r"rank 0 of 4 from step (\d+)", done.stdout)]
    assert resumed[0] == 0, done.stdout
    assert resumed[-1] >= 4, done.stdout


def test_without_restarts_a_killed_pod_ends_the_job(results: Path) -> None:
    file = manifest(results, "kubernetes", "--", "python", "/mnt/results/steps.py", "1000")
    done = cluster(file, results, "--kill", "1", "--kill-file", str(results / "started"))
    assert done.returncode == 1, done.stdout
    assert "the job failed" in done.stdout
    assert "starts" not in re.sub(r"^digits.*\n", "", done.stdout, flags=re.MULTILINE)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_pod_that_never_comes_is_named(absent: int, results: Path) -> None:
    wait = ["--env", "MULTIRING_INIT_TIMEOUT_S=6"]
    file = manifest(results, "kubernetes", "--max-restarts", "3", *wait, "--", "python", "/mnt/results/steps.py", "5")
    done = cluster(file, results, "--absent", str(absent))
    assert done.returncode == 1, done.stdout
    named = "digits-0.digits:29500" if absent == 0 else "node 1"
    assert re.search(rf"^digits-{1 - absent}: multiring: .*{named}", done.stdout, re.MULTILINE), done.stdout


def test_the_page_is_as_it_says(results: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    [command] = re.findall(r"^\$ (multiring manifest .* > digits\.yaml)$", text, re.MULTILINE)
    folder = results.parent
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    [create] = re.findall(r"^\$ (head .*)$", text, re.MULTILINE)
    assert create in done.stderr
    (results / "train.py").write_text(WATCH)
    made = (folder / "digits.yaml").read_text()
    assert "train.py" in made
    # The image would have train.py in its working folder; here it is in the volume.
    (folder / "digits.yaml").write_text(
        made.replace("- train.py", "- /results/train.py").replace("/results", "/mnt/results")
    )
    ended = cluster(folder / "digits.yaml", results)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("shown in []") == 4
