"""The digits examples, run alone and on several ranks.

`multiring run` starts the ranks in one test; the other tests fork them.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.support.ranks import Process
from tests.support.scripts import Start, run_script

# With several threads per process, a test takes minutes on busy cores.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_torch.py"
ONE_CALL = EXAMPLE.with_name("digits_distribute.py")
# Example: the module that it needs, the nursery that forks its ranks, and the slow modules that it imports.
OTHERS = {
    "tensorflow": ("tensorflow", "tf", ("multiring.tensorflow",)),
    "keras": ("tensorflow", "keras", ("tensorflow", "multiring.keras")),
    "jax": ("jax", "jax", ("multiring.jax",)),
    "flax": ("flax", "jax", ("multiring.jax", "optax", "flax.nnx")),
}
LAST_LINE = re.compile(
    r"test accuracy (?P<accuracy>[\d.]+)%, \d+ images/s, waiting [\d.]+% of [\d.]+ s, (?P<ranks>\d+) ranks?"
)


def digits(ranks: int, *options: str, script: Path = EXAMPLE, engine: str = "auto") -> subprocess.CompletedProcess[str]:
    """Run the example; with `ranks=0`, run one process without a launcher."""
    launcher = ["-m", "multiring", "run", "-n", str(ranks), "--", sys.executable] if ranks else []
    return subprocess.run(
        [sys.executable, *launcher, str(script), *options],
        capture_output=True,
        text=True,
        env={**ONE_THREAD, "MULTIRING_ENGINE": engine},
        timeout=240,
        check=False,
    )


def forked(
    ranks: int,
    *options: str,
    script: Path = EXAMPLE,
    engine: str = "shm",
    nursery: str = "torch",
    loaded: tuple[str, ...] = ("multiring.torch",),
) -> list[tuple[int, str]]:
    """Run an example on forked ranks; return each exit code and output.

    With `ranks=0`, run one process without a launcher's variables.
    """
    process = Process(nursery=nursery, beforehand=(*loaded, "sklearn.datasets"))
    return run_script(script, ranks or 1, *options, process=process, start=Start(alone=ranks == 0), engine=engine)


def last_line(ended: list[tuple[int, str]]) -> re.Match[str]:
    assert all(code == 0 for code, _ in ended), ended
    found = LAST_LINE.search(ended[0][1].splitlines()[-1])
    assert found, ended
    return found


def test_two_ranks_learn_digits() -> None:
    done = digits(2, "--epochs", "8")
    found = last_line([(done.returncode, done.stdout + done.stderr)])
    assert int(found["ranks"]) == 2
    assert float(found["accuracy"]) >= 97.0


@pytest.mark.parametrize(
    ("options", "size_bytes"),
    [
        (("--wire", "int8", "--error-feedback"), 91357),
        # (32 + 9 + 64 + 288 + 64 + 576 + 128 + 256 + 10 + 128) rows and columns, 298 biases, 13 flags
        (("--powersgd", "2"), 4 * (2 * 1555 + 298 + 13)),
    ],
)
def test_lossy_gradients_teach_digits(options: tuple[str, ...], size_bytes: int) -> None:
    """Every rank counts as a host, so all messages are compressed.

    The example compares the ranks' parameters after every step.
    """
    ended = forked(2, "--epochs", "8", *options, engine="tcp")
    assert float(last_line(ended)["accuracy"]) >= 97.0
    assert f"{size_bytes} bytes of gradients a step" in ended[0][1]


def test_runs_without_launcher() -> None:
    found = last_line(forked(0, "--steps", "30"))
    assert int(found["ranks"]) == 1


def test_shards_may_be_uneven_and_empty() -> None:
    """The epoch's last batch has 1 image for 3 ranks."""
    assert int(last_line(forked(3, "--steps", "6", "--batch", "359", "--dtype", "float64"))["ranks"]) == 3


def test_check_fails_without_sharing() -> None:
    for code, told in forked(2, "--steps", "3", "--no-sharing"):
        assert code == 1
        assert re.search(r"step 1: the ranks' parameters differ: rank 0 [0-9a-f]{16}, rank 1 [0-9a-f]{16}", told)


def test_check_fails_when_shards_overlap(tmp_path: Path) -> None:
    """Both ranks of a changed example train on the same half of each batch."""
    right, wrong = "batch[mt.rank() :: mt.size()]", "batch[0 :: mt.size()]"
    text = EXAMPLE.read_text()
    assert text.count(right) == 1
    changed = tmp_path / "changed.py"
    changed.write_text(text.replace(right, wrong))
    for code, told in forked(2, "--epochs", "1", script=changed):
        assert code == 1
        assert "the ranks' shards overlap, or miss images" in told


def test_one_call_makes_a_script_one_for_several_ranks() -> None:
    """Losses and accuracy equal those of one process in every digit shown.

    The last batch has 29 images.
    """
    ((code, alone),) = forked(0, "--epochs", "1", script=ONE_CALL)
    together = forked(2, "--epochs", "1", script=ONE_CALL)
    assert [code, *(each for each, _ in together)] == [0, 0, 0], (alone, together)
    assert together[0][1].replace("2 ranks", "1 rank") == alone
    assert re.fullmatch(r"epoch 1: loss 1\.\d{6}\ntest accuracy [89]\d\.\d\d%, 1 rank\n", alone)


@pytest.mark.parametrize("framework", OTHERS)
def test_other_frameworks_learn_digits(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs, nursery, loaded = OTHERS[framework]
    if find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    script = EXAMPLE.with_name(f"digits_{framework}.py")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    epochs = "5" if framework == "flax" else "8"  # flax learns as well in five, and its steps take four times as long
    code, told = forked(2, "--epochs", epochs, script=script, nursery=nursery, loaded=loaded)[0]
    found = re.search(r"test accuracy ([\d.]+)%, \d+ images/s, 2 ranks", told)
    assert code == 0, told
    assert found, told
    assert float(found[1]) >= 97.0
