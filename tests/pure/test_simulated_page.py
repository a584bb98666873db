"""The page of multiring simulate: it tells the values of --json, and nothing else."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.told_values import text_outside, told_values, value_at

from multiring._cli import main
from multiring._cli.simulated_page import page_of
from multiring._simulator.presets import preset

STEP = ["simulate", "--topology", "p5", "--model", "vgg16", "--batch-per-rank", "64", "--rate", "2500"]
HOSTS = ["--failures-per-hour", "0.01", "--restart-seconds", "300"]
UNITS = {"s": 1, "ms": 1e-3, "us": 1e-6, "%": 1e-2, "MiB": 1 << 20, "USD": 1, "": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Return a page, and what the same command prints as JSON."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("multiring._cli.simulate.show", said.append)
        assert main([*STEP, "--ranks", "1,8,64", *HOSTS, "--html", str(file), "--json"]) == 0
    return file.read_text(encoding="utf-8"), json.loads(said[0])


def test_every_number_is_one_of_json(made: tuple[str, dict[str, Any]]) -> None:
    page, values = made
    told = told_values(page)
    for each in told:
        value = value_at(values, each.path)
        assert float(each.value) == value
        number, _, unit = each.text.partition(" ")
        # Four digits are told.
        assert float(number.replace(",", "")) * UNITS[unit] == pytest.approx(value, rel=6e-4, abs=1e-12)
    paths = {each.path for each in told}
    for at in range(3):
        names = ("ranks", "step_s", "samples_per_s", "efficiency", "exposed_s", "usd_per_million_samples")
        assert {f"steps.{at}.{name}" for name in (*names, "elastic_goodput", "restarted_goodput")} <= paths
    assert {"steps.2.step_90_s.0", "steps.2.step_90_s.1", "steps.2.links.rails.load"} <= paths
    assert {f"changes.of.{at}.faster_by" for at in range(len(values["changes"]["of"]))} <= paths
    assert json.loads(page.partition('id="values">')[2].partition("</script>")[0]) == values


def test_no_other_number_is_told(made: tuple[str, dict[str, Any]]) -> None:
    """Digits elsewhere belong to names, sources, ticks of charts and two constants of the text."""
    page, values = made
    head, _, rest = page.partition("<h2>Sources and assumptions</h2>")
    assert rest
    text = text_outside(re.sub(r"<svg.*?</svg>", "", head, flags=re.DOTALL))
    named = [values["training"], values["title"], values["priced"], *(each["what"] for each in values["changes"]["of"])]
    for name in (*named, "90 % interval", "an efficiency of 100 %", "gains 2 % or more"):
        text = text.replace(name, "")
    # The table's heads and the ends of the time axis.
    assert set(re.findall(r"\d[\d.]*", text)) <= {"0"}


def test_the_curve_and_the_bars_are_where_the_values_are(made: tuple[str, dict[str, Any]]) -> None:
    page, values = made
    steps = values["steps"]
    charts = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    for chart, name, scaled in zip(charts, ("samples_per_s", "efficiency"), (math.log10, float), strict=True):
        ticks = [
            (float(tick), float(y)) for y, tick in re.findall(r'y1="([\d.]+)" y2="[\d.]+" data-tick="([^"]+)"', chart)
        ]
        (low, bottom), (high, top) = ticks[0], ticks[-1]
        places = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', chart)
        for step, (_, y) in zip(steps, places, strict=True):
            want = bottom + (scaled(step[name]) - scaled(low)) / (scaled(high) - scaled(low)) * (top - bottom)
            assert float(y) == pytest.approx(want, abs=0.02)
        xs = [float(x) for x, _ in places]
        assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.02)  # 1, 8, 64
        band = re.findall(r'class="band" points="([^"]+)"', chart)[0].split()
        assert len(band) == 4  # the ends of two intervals; one rank has none
    step = steps[2]
    widths = dict(re.findall(r'<i class="(forward|backward|exposed)" style="width:([\d.]+)%"', page))
    assert float(widths["forward"]) == pytest.approx(100 * step["forward_s"] / step["step_s"], abs=1e-3)
    assert float(widths["exposed"]) == pytest.approx(100 * step["exposed_s"] / step["step_s"], abs=1e-3)
    assert sum(map(float, widths.values())) == pytest.approx(100, abs=1e-3)
    lanes = re.findall(r"left:([\d.]+)%;width:([\d.]+)%", page)
    for bucket, (left, width) in zip(step["buckets"], lanes, strict=True):
        start_s = step["forward_s"] + bucket["ready_s"]
        assert float(left) == pytest.approx(100 * start_s / step["step_s"], abs=1e-3)
        assert float(width) == pytest.approx(100 * (bucket["end_s"] - bucket["ready_s"]) / step["step_s"], abs=1e-3)


def test_values_are_what_they_say(made: tuple[str, dict[str, Any]]) -> None:
    """Values that the page needs, from others by arithmetic of their own."""
    _, values = made
    for step in values["steps"]:
        parts = ("outside_s", "forward_s", "backward_s", "waiting_s", "exposed_s", "update_s")
        assert sum(step[name] for name in parts) == pytest.approx(step["step_s"])
        hourly = step["hosts"] * values["usd_per_host_hour"]
        assert step["usd_per_million_samples"] == pytest.approx(hourly / (step["samples_per_s"] * 3600) * 1e6)
    last = values["steps"][2]
    gradient_bytes = sum(each["size_bytes"] for each in last["buckets"])
    # Each rank of 8 hosts x 8 sends at least 2 x 7/8 of its eighth of the gradients, by rails of 3200 Gbit/s for eight.
    least_s = 2 * 7 / 8 * gradient_bytes / 8 / (400e9 / 8)
    assert least_s * 0.999 <= last["links"]["rails"]["busy_s"] <= 1.3 * least_s
    assert last["links"]["rails"]["load"] == last["links"]["rails"]["busy_s"] / last["step_s"]
    changes = values["changes"]["of"]
    assert [each["step_s"] for each in changes] == sorted(each["step_s"] for each in changes)
    for each in changes:
        assert each["faster_by"] == pytest.approx(last["step_s"] / each["step_s"] - 1)


def test_changes_are_the_points_of_a_sweep(
    made: tuple[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, values = made
    sweep = ["--sweep", "wire=none,bf16", "--sweep", "lag=0,1", "--sweep", "bucket=4MiB,25MiB,100MiB"]
    assert main([*STEP, "--ranks", "64", *sweep, "--json"]) == 0
    points = {
        (each["wire"], each["lag"], each["bucket_bytes"] >> 20): each["step_s"]
        for each in json.loads(capsys.readouterr().out)["points"]
    }
    found = {each["what"].split(":")[0]: each["step_s"] for each in values["changes"]["of"]}
    assert found["wire bf16 between hosts"] == points["bf16", 0, 25]
    assert found["lag 1"] == points["none", 1, 25]
    assert found["buckets of 4 MiB"] == points["none", 0, 4]
    assert found["buckets of 100 MiB"] == points["none", 0, 100]
    twice_gbit = 2 * 8 * preset("p5").topology.rails[0].bandwidth_bytes_per_s / 1e9
    assert main([*STEP, "--ranks", "64", "--sweep", f"nic={twice_gbit:g}gbit", "--json"]) == 0
    assert found["rails of twice the bandwidth"] == json.loads(capsys.readouterr().out)["points"][0]["step_s"]


def test_the_page_loads_nothing_and_contains_no_name_as_markup(made: tuple[str, dict[str, Any]]) -> None:
    page, values = made
    assert not re.search(r'(src|href)="(?!data:,)', page)
    assert "url(" not in page
    assert "@import" not in page
    hostile = "</script><script>alert(1)</script><b>"
    remarks = [hostile]
    other = page_of({**values, "training": hostile, "title": hostile, "remarks": remarks, "priced": hostile})
    assert "<script>alert" not in other
    assert other.count("</script>") == 1


def test_powers_are_the_numbers_of_ranks_of_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    command = ["simulate", "--topology", "fair", "--model", "resnet50", "--batch-per-rank", "32", "--html", str(file)]
    assert main(command) == 0
    assert f"{file}: resnet50, 32 samples a rank, on 1 to 256 ranks" in capsys.readouterr().out
    told = {each.path: each.value for each in told_values(file.read_text(encoding="utf-8"))}
    assert [told[f"steps.{at}.ranks"] for at in range(9)] == [str(1 << bits) for bits in range(9)]
    assert "This cluster has no price." in file.read_text(encoding="utf-8")
    assert main(command) == 0  # a page is replaced


def test_a_file_of_others_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.html"
    file.write_text("<!doctype html><p>mine")
    assert main([*STEP, "--ranks", "1", "--html", str(file)]) == 2
    assert "is not a page that multiring wrote" in capsys.readouterr().err
    assert file.read_text() == "<!doctype html><p>mine"
    assert main([*STEP, "--ranks", "1", "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "want a file in an existing folder" in capsys.readouterr().err


def test_one_rank_has_a_page(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert main([*STEP, "--ranks", "1", "--html", str(file)]) == 0
    page = file.read_text(encoding="utf-8")
    for said in ("One rank exchanges nothing.", "One rank sends nothing.", "One rank has nothing to change"):
        assert said in page
