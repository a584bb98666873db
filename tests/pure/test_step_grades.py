"""Steps in a timeline, and the grade of a prediction against them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.pure.test_script_profile import PROFILE
from tests.support.timelines import timeline_text

from multiring._cli import main
from multiring._diagnosis.recorded_steps import RecordedBucket, RecordedSteps, steps_of
from multiring._diagnosis.step_grades import grades_of, score_of
from multiring._simulator.presets import preset
from multiring._simulator.script_profile import step_profile_of
from multiring._simulator.step import part_of, step_of
from multiring.errors import ArgumentError

STEP = 100_000  # us: 30 other, 25 compute, 15 exposed, 20 update, 10 other


def timeline(steps: int = 8, ranks: int = 2, *, late_us: int = 2000, slow_us: int = 0) -> list[dict[str, Any]]:
    """Return a timeline in which the last rank starts each reduction `late_us` after the others.

    Rank 0 begins every second forward `slow_us` earlier, and rank 1 each of the others.
    """
    events: list[dict[str, Any]] = []
    rows = {1: "program", 2: f"ranks 0-{ranks - 1}", 3: f"ranks 0-{ranks - 1} (2)", 4: "other threads"}
    for rank in range(ranks):
        for tid, name in rows.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})

        def add(tid: int, kind: str, name: str, start: int, end: int, rank: int = rank, **told: int) -> None:
            event = {"ph": "X", "cat": kind, "name": name, "pid": rank, "tid": tid, "ts": start, "dur": end - start}
            events.append({**event, "args": told})

        late = late_us if rank == ranks - 1 else 0
        for step in range(steps):
            at = step * STEP
            begin = at + 30_000 - (slow_us if step % 2 == rank else 0)
            add(1, "forward", "forward Net", begin, at + 40_000)
            add(1, "backward", "backward", at + 42_000, at + 55_000)
            # Two reductions in flight together, and a small one that decides something.
            add(2, "operation", "all_reduce", at + 50_000 + late, at + 60_000, operation=3 * step, bytes=3 << 20)
            add(3, "operation", "all_reduce", at + 55_000, at + 70_000, operation=3 * step + 1, bytes=6 << 20)
            add(2, "operation", "all_reduce", at + 69_000, at + 69_100, operation=3 * step + 2, bytes=4)
            add(1, "wait", "wait", at + 55_000, at + 65_000)
            add(4, "wait", "wait", at + 60_000, at + 70_000)
            add(1, "optimizer", "optimizer SGD", at + 70_000, at + 90_000)
    return events


def test_the_parts_of_recorded_steps() -> None:
    found = steps_of(timeline(), ((0, 1),))
    assert (found.ranks, found.steps) == (2, 5)
    parts = (found.step, found.compute, found.exposed, found.update, found.outside)
    assert parts == pytest.approx((0.1, 0.025, 0.015, 0.02, 0.04))
    # A bucket begins once all ranks have started it and the bucket before it has ended.
    assert [each.size_bytes for each in found.buckets] == [3 << 20, 6 << 20]
    assert [each.seconds for each in found.buckets] == pytest.approx([0.008, 0.01])
    with pytest.raises(ArgumentError, match="rank 0 has 2 steps with forward, backward and optimizer after 3"):
        steps_of(timeline(5), ((0, 1),))
    with pytest.raises(ArgumentError, match="the steps of 1 ranks; want a run of at least 2"):
        steps_of(timeline(8, 1), ((0,),))


def test_the_slowest_rank_of_each_step_is_waited_for() -> None:
    """Each of two ranks is the slow one in every second step, so one of them always is."""
    assert steps_of(timeline(9), ((0, 1),)).waiting == 0
    found = steps_of(timeline(9, slow_us=5000), ((0, 1),))
    assert (found.compute, found.waiting) == pytest.approx((0.0275, 0.0025))


def test_a_perfect_prediction_has_no_error_and_input_scores_nothing() -> None:
    step = step_of(step_profile_of([PROFILE], 2), part_of(preset("ddl").topology, 2))
    recorded = RecordedSteps(
        hosts=((0, 1),),
        steps=9,
        step=step.seconds.total,
        compute=step.seconds.compute,
        exposed=step.seconds.exchange,
        update=step.seconds.update,
        outside=step.seconds.outside,
        buckets=tuple(RecordedBucket(each.size_bytes, each.end_s - each.start_s) for each in step.buckets),
        computes=((step.seconds.compute,) * 9,) * 2,
    )
    grades = grades_of(step, recorded, takes_hosts=True)
    assert score_of(grades) == pytest.approx(0, abs=1e-12)
    assert [each.part for each in grades if each.is_input] == ["ranks", "hosts"]
    wrong = grades_of(step, replace(recorded, step=2 * recorded.step, update=3 * recorded.update), takes_hosts=False)
    errors = {each.part: each.error for each in wrong if each.error is not None}
    assert errors["step"] == pytest.approx(0.5)
    # The update is less than a fifth of this step.
    assert errors["update"] == pytest.approx(2 * recorded.update / (2 * recorded.step))
    assert errors["compute"] == pytest.approx(0)
    of = {each.part: each.of for each in wrong}
    assert (of["step"], of["update"], of["compute"]) == ("itself", "the step", "itself")
    assert score_of(wrong) == pytest.approx(sum(errors.values()) / len(errors))
    with pytest.raises(ArgumentError, match="want the timeline of the profiled program"):
        grades_of(step, replace(recorded, buckets=recorded.buckets[:1]), takes_hosts=True)


def test_the_command_prints_the_grade(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, run = tmp_path / "profile.json", tmp_path / "run.json"
    profile.write_text(PROFILE.as_text())
    run.write_text(timeline_text(timeline(), hosts=["a", "b"]))
    words = ["simulate", "--profile", str(profile), "--against", str(run)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "on 2 ranks, against 5 steps" in said
    assert "Mean error of the predicted parts" in said
    assert main([*words, "--json", "--topology", "ddl"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["part"] for each in found["parts"] if each["source"] == "input"] == ["ranks"]
    for more, reason in (
        (["--ranks", "4"], "--against predicts the step of its timeline alone: leave out --ranks"),
        (["--model", "vgg16"], "leave out --model"),
    ):
        assert main([*words, *more]) == 2
        assert reason in capsys.readouterr().err
    assert main(["simulate", "--against", str(run), "--topology", "ddl"]) == 2
    assert "want --profile FILE, of another run" in capsys.readouterr().err
    run.write_text('{"traceEvents": [], "otherData": {"version": "another program"}}')
    assert main(words) == 2
    assert "is not a timeline of multiring" in capsys.readouterr().err
    kept = [each for each in timeline() if each["pid"] == 0]
    run.write_text(timeline_text(kept, hosts=["a", "b"], missing=[1]))
    assert main(words) == 2
    assert "lacks rank 1; want the timeline of all ranks" in capsys.readouterr().err
