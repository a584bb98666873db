"""The example as people run it: alone, and under `multiring run`."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Threads that wait for each other on cores that others use take minutes.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_torch.py"
ONE_CALL = EXAMPLE.with_name("digits_distribute.py")
OTHERS = {"tensorflow": "tensorflow", "keras": "tensorflow", "jax": "jax", "flax": "flax"}  # example -> what it needs
LAST_LINE = re.compile(
    r"test accuracy (?P<accuracy>[\d.]+)%, \d+ images/s, waiting [\d.]+% of [\d.]+ s, (?P<ranks>\d+) ranks?"
)


def digits(ranks: int, *options: str, script: Path = EXAMPLE, engine: str = "auto") -> subprocess.CompletedProcess[str]:
    """Run the example; 0 `ranks` are one without a launcher."""
    launcher = ["-m", "multiring", "run", "-n", str(ranks), "--", sys.executable] if ranks else []
    return subprocess.run(
        [sys.executable, *launcher, str(script), *options],
        capture_output=True,
        text=True,
        env={**ONE_THREAD, "MULTIRING_ENGINE": engine},
        timeout=110,
        check=False,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> re.Match[str]:
    assert done.returncode == 0, done.stderr
    found = LAST_LINE.search(done.stdout.splitlines()[-1])
    assert found, done.stdout
    return found


def test_two_ranks_learn_digits() -> None:
    found = last_line(digits(2, "--epochs", "8"))
    assert int(found["ranks"]) == 2
    assert float(found["accuracy"]) >= 97.0


@pytest.mark.parametrize(
    ("options", "size_bytes"),
    [
        (("--wire", "int8", "--error-feedback"), 91356),
        # (32 + 9 + 64 + 288 + 64 + 576 + 128 + 256 + 10 + 128) rows and columns, 298 biases, 12 flags
        (("--powersgd", "2"), 4 * (2 * 1555 + 298 + 12)),
    ],
)
def test_lossy_gradients_teach_digits(options: tuple[str, ...], size_bytes: int) -> None:
    """Every rank is a host, so that wires code; the example compares the ranks' parameters at every step."""
    done = digits(2, "--epochs", "8", *options, engine="tcp")
    assert float(last_line(done)["accuracy"]) >= 97.0
    assert f"{size_bytes} bytes of gradients a step" in done.stdout


def test_runs_without_launcher() -> None:
    found = last_line(digits(0, "--steps", "30"))
    assert int(found["ranks"]) == 1


def test_shards_may_be_uneven_and_empty() -> None:
    """The epoch's last batch has 1 image for 3 ranks."""
    assert int(last_line(digits(3, "--steps", "6", "--batch", "359", "--dtype", "float64"))["ranks"]) == 3


def test_check_fails_without_sharing() -> None:
    done = digits(2, "--steps", "3", "--no-sharing")
    assert done.returncode == 1
    assert re.search(r"step 1: the ranks' parameters differ: rank 0 [0-9a-f]{16}, rank 1 [0-9a-f]{16}", done.stderr)


def test_check_fails_when_shards_overlap(tmp_path: Path) -> None:
    """The example with another line where it takes its shard: both ranks train on the same half of each batch."""
    right, wrong = "batch[mt.rank() :: mt.size()]", "batch[0 :: mt.size()]"
    text = EXAMPLE.read_text()
    assert text.count(right) == 1
    changed = tmp_path / "changed.py"
    changed.write_text(text.replace(right, wrong))
    done = digits(2, "--epochs", "1", script=changed)
    assert done.returncode == 1
    assert "the ranks' shards overlap, or miss images" in done.stderr


def test_one_call_makes_a_script_one_for_several_ranks() -> None:
    """Losses and accuracy are those of one process, to the last digit shown; the last batch has 29 images."""
    alone, together = (digits(ranks, "--epochs", "1", script=ONE_CALL) for ranks in (0, 2))
    assert alone.returncode == together.returncode == 0, together.stderr
    assert together.stdout.replace("[0] ", "").replace("2 ranks", "1 rank") == alone.stdout
    assert re.fullmatch(r"epoch 1: loss 1\.\d{6}\ntest accuracy [89]\d\.\d\d%, 1 rank\n", alone.stdout)


@pytest.mark.parametrize("framework", OTHERS)
def test_other_frameworks_learn_digits(framework: str) -> None:
    if importlib.util.find_spec(OTHERS[framework]) is None:
        pytest.skip(f"{OTHERS[framework]} is not installed")
    done = digits(2, "--epochs", "8", script=EXAMPLE.with_name(f"digits_{framework}.py"))
    assert done.returncode == 0, done.stderr
    found = re.search(r"test accuracy ([\d.]+)%, \d+ images/s, 2 ranks", done.stdout)
    assert found, done.stdout
    assert float(found[1]) >= 97.0
