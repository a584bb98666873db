"""multiring simulate --published: predictions of published runs and their grade."""

import json
import math
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from multiring._cli import main
from multiring._simulator.grades import Grade, grade_of, ratios_of
from multiring._simulator.intervals import PUBLISHED_RUNS, measured_ratios, step_interval
from multiring._simulator.layers import units_of
from multiring._simulator.published import PublishedRow, published_rows, rows_of
from multiring._simulator.step import part_of, profile_of, step_of
from multiring.errors import ArgumentError

RUNS = Path(__file__).parents[2] / "benchmarks/evidence/foresight/published_runs.toml"

HEAD = """\
[sources]
paper = "a paper"
page = "a page"

[clusters.tiny]
about = { title = "Four hosts of two", accelerator = "X" }
shm = { bandwidth_mbit_per_s = 100000, latency_us = 1, overhead_us = 1 }
rails = [{ interface = "a", bandwidth_mbit_per_s = 10000, latency_us = 1, overhead_us = 1 }]
hosts = [{ name = "h[1-4]", slots = 2 }]

[clusters.tiny.sources]
"shm.bandwidth_mbit_per_s" = "a page"
"shm.latency_us" = "a page"
"shm.overhead_us" = "a page"
"rails.bandwidth_mbit_per_s" = "a page"
"rails.latency_us" = "a page"
"rails.overhead_us" = "a page"
"hosts.name" = "a page"
"hosts.slots" = "a page"

[models.deep]
parameters = 20000000
source = "a page"

[models.wide]
layers = [[1000, 4000], [30000000, 2000]]
source = "a page"
"""

RATE = """
[rates.{model}]
accelerator = "X"
model = "{model}"
precision = "fp32"
batch = 32
samples_per_s = {rate}
source = "page"
"""

ROW = """
[[rows]]
name = "{model} on {ranks}"
cluster = "tiny"
model = "{model}"
precision = "fp32"
batch_per_rank = 32
ranks = {ranks}
efficiency = {efficiency}
source = "paper"
rate = "{model}"
"""

RATES = RATE.format(model="deep", rate=100.0) + RATE.format(model="wide", rate=400.0)
SEVEN = [("deep", 2), ("deep", 4), ("deep", 8), ("wide", 2), ("wide", 4), ("wide", 6), ("wide", 8)]


def _rows(efficiency: object = 0.9, cases: list[tuple[str, int]] = SEVEN) -> list[PublishedRow]:
    text = "".join(ROW.format(model=model, ranks=ranks, efficiency=efficiency) for model, ranks in cases)
    return rows_of(HEAD + RATES + text, "runs.toml")


def _efficiency(row: PublishedRow, link_share: float, hidden_share: float, late_s: float) -> float:
    """Compute the prediction in another way: from a topology file with slower links."""
    slower = HEAD.replace("= 100000,", f"= {100000 * link_share},").replace("= 10000,", f"= {10000 * link_share},")
    one = ROW.format(model=row.model, ranks=row.ranks, efficiency=0.5)
    cluster = rows_of(slower + RATES + one, "slower.toml")[0].cluster
    profile = profile_of(units_of(row.layers), row.batch_per_rank, row.rate.samples_per_s, row.ranks)
    step = step_of(profile, part_of(cluster.topology, row.ranks))
    compute_s, exposed_s = step.seconds.compute, step.seconds.exchange
    not_hidden_s = (1 - hidden_share) * (step.communication_s - exposed_s)
    return compute_s / (compute_s + exposed_s + not_hidden_s + late_s * math.log2(row.ranks))


def test_constants_that_made_the_rows_are_found_and_each_row_is_predicted_by_the_others() -> None:
    made = [_efficiency(row, 0.5, 0.6, 0.004) for row in _rows()]
    text = "".join(
        ROW.format(model=model, ranks=ranks, efficiency=each) for (model, ranks), each in zip(SEVEN, made, strict=True)
    )
    grade = grade_of(rows_of(HEAD + RATES + text, "runs.toml"))
    assert astuple(grade.constants) == pytest.approx((0.5, 0.6, 0.004))
    assert grade.error_fitted == pytest.approx(0, abs=1e-9)
    assert grade.error == pytest.approx(0, abs=1e-9)
    assert grade.pairs_right == grade.pairs > 5
    assert min(*grade.errors_halved, *grade.errors_raised) > 1e-4
    assert len(grade.counted) == 7
    assert [each.predicted for each in grade.rows] == pytest.approx(made)


def test_the_row_that_is_predicted_does_not_take_part_in_its_fit() -> None:
    rows = _rows(0.9)
    strange = rows_of(HEAD + RATES + ROW.format(model="deep", ranks=8, efficiency=0.2), "runs.toml")
    for last in (strange[0], rows[2]):
        grade = grade_of([*rows[:2], *rows[3:], last])
        assert grade.rows[-1].predicted == grade_of([*rows[:2], *rows[3:], strange[0]]).rows[-1].predicted


def test_baselines_are_the_best_of_their_kind_without_the_row() -> None:
    ends, cases = [0.95, 0.9, 0.7, 0.85, 0.6, 0.65], SEVEN[:6]

    def grade_with(efficiencies: list[float]) -> Grade:
        pairs = zip(cases, efficiencies, strict=True)
        text = "".join(ROW.format(model=model, ranks=ranks, efficiency=each) for (model, ranks), each in pairs)
        return grade_of(rows_of(HEAD + RATES + text, "runs.toml"))

    errors = [abs(ends[at] - np.median(ends[:at] + ends[at + 1 :])) for at in range(6)]
    assert grade_with(ends).error_of_constant == pytest.approx(np.mean(errors))
    # Each model has its own bytes per compute, so a line through both is right if the efficiency depends on the model.
    lined = grade_with([0.9, 0.9, 0.9, 0.6, 0.6, 0.6])
    assert lined.error_of_regression == pytest.approx(0)
    assert lined.error_of_constant == pytest.approx(0.3)


def test_a_range_is_no_error_inside() -> None:
    grade = grade_of(_rows("[0.001, 1.4]"))
    assert grade.error == grade.error_of_constant == grade.error_of_regression == 0
    assert grade.pairs == 0


def test_rows_that_do_not_count_say_why_and_are_predicted() -> None:
    tables = [ROW.format(model=model, ranks=ranks, efficiency=0.9) for model, ranks in SEVEN]
    tables[0] += 'fitted = "seen before"\n'
    tables[1] = tables[1].replace('"paper"', '"page"')
    tables[2] = tables[2].replace('"fp32"', '"mixed"')
    rows = rows_of(HEAD + RATES + "".join(tables), "runs.toml")
    assert [row.uncounted for row in rows] == [
        "fitted: seen before",
        "its rate is from 'page', the source of its scaling",
        "its rate is of deep in fp32 on a X",
        *[""] * 4,
    ]
    grade = grade_of(rows)
    assert len(grade.counted) == 4
    assert all(0 < each.predicted <= 1 for each in grade.rows)
    with pytest.raises(ArgumentError, match="3 of 6 rows count: want at least 4"):
        grade_of(rows[:-1])


def test_rates_before_and_after_give_the_efficiency() -> None:
    rows = _rows("0.9\nrelative_to = 2", [("deep", 8)])
    assert (rows[0].low, rows[0].relative_to) == (0.9, 2)
    text = ROW.format(model="deep", ranks=8, efficiency=0).replace(
        "efficiency = 0", "samples_per_s = [300, 320]\nsamples_per_s_before = 100\nrelative_to = 2"
    )
    (row,) = rows_of(HEAD + RATES + text, "runs.toml")
    assert (row.low, row.high) == pytest.approx((0.75, 0.8))


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        ("ranks = 8", "ranks = 0", "ranks = 0", "want a whole number above 0"),
        ("ranks = 8", "ranks = 9", "ranks = 9", "want more than 1, to which the row is relative, and at most the 8"),
        ("efficiency = 0.9", "efficiency = -1", "efficiency = -1", r"want a number above 0, or a range \[low, high\]"),
        ("efficiency = 0.9", "efficiency = [0.9, 0.8]", "efficiency = ", "want a number above 0, or a range"),
        ("efficiency = 0.9", "efficiency = 90", "efficiency = 90", "an efficiency of 90: want a part of 1"),
        ("efficiency = 0.9", "efficient = 0.9", "efficient = ", "unknown: want name, cluster, model"),
        (
            'cluster = "tiny"',
            'cluster = "tinny"',
            "cluster = ",
            "want one of ddl, fair, horovod, p4d, p5, p5e, pfn, summit, superpod, tiny",
        ),
        (
            'model = "wide"\nprecision',
            'model = "bert"\nprecision',
            "model = ",
            "want one of deep, deeplabv3plus, resnet101",
        ),
        ('source = "paper"', 'source = "papers"', "source = ", "want one of page, paper"),
        ("samples_per_s = 400.0", "samples_per_s = nan", "samples_per_s = ", "want a number above 0"),
        ('page = "a page"', 'page = "a paper"', "page = ", "the same source as 'paper'"),
        ("parameters = 20000000", "parameters = 20000000\nlayers = []", "layers = ", "want either `layers` or"),
        ("[30000000, 2000]", "[30000000]", "layers = ", "want pairs of whole numbers above 0"),
        ('rate = "wide"', "", "", "want a text that is not empty"),
        ('"hosts.slots" = "a page"', "", "", "hosts.slots has no source"),
    ],
)
def test_a_wrong_field_is_refused_with_its_line(old: str, new: str, field: str, words: str) -> None:
    text = (
        HEAD
        + RATES
        + ROW.format(model="deep", ranks=4, efficiency=0.5)
        + ROW.format(model="wide", ranks=8, efficiency=0.9)
    )
    before, found, after = text.rpartition(old)
    assert found, "the text to replace is in the file"
    changed = before + new + after
    with pytest.raises(ArgumentError, match=words) as refused:
        rows_of(changed, "runs.toml")
    said = str(refused.value)
    assert said.startswith("runs.toml, line ")
    line = int(said.split("line ")[1].split(":", maxsplit=1)[0])
    if field:
        assert changed.splitlines()[line - 1].startswith(field)
    else:
        assert changed.splitlines()[line - 1] in ("[[rows]]", "[clusters.tiny]")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[rows]", "runs.toml is not valid TOML"),
        ("", r"runs.toml: no \[\[rows\]\]"),
        ("rows = [3]", "runs.toml, line 1: rows: want a table"),
        ("row = 3", "line 1: the file.row = 3: unknown: want sources, clusters, models, rates, rows"),
        ("[[rows]]\n[rates]\nx = 3", "line 1: rates.x: want a table|rates.x: want a table"),
        (HEAD + RATES + 2 * ROW.format(model="deep", ranks=4, efficiency=1), "two rows have the name 'deep on 4'"),
    ],
)
def test_a_wrong_file_is_refused(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        rows_of(text, "runs.toml")


def test_the_command_prints_the_grade(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.toml"
    file.write_text(HEAD + RATES + "".join(ROW.format(model=m, ranks=n, efficiency=0.9) for m, n in SEVEN))
    assert main(["simulate", "--published", str(file)]) == 0
    said = capsys.readouterr().out
    assert "deep on 8" in said
    assert "7 of 7 rows count. Each was predicted by constants fitted without it." in said
    assert main(["simulate", "--published", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counted"] == len(found["rows"]) == 7
    assert set(found["constants"]) == {"link_share", "hidden_share", "late_s"}
    assert main(["simulate", "--published", str(file), "--model", "vgg16"]) == 2
    assert "--published and --model" in capsys.readouterr().err
    assert main(["simulate", "--published", str(tmp_path / "none")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main(["simulate", "--topology", "ddl", "--model", "vgg16"]) == 2
    assert "--batch-per-rank is missing" in capsys.readouterr().err


def test_the_published_rows_have_sources_and_fifty_count() -> None:
    rows = published_rows(str(RUNS))
    assert len(rows) == 56
    assert sum(not row.uncounted for row in rows) == 50
    assert all(row.uncounted.startswith("fitted: ") for row in rows if row.uncounted)


def test_the_interval_is_that_of_the_committed_runs() -> None:
    rows = published_rows(str(RUNS))
    counted = [row for row in rows if not row.uncounted]
    assert len(counted) == PUBLISHED_RUNS
    assert step_interval(1.0, 8) == pytest.approx(measured_ratios(rows), abs=1e-3)
    low, high = measured_ratios(rows)
    assert sum(low <= ratio <= high for ratio in ratios_of(rows)) >= 0.88 * len(counted)
    assert step_interval(1.0, 1) is None
