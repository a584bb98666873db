"""What a user has set in a shell or a home does not reach the tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.user_environment import forget_user

THEIRS = "of the user"
NAMES = {
    *("COLUMNS", "DASK_CONFIG", "GIT_DIR", "HOROVOD_CYCLE_TIME", "KERAS_BACKEND", "KERAS_HOME", "MULTIRING_ENGINE"),
    *("MULTIRING_TIMELINE", "OMP_NUM_THREADS", "RANK", "RAY_ADDRESS", "SLURM_JOB_ID", "SLURM_NNODES", "WORLD_SIZE"),
}


def test_nothing_of_the_users_is_here() -> None:
    assert not [name for name, text in os.environ.items() if text == THEIRS]
    told = json.loads((Path(os.environ["KERAS_HOME"]) / "keras.json").read_text())
    assert (told["floatx"], told["image_data_format"]) == ("float32", "channels_last")
    assert "127.0.0.1" in os.environ["no_proxy"]


def test_a_run_of_tests_takes_nothing_over_and_leaves_nothing(tmp_path: Path) -> None:
    words = ["-q", "-n", "1", "-p", "no:cacheprovider", f"{__file__}::{test_nothing_of_the_users_is_here.__name__}"]
    outer = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    home, places = tmp_path / "home", tmp_path / "places"
    home.mkdir()
    places.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=Path(__file__).parents[2],
        env={**outer, **dict.fromkeys(NAMES, THEIRS), "HOME": str(home), "TMPDIR": str(places)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert not list(home.iterdir())
    assert not list(places.glob("multiring-tests-*"))


def test_the_choices_of_a_run_of_tests_stay(tmp_path: Path) -> None:
    chosen = {"MULTIRING_TEST_DEVICE": "cuda", "MULTIRING_BENCH_PEERS": "/peers", "PATH": "/bin", "HOME": "/root"}
    environment = {**chosen, **dict.fromkeys(NAMES, THEIRS), "no_proxy": "intranet"}
    forget_user(environment, tmp_path)
    here = "intranet,127.0.0.1,localhost,::1"
    assert environment == {
        **chosen,
        "KERAS_HOME": str(tmp_path),
        "no_proxy": here,
        "NO_PROXY": here.removeprefix("intranet,"),
    }
