"""A task of a user's own under `multiring.training`: uneven batches, other numbers of ranks, wrong answers."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ranks import Here, Process, RanksFailed, run_ranks
from torch import Tensor, nn

import multiring
import multiring.torch as mt
from multiring.data import ArrayDataset
from multiring.errors import ArgumentError
from multiring.training import (
    TrainingOptions,
    TrainingRun,
    TrainingTask,
    evaluate,
    model_dtype,
    parse_options,
    run_folder,
)
from multiring.training.checkpoints import Checkpoints
from multiring.training.evaluation import combine_batch_norm_statistics
from multiring.training.loop import _collated
from multiring.training.micro_batches import require_equal_passes
from multiring.training.options import write
from multiring.training.task import Batch

TORCH = Process(nursery="torch", beforehand=("multiring.training",))
# With 13 samples in batches of 4 the last batch has 1 sample: on 2 and 3 ranks, some rank has none.
COMMON: dict[str, Any] = {
    "batch": 4,
    "precision": "float64",
    "rate": 0.05,
    "log_every": 1,
    "peak": False,
}


class Line(TrainingTask):
    """A linear regression with 13 samples."""

    loss_unit = "m2"

    def __init__(self) -> None:
        inputs = np.random.default_rng(0).normal(size=(13, 3))
        fields = {"x": inputs, "y": inputs @ [1.0, 2.0, 3.0] + 1}
        self.training = ArrayDataset(fields)
        self.evaluations = {"held": ArrayDataset(fields, shuffle=False)}

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        found: Tensor = model(torch.as_tensor(batch["x"]).to(model_dtype(model)))[:, 0]
        return (found - torch.as_tensor(batch["y"])) ** 2


class Averaged(Line):
    """A task with the mean of the losses, as most programs for one process have it."""

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().losses(model, batch).mean()


def train(_: Here, options: dict[str, Any]) -> tuple[int, dict[str, float], int]:
    run = TrainingRun(Line(), TrainingOptions(**{**COMMON, **options}))
    progress = run.train()
    return progress.step, progress.losses, progress.samples


def logged(folder: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line["loss"], line["rate"]) for line in lines if line["kind"] == "step"]


def test_a_training_goes_on_on_other_ranks_as_one_process_trains(tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    options: dict[str, Any] = {"run": str(moved), "epochs": 2, "warmup": 1.0}
    alone = TrainingRun(
        Line(), TrainingOptions(**{**COMMON, **options, "run": str(whole), "plain": True, "device": "cpu"})
    ).train()
    # Only 2 ranks measure the noise scale: 4 samples cannot be divided by 3, and a single rank has nothing to compare.
    parts = [run_ranks(train, ranks, {**options, "minutes": 1e-9}, process=TORCH)[0] for ranks in (3, 2, 1)]
    begun = [step for step, _, _ in parts]
    assert 0 < begun[0] < begun[1] < begun[2] < 8
    # As the times, the samples are those of all processes: else their quotient would be too small.
    assert [samples for _, _, samples in parts] == [min(13, 4 * step) + 4 * max(0, step - 4) for step in begun]
    found = run_ranks(train, 2, options, process=TORCH)
    assert [(step, samples) for step, _, samples in found] == [(8, 26), (8, 26)]
    for line, wanted in zip(logged(moved), logged(whole), strict=True):
        assert line == pytest.approx(wanted, rel=1e-12)
    assert found[0][1] == found[1][1] == pytest.approx(alone.losses, abs=1e-6)
    # The rate of a step is the one that it used: the warm-up begins with 0 and ends after 4 steps.
    assert [rate for _, rate in logged(whole)[:5]] == pytest.approx([0.0, 0.0125, 0.025, 0.0375, 0.05])
    with pytest.raises(RanksFailed) as caught:
        run_ranks(train, 2, {**options, "batch": 5}, process=TORCH)
    assert "batch=5, but the checkpoint" in str(caught.value)
    assert "2 ranks failed" in str(caught.value)


def test_the_wait_for_a_step_s_loss_is_time_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes while the host waits for the loss; the time of evaluations is another one."""
    agreed, evaluated = TrainingRun._agreed, TrainingRun._score

    def slow(self: TrainingRun, *words: Any) -> str:
        time.sleep(0.02)
        return agreed(self, *words)

    def slower(self: TrainingRun, *words: Any) -> None:
        time.sleep(1.0)
        evaluated(self, *words)

    monkeypatch.setattr(TrainingRun, "_agreed", slow)
    monkeypatch.setattr(TrainingRun, "_score", slower)
    options = {**COMMON, "run": str(tmp_path / "run"), "plain": True, "device": "cpu", "epochs": 2}
    progress = TrainingRun(Line(), TrainingOptions(**options)).train()
    assert progress.trained_s > 0.9 * 8 * 0.02
    assert progress.wall_s - progress.trained_s > 0.9 * 2.0


def look_for_checkpoints(_: Here, options: dict[str, Any]) -> tuple[bool, bool]:
    mt.init()
    checkpoints = Checkpoints(Path(options["run"]), 2)
    before = checkpoints.is_there()
    TrainingRun(Line(), TrainingOptions(**options)).train()
    return before, checkpoints.is_there()


def test_all_ranks_know_whether_there_is_a_checkpoint(tmp_path: Path) -> None:
    options = COMMON | {"run": str(tmp_path / "run"), "epochs": 1}
    assert run_ranks(look_for_checkpoints, 2, options, process=TORCH) == [(False, True)] * 2


def test_a_run_too_short_to_log_a_step_has_a_report(tmp_path: Path) -> None:
    options = {**COMMON, "run": str(tmp_path / "run"), "log_every": 1000, "plain": True, "device": "cpu", "epochs": 1}
    task = Line()
    task.evaluations = {}
    run = TrainingRun(task, TrainingOptions(**options))
    run.train()
    run.write_report()
    assert logged(run.folder) == []
    assert "<h2>Options</h2>" in (run.folder / "report.html").read_text(encoding="utf-8")


def test_wrong_answers_of_a_task_are_named(tmp_path: Path) -> None:
    options = TrainingOptions(run=str(tmp_path / "run"), plain=True, device="cpu", **COMMON)
    with pytest.raises(ArgumentError, match=r"losses of shape \(\) for 4 samples: want one loss for each, \(4,\)"):
        TrainingRun(Averaged(), options).train()

    def measure(_: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return torch.as_tensor(batch["y"]), torch.ones(2)

    with pytest.raises(ArgumentError, match=r"counts of type torch.float32 and shape \(2,\): want int64"):
        evaluate(nn.Identity(), Line().training, measure, batch=4)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--rate=0", "rate=0.0: want a number above 0"),
        ("--rate=nan", "rate=nan: want a number above 0"),
        ("--ema=1", "ema=1.0: want a number of 0 or more and below 1"),
        ("--micro-batch=-1", "micro_batch=-1: want a number of 0 or more"),
        ("--optimizer=adam", "optimizer='adam': want 'sgd' or 'lars'"),
        ("--wire=fp8", "wire='fp8': want '' or "),
        ("--epoch=3", "unrecognized arguments: --epoch=3"),
    ],
)
def test_options_out_of_range_are_refused(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(TrainingOptions, [words])
    assert told in capsys.readouterr().err


def test_a_torn_write_of_the_options_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(TrainingOptions(batch=3), tmp_path)
    before = (tmp_path / "options.toml").read_bytes()

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)  # all bytes are written, but are not known to be on the disk
    with pytest.raises(KeyboardInterrupt):
        write(TrainingOptions(batch=4), tmp_path)
    assert (tmp_path / "options.toml").read_bytes() == before


def test_a_checkpoint_that_was_scored_on_other_samples_is_refused(tmp_path: Path) -> None:
    options = TrainingOptions(**{**COMMON, "run": str(tmp_path / "run"), "device": "cpu", "minutes": 1e-9})
    begun = TrainingRun(Line(), options).train().step
    task = Line()
    task.evaluations = {"held": ArrayDataset({"x": np.ones((3, 3)), "y": np.ones(3)}, shuffle=False)}
    with pytest.raises(ArgumentError, match="evaluation set 'held' is not the one that the checkpoint in"):
        TrainingRun(task, options).train()
    assert TrainingRun(Line(), options).train().step > begun


class Normed(Line):
    """A task whose batch norms wait for every rank."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 1), mt.SyncBatchNorm(1))


def make_normed(_: Here, options: dict[str, Any]) -> None:
    TrainingRun(Normed(), TrainingOptions(**{**COMMON, **options}))


def test_batch_norms_over_ranks_refuse_batches_that_leave_a_rank_without_a_micro_batch(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(make_normed, 2, {"run": str(tmp_path / "run")}, process=TORCH)
    # The last batch of an epoch has 1 of 13 samples.
    assert "batch=4 on 2 ranks: a batch of 1 samples gives a rank 1 micro-batches and another 0" in str(caught.value)
    assert "2 ranks failed" in str(caught.value)

    def told(batch: int, samples: int, ranks: int, passes: int, model: nn.Module | None = None) -> str:
        try:
            require_equal_passes(model or Normed().model(), batch=batch, samples=samples, ranks=ranks, passes=passes)
        except ArgumentError as error:
            return str(error)
        return ""

    assert "a batch of 8 samples gives a rank 1 micro-batches and another 0" in told(8, 16, 16, 1)
    assert "a batch of 5 samples gives a rank 3 micro-batches and another 2" in told(5, 10, 2, 3)
    fit = [(5, 10, 2, 2), (4, 12, 2, 2), (16, 16, 16, 1), (4, 14, 2, 1), (1, 13, 1, 1)]
    assert [told(*each) for each in fit] == [""] * len(fit)
    assert told(8, 16, 16, 1, nn.BatchNorm1d(1)) == ""


def statistics(here: Here) -> tuple[float, float]:
    mt.init()
    norm = nn.BatchNorm1d(1)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.fill_(1000 + 0.25 * here.rank)
    norm.running_var.fill_(0.01)
    combine_batch_norm_statistics(norm, 2)
    return float(norm.running_mean), float(norm.running_var)


def test_variances_beside_large_means_are_combined_exactly() -> None:
    wanted = pytest.approx((1000.125, 0.01 + 0.125**2), rel=1e-6)
    assert run_ranks(statistics, 2, process=TORCH) == [wanted, wanted]


def test_the_metrics_of_a_killed_run_are_read_up_to_the_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": NaN}\n{"step": 2}\n{"st', encoding="utf-8")
    assert [each["step"] for each in run_folder.read_metrics(path)] == [1, 2]
    run_folder.discard_metrics_after(1, path)
    assert path.read_text(encoding="utf-8") == '{"step": 1, "loss": NaN}\n'
    path.write_text('{"step": 1}\n{"st\n{"step": 2}\n', encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"metrics.jsonl', line 2: '{\"st' is no record of a run: remove it"):
        run_folder.discard_metrics_after(1, path)


def test_a_write_of_the_result_that_fails_leaves_the_former_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder.write_result(tmp_path, {"program": "former"})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run_folder.write_result(tmp_path, {"program": "new"})
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8")) == {"program": "former"}
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_arrays_that_do_not_fit_are_refused() -> None:
    for arrays in ({}, {"x": np.zeros(0)}, {"x": np.zeros(3), "y": np.zeros(2)}, {"x": np.float64(1)}):
        with pytest.raises(ArgumentError, match="want one first dimension of 1 or more samples"):
            ArrayDataset(arrays)
    with pytest.raises(ArgumentError, match="array 'x' holds Python objects"):
        ArrayDataset({"x": np.array([None, 1])})
    assert ArrayDataset({"x": np.zeros(3)}).digest != ArrayDataset({"x": np.ones(3)}).digest


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    for missing, extra in (("torch", "torch"), ("matplotlib", "training")):
        program = f"import sys; sys.modules[{missing!r}] = None; import multiring.training as t; t.write_report('.')"
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
        assert f"pip install 'multiring[{extra}]'" in done.stderr


def test_the_share_of_the_peak_is_measured_with_all_numbers_of_a_sample() -> None:
    samples = ArrayDataset(
        {"x": np.zeros((3, 2), np.float32), "label": np.arange(3), "name": np.array(["a", "b", "c"])}
    )
    found = _collated([samples.sample(number) for number in range(2)])
    assert {name: value.tolist() for name, value in found.items()} == {"x": [[0, 0], [0, 0]], "label": [0, 1]}


HOLD = """
import sys
from pathlib import Path
from multiring.training.run_folder import claim
held = claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_two_trainings_do_not_write_to_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would save and take each other's checkpoints. A killed training leaves no lock."""
    run = TrainingRun(Line(), TrainingOptions(**COMMON, run=str(tmp_path / "run"), epochs=1, plain=True))
    source = str(Path(multiring.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, run.options.run],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            monkeypatch.setattr(run_folder, "_PATIENCE_S", 0.0)
            with pytest.raises(ArgumentError, match=r"another training writes to the run '.*run': wait"):
                run.train()
        finally:
            other.kill()
    assert not (tmp_path / "run" / "options.toml").exists()
    assert run.train().step == 4


def test_two_trainings_of_one_process_do_not_write_to_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TrainingRun(Line(), TrainingOptions(**COMMON, run=str(tmp_path / "run"), epochs=1, plain=True))
    monkeypatch.setattr(run_folder, "_PATIENCE_S", 0.0)
    with (
        run_folder.claim(run.folder),
        pytest.raises(ArgumentError, match=r"another training writes to the run '.*run': wait"),
    ):
        run.train()
    assert run.train().step == 4
    run_folder.claim(run.folder).close()  # a training that has ended holds nothing
