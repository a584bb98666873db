"""Drawings of plans and timelines."""

import gzip
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from tests.support.timelines import timeline_text

from multiring._cli import main

SVG = "{http://www.w3.org/2000/svg}"


def drawn(path: Path) -> Any:
    return ET.parse(path).getroot()  # noqa: S314 -- written here


def test_a_plan_is_drawn_with_an_arrow_for_each_pair(tmp_path: Path) -> None:
    path = tmp_path / "rings.svg"
    command = ["plan", "--hosts", "4", "--slots", "2", "--link", "1gbit", "--sizes", "32MiB", "--draw", str(path)]
    assert main(command) == 0
    root = drawn(path)
    circles = root.findall(f"{SVG}circle")
    assert len(circles) == 8
    # A grid of 2 x 4: arrows both ways within each of 4 hosts, and two rings of 4 across the hosts.
    arrows = root.findall(f"{SVG}path")
    assert sorted(each.get("stroke") for each in arrows) == ["#1f77b4"] * 8 + ["#d62728"] * 8
    texts = [each.text for each in root.findall(f"{SVG}text")]
    assert {"host0", "host3", "0", "7", "axis 1: 2 ranks a line", "axis 2: 4 ranks a line"} <= set(texts)


def test_a_figure_is_refused_before_anything_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--hosts", "2", "--draw", str(tmp_path / "rings.png")]) == 2
    assert "want a name that ends with .svg" in capsys.readouterr().err


def events() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for rank in range(2):
        found += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": 1, "args": {"name": "program"}},
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": 2, "args": {"name": "ranks 0-1"}},
        ]
        for step in range(4):
            at = step * 1000.0
            spans = [("forward Net", 1, 0, 400), ("backward", 1, 400, 500), ("optimizer SGD", 1, 900, 90)]
            spans += [("all_reduce", 2, 500, 350), ("wire", 2, 550, 300), ("reduce", 2, 700, 100)]
            found += [
                {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": row, "ts": at + start, "dur": float(length)}
                | ({"args": {"operation": step, "bytes": 4096}} if kind == "operation" else {})
                for name, row, start, length in spans
                for kind in ("operation" if name == "all_reduce" else name.split()[0],)
            ]
    return found


@pytest.mark.parametrize("ending", ["json", "json.gz"])
def test_the_last_steps_of_a_timeline_are_drawn(tmp_path: Path, ending: str) -> None:
    path, figure = tmp_path / f"trace.{ending}", tmp_path / "trace.svg"
    text = timeline_text(events(), hosts=["a", "a"]).encode()
    path.write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    assert main(["trace", "draw", str(path), str(figure)]) == 0
    titles = [each.text for each in drawn(figure).iter(f"{SVG}title")]
    # Two steps of two ranks. Phases inside an operation have no box of their own.
    assert sorted(titles) == sorted(
        ["forward Net, 400 us", "backward, 500 us", "optimizer SGD, 90 us", "all_reduce, 350 us"] * 4
    )
    assert "rank 1: ranks 0-1" in [each.text for each in drawn(figure).findall(f"{SVG}text")]


def test_what_is_no_timeline_cannot_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, figure = tmp_path / "trace.json", tmp_path / "trace.svg"
    path.write_text(timeline_text(events(), hosts=["a", "a"]))
    assert main(["trace", "draw", str(path), str(figure), "--steps", "4"]) == 2
    assert "has 4 steps of an optimizer on rank 0; want more than 4" in capsys.readouterr().err
    path.write_text("{}")
    assert main(["trace", "draw", str(path), str(figure)]) == 2
    assert "is not a timeline" in capsys.readouterr().err
    assert not figure.exists()
