"""Tests of multiring.caffe on a stand-in for pycaffe.

The conformance suite and the digits also run with a real pycaffe if it is installed.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from tests.support import caffe_ranks
from tests.support.conforming.homes import FRAMEWORKS, ROOT
from tests.support.ranks import run_ranks

STANDIN = FRAMEWORKS["caffe-standin"]


def test_solvers_of_ranks_are_one(tmp_path: Path) -> None:
    caffe_ranks.records(tmp_path)
    run_ranks(caffe_ranks.everything, 2, str(tmp_path), home=STANDIN.home)


def train(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*STANDIN.path, str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, "-m", "multiring", "caffe", *options],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        timeout=240,
        check=False,
    )


def test_caffe_train_is_a_command(tmp_path: Path) -> None:
    net = caffe_ranks.NET.format(data=caffe_ranks.records(tmp_path))
    lines = ("test_interval: 3", "test_iter: 1", f'snapshot_prefix: "{tmp_path / "kept"}"')
    solver = caffe_ranks.solver_file(tmp_path, "solver", net, *lines)
    done = train(tmp_path, "train", "-n", "2", "--solver", str(solver))
    assert done.returncode == 0, done.stderr
    first = np.load(tmp_path / "kept_iter_6.caffemodel")["first.0"]
    longer = caffe_ranks.solver_file(tmp_path, "longer", net, *lines, "max_iter: 9")
    state = str(tmp_path / "kept_iter_6.solverstate")
    done = train(tmp_path, "train", "-n", "2", "--solver", str(longer), "--snapshot", state)
    assert done.returncode == 0, done.stderr
    assert (np.load(tmp_path / "kept_iter_9.caffemodel")["first.0"] != first).any()


def test_what_the_command_cannot_is_told(tmp_path: Path) -> None:
    for options, words in (
        (("time",), "want train"),
        (("train",), "want --solver FILE"),
        (("train", "--solver", "s", "--gpu", "0"), "uses host memory only; give -n RANKS instead"),
        (("train", "--solver", "s", "-n", "0"), "-n 0: want a whole number, 1 to"),
        (("train", "--solver", "nowhere.prototxt"), "there is no file nowhere.prototxt"),
    ):
        done = train(tmp_path, *options)
        assert done.returncode, options
        assert words in done.stderr, done.stderr
