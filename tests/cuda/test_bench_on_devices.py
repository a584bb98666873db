"""`multiring bench all_reduce` and `step` with CUDA tensors, on the stand-ins. Their speed says nothing."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from multiring._bench import on_device
from multiring._bench.cases import Question
from multiring._bench.compare import Comparison, Manner
from multiring._bench.job import Jobs, WrongResultError
from multiring._bench.on_device import DeviceBench
from multiring._bench.records import lines_of
from multiring._bench.step import StepBench, StepManner, StepQuestion

PYTHON = (sys.executable, "-m", "tests.standin")
IDLE_GLOO = Path(__file__).parents[1] / "support" / "bench_workers" / "idle_gloo.py"
SHARED = "2 ranks share 1 GPU, and NCCL wants one each"


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Jobs(120.0) as entered:
        yield entered


def compared(jobs: Jobs, *questions: Question) -> list[Comparison]:
    return DeviceBench(jobs, Manner(alternations=2, seconds=0.01), python=PYTHON).compare(questions)


def test_all_libraries_are_timed_on_gpus_of_their_own(jobs: Jobs) -> None:
    sizes = (1 << 10, 64 << 10)
    made = compared(
        jobs, *(Question(collective="all_reduce", ranks=2, size_bytes=each, device="cuda") for each in sizes)
    )
    assert [each.question.size_bytes for each in made] == list(sizes)
    for comparison in made:
        assert [timing.library for timing in comparison.timings] == ["multiring", "gloo", "nccl"]
        for timing in comparison.timings:
            assert len(timing.seconds) == 2, timing
            assert all(each > 0 for each in timing.seconds)
            assert timing.calls >= 2
            assert f"torch {torch.__version__}" in timing.version


def test_what_cannot_run_says_why(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_DEVICES", "1")
    question = Question(
        collective="all_reduce", ranks=2, size_bytes=1 << 10, dtype="bfloat16", op="average", device="cuda"
    )
    (made,) = compared(jobs, question)
    ours, gloo, nccl = made.timings
    assert len(ours.seconds) == 2
    assert (gloo.not_offered, nccl.not_offered) == ("Gloo has no average", SHARED)
    assert f"  nccl: NOT RUN: {SHARED}" in lines_of(made)


def test_without_a_gpu_nothing_is_timed(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_DEVICES", "0")
    with pytest.raises(NotImplementedError, match="sees no GPU: want a GPU and torch's CUDA build, or --device cpu"):
        compared(jobs, Question(collective="all_reduce", ranks=2, size_bytes=1 << 10, device="cuda"))


def test_a_library_with_a_wrong_sum_is_not_timed(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "WORKER", IDLE_GLOO)
    with pytest.raises(WrongResultError, match="gloo has a wrong result: all_reduce sum of 256 float32"):
        compared(jobs, Question(collective="all_reduce", ranks=2, size_bytes=1 << 10, device="cuda"))


def test_a_training_step_is_verified_and_timed(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_DEVICES", "1")
    monkeypatch.setenv("STANDIN_MEMORY_MB", "1500")
    bench = StepBench(jobs, StepManner(alternations=1, steps=1, warmup=0), ["ddp-nccl"], leave_out=["independent"])
    bench.python = PYTHON
    made = bench.compare(StepQuestion(network="embedding", batch=2, device="cuda"))
    ours, nccl = made.timings
    assert len(ours.seconds) == 1
    assert (nccl.seconds, nccl.not_run) == ([], SHARED)
