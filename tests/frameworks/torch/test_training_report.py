"""The report of a training: its confidence intervals and the content of its page."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples.climate.train import SCORES, ClimateFields
from scipy import optimize, stats
from torch import Tensor, nn

from multiring.data.orders import Order, SequentialOrder
from multiring.training import report, run_folder
from multiring.training.circumstances import circumstances
from multiring.training.evaluation import LOSS_PARTS, evaluate
from multiring.training.intervals import JACKKNIFE_GROUPS as GROUPS
from multiring.training.intervals import jackknife_intervals, wilson_interval


@pytest.mark.parametrize(("hits", "total"), [(0, 5), (1, 3), (17, 800), (400, 800), (799, 800), (7, 7)])
def test_an_interval_of_a_share_is_where_the_score_test_does_not_reject(hits: int, total: int) -> None:
    share = hits / total

    def margin(true: float) -> float:
        return float(abs(share - true) / math.sqrt(true * (1 - true) / total) - stats.norm.ppf(0.975))

    low, high = wilson_interval(hits, total)
    assert 0 <= low <= 100 * share + 1e-9
    assert 100 * share - 1e-9 <= high <= 100
    if hits:
        assert low == pytest.approx(100 * optimize.brentq(margin, 1e-12, share - 1e-12), abs=1e-4)
    if hits < total:
        assert high == pytest.approx(100 * optimize.brentq(margin, share + 1e-12, 1 - 1e-12), abs=1e-4)


def test_the_jackknife_of_a_mean_is_its_own_interval_by_students_distribution() -> None:
    # With groups of one size, the mean of all samples is the mean of the groups' means, whose interval is known.
    groups = np.random.default_rng(3).integers(0, 50, (GROUPS, 1))
    ((low, high),) = jackknife_intervals(
        groups, lambda total: total / GROUPS if total.sum() == groups.sum() else total / 19
    )
    middle, error = groups.mean(), stats.sem(groups[:, 0])
    known = stats.t.interval(0.95, GROUPS - 1, loc=middle, scale=error)
    assert (low, high) == pytest.approx(known, rel=1e-4)


def test_intervals_of_climate_scores_hold_the_truth_as_often_as_they_say() -> None:
    # There are 120 fields of 30 pixels. Pixels of a field resemble each other, and the confusion of classes is known.
    random = np.random.default_rng(1)
    task = ClimateFields.__new__(ClimateFields)
    truth = np.array([[0.8, 0.1, 0.1], [0.3, 0.6, 0.1], [0.2, 0.1, 0.7]]) * np.array([[0.6], [0.2], [0.2]])
    iou = np.diag(truth) / (truth.sum(0) + truth.sum(1) - np.diag(truth))
    held = 0
    for _ in range(300):
        drawn = random.multinomial(1, truth.ravel(), 120) * 30
        counts = np.zeros((GROUPS, 9), np.int64)
        np.add.at(counts, random.integers(GROUPS, size=120), drawn)
        low, high = task.intervals(torch.from_numpy(counts.ravel()))[SCORES[0]]
        held += low <= 100 * iou.mean() <= high
    assert 0.90 <= held / 300 <= 0.99


class Numbers:
    """A data set whose samples have known losses."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses
        self.order: Order = SequentialOrder(len(losses))
        self.seed, self.digest = 0, "numbers"

    def sample(self, number: int, epoch: int = 0, draw: int = 0) -> dict[str, Any]:  # noqa: ARG002 -- the interface
        return {"loss": np.float64(self.losses[number])}


def evaluated(losses: list[float], batch: int) -> float:
    def measure(_: nn.Module, found: dict[str, Any]) -> tuple[Tensor, Tensor]:
        values = torch.as_tensor(found["loss"])
        return values, torch.tensor([len(values)])

    found = evaluate(nn.Identity(), Numbers(losses), measure, batch=batch, place=(0, 1))
    assert found.counts.tolist() == [len(losses)]
    return found.loss


def test_the_loss_of_an_evaluation_is_the_mean_of_its_samples_in_any_batches() -> None:
    losses = np.random.default_rng(0).exponential(3, 101).tolist()
    found = {evaluated(losses, batch) for batch in (1, 7, 64, 101)}
    assert len(found) == 1
    assert found.pop() == pytest.approx(np.mean(losses), abs=1 / LOSS_PARTS)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_sample_whose_loss_is_no_usable_number_is_not_left_out(bad: float) -> None:
    assert math.isnan(evaluated([1.0, bad, 2.0], 2))


class Page(HTMLParser):
    """A parser of a page's text and of the number of cells in each table row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.columns: list[int] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 -- the interface
        if tag == "tr":
            self.columns.append(0)
        if tag in {"td", "th"}:
            self.columns[-1] += 1

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_page_says_how_the_run_was_made_and_what_its_scores_are_held_against(tmp_path: Path) -> None:
    classes, steps = 40, (10, 20)
    names = ("val top-1", "val top-5", "shifted top-1", "shifted top-5")
    lines: list[dict[str, Any]] = [
        {"kind": "step", "step": step, "wall_s": 6.0 * step, "loss": 3.0, "rate": 0.1} for step in steps
    ]
    scores = {name: 10.0 + number for number, name in enumerate(names)}
    losses = {"val loss": 2.5, "shifted loss": 2.75}
    intervals = {name: [value - 1, value + 1] for name, value in scores.items()}
    lines += [
        {"kind": "evaluation", "step": step, "wall_s": 6.5 * step, "intervals": intervals, **losses, **scores}
        for step in steps
    ]
    (tmp_path / run_folder.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (tmp_path / "options.toml").write_text('model = "resnet26"\n', encoding="utf-8")
    made = circumstances(2, torch.device("cpu"))
    result = {
        "headline": {"val, top-1, %": 10.0},
        "intervals": {"val, top-1, %": [9.0, 11.0]},
        "circumstances": made,
        "chance": {"val top-1": 100 / classes},
        "baselines": {"pixels": {"val top-1": 7.25}},
    }
    (tmp_path / run_folder.RESULT).write_text(json.dumps(result), encoding="utf-8")
    page = Page(report.write(tmp_path).read_text(encoding="utf-8"))
    text = " ".join(page.text)
    assert max(page.columns) <= report.MOST_IN_A_TABLE
    for value in made.values():
        assert value in text
    assert set(made) >= {"ended", "command of each rank", "commit", "versions", "processor of rank 0's host"}
    for said in (
        "95 % interval: 9.0 to 11.0",
        "top-1, chance 2.5",
        "top-1, pixels 7.25",
        "nats a sample",
        "minutes, with evaluation and checkpoints",
        "val loss, nats",
        "shifted top-5, %",
    ):
        assert said in text, said
