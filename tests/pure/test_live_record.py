"""The record of a running job: what steps count, how waits divide, torn lines, hostile values, and OpenMetrics."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from multiring._launch.live_page import PageAddress
from multiring._launch.live_record import LiveRecord, read_record
from multiring._launch.live_state import Curve, LiveState
from multiring._runtime.tracing.wait_split import rows_of, split_of
from multiring._steps import step_counters
from multiring._steps.step_counters import StepCounters, log_metrics, with_timed_waits
from multiring._steps.step_report import (
    MOST_REPORT_BYTES,
    RailTotals,
    StepReport,
    decode_report,
    encode_report,
    report_in,
)
from multiring.errors import ArgumentError

HOSTILE = '<img src=x onerror="document.title=1">\\"\n\u2028\ud800' + "x" * 90
SECOND = 1_000_000_000


def state_of(record: bytes) -> LiveState:
    state = LiveState()
    for line in record.split(b"\n"):
        state.take(line)
    return state


def values_of(state: LiveState) -> dict[str, float]:
    """Return the samples of the metrics by name and labels, as a parser of OpenMetrics reads them."""
    text = state.metrics().encode("utf-8", "replace").decode()
    found = {}
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]  # it has no types
        assert family.documentation
        assert family.type in {"counter", "gauge"}
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
            found[sample.name + json.dumps(sample.labels, sort_keys=True)] = sample.value
    return found


def covered(spans: list[tuple[int, int]], begin: int, end: int) -> NDArray[np.bool_]:
    found = np.zeros(end - begin, bool)
    for first, last in spans:
        found[max(0, first - begin) : max(0, last - begin)] = True
    return found


@pytest.mark.parametrize("seed", range(20))
def test_waits_divide_as_moment_by_moment(seed: int) -> None:
    dice = np.random.default_rng(seed)
    begin, end = sorted(dice.choice(200, 2, replace=False).tolist())
    waits, moving, absent, events, sizes = [], [], [], [], 0
    for _ in range(int(dice.integers(0, 30))):
        start, agreed, over = sorted(dice.integers(0, 200, 3).tolist())
        if dice.integers(2):
            waits.append((start, over))
            events.append((1, 0, 1 << 63, 3, 0, start * SECOND, 0, over * SECOND))
        elif agreed == 0 or dice.integers(5) == 0:  # not all ranks came
            events.append((0, 0, 1 << 63, 3, 9, start * SECOND, 0, over * SECOND))
        else:
            absent.append((start, agreed))
            moving.append((agreed, over))
            sizes += 7 * (begin < over <= end)
            events.append((0, 0, (1 << 64) - 1, 3, 7, start * SECOND, agreed * SECOND, over * SECOND))
    wait, move, away = (covered(each, begin, end) for each in (waits, moving, absent))
    found = split_of(rows_of(events), float(begin), float(end))
    assert found == pytest.approx((move.sum(), (move & wait).sum(), (away & wait & ~move).sum(), sizes))


def test_steps_are_those_that_the_program_tells_or_else_reductions() -> None:
    steps = StepCounters()
    for _ in range(3):
        steps.count()
    assert steps.mark is not None
    assert steps.begin is not None
    assert (steps.begin.steps, steps.mark.steps, steps.step) == (1, 3, None)
    steps.tell_step(100)
    steps.count()  # the program counts by itself from now on
    steps.tell_step(110)
    steps.tell_step(110)
    assert (steps.begin.steps, steps.mark.steps, steps.step) == (100, 110, 110)
    first = steps.mark.window
    steps.begin_window()  # an evaluation
    steps.tell_step(111)
    assert (steps.begin, steps.mark.window) == (steps.mark, first + 1)
    steps.tell_step(50)  # back to a checkpoint
    assert (steps.begin, steps.mark.steps, steps.mark.window) == (steps.mark, 50, first + 2)


def test_the_wait_for_a_batch_is_input(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = StepCounters()
    monkeypatch.setattr(step_counters, "STEPS", steps)
    times = iter((0.0, 2.0, 10.0, 13.0, 20.0, 20.5))
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    assert list(with_timed_waits("ab")) == ["a", "b"]
    assert steps.input_s == 5.5


def test_what_a_program_may_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    steps = StepCounters()
    monkeypatch.setattr(step_counters, "STEPS", steps)
    wrong: Any
    for wrong in ("3", None, [1.0], 1j):
        with pytest.raises(ArgumentError, match=r"log_metrics: loss is a \w+; want a number"):
            log_metrics(loss=wrong)
    for wrong in (-1, 1.5, "x"):
        with pytest.raises(ArgumentError, match=r"want an integer of at least 0"):
            log_metrics(step=wrong)
    log_metrics(step=4, loss=1.0)
    assert (steps.metrics, steps.step) == ({}, 4)  # nobody reads them
    steps.is_read = True
    log_metrics(loss=10**400, low=-(10**400), nothing=math.nan, one=np.float32(0.5), yes=np.int64(3))
    assert steps.metrics == pytest.approx(
        {"loss": math.inf, "low": -math.inf, "nothing": math.nan, "one": 0.5, "yes": 3}, nan_ok=True
    )
    steps.wants_metrics = False
    log_metrics(loss=2.0, one=np.float32(9))  # reading an array may cost
    assert (steps.metrics["loss"], steps.metrics["one"]) == (2.0, 0.5)
    with pytest.raises(ArgumentError, match=r"log_metrics: two is not one number"):
        log_metrics(two=np.ones(2))
    many: dict[str, Any] = {"x" * 101: 1.0} | {f"metric {number}": 1.0 for number in range(100)}
    log_metrics(**many)
    assert len(steps.metrics) == step_counters.MOST_METRICS
    assert [each.levelname for each in caplog.records] == ["WARNING"]  # once


def test_a_report_arrives_as_it_was_sent() -> None:
    rail = RailTotals(rail=1, up=2, connections=3, carried_bytes=1 << 40, busy_s=0.25)
    report = StepReport(steps=3, step=9, wall_s=2.5, metrics={HOSTILE: math.inf, "low": -1e308}, rails=(rail,))
    assert decode_report(encode_report(report)) == report
    assert math.isnan(decode_report(encode_report(StepReport(metrics={"a": math.nan}))).metrics["a"])  # type: ignore[union-attr]
    many = StepReport(metrics={chr(0x10FFFF) * 100 + str(number): 1.0 for number in range(32)})
    data = encode_report(many)
    assert len(data) <= MOST_REPORT_BYTES
    assert decode_report(data) == StepReport(metrics={})
    told = report.to_json()
    wrong: Any
    for wrong in (
        {"steps": "3"},
        {"steps": True},
        {"steps": 1 << 70},
        {"wall_s": None},
        {"wall_s": math.nan},
        {"busy_s": math.inf, "metrics": {"a": math.inf}},
        {"metrics": []},
        {"metrics": {"a": "nan"}},
        {"rails": [{}]},
        {"rails": 3},
    ):
        assert report_in({**told, **wrong}) is None, wrong
    for data in (b"", b"{", b"[" * 100_000, b"3", b'{"steps":1}', b"\xff"):
        assert decode_report(data) is None


def test_a_record_goes_on_after_a_torn_line_and_is_read_cut_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.jsonl"
    for torn in ("", '{"kind":"steps","rank":0,"gene'):
        record = LiveRecord(path, pytest.fail)
        with pytest.raises(ArgumentError, match=r"another job writes to it"):
            LiveRecord(path, pytest.fail)
        record.begin("job", "train.py")
        record.begin_start(2, [("a", 1), ("b", 1)])
        record.add_newcomer(2, "c")
        record.add_steps(1, StepReport(steps=5, wall_s=1.0, metrics={HOSTILE: math.nan}))
        record.add_text(HOSTILE)
        record.add_end(1, -9, "killed by SIGKILL")
        record.end(137)
        with path.open("a") as file:
            file.write(torn)
    data = path.read_bytes()
    kinds = ["job", "start", "newcomer", "steps", "said", "ended", "over"]
    assert [each["kind"] for each in read_record(data)] == 2 * kinds
    whole = list(read_record(data))
    for cut in range(0, len(data), 7):
        found = list(read_record(data[:cut]))
        assert found == whole[: len(found)]
        assert len(found) >= data[:cut].count(b"\n") - 1
        state_of(data[:cut]).snapshot()
    path.write_bytes(b"notes\n")
    with pytest.raises(ArgumentError, match=r"is not a record that multiring wrote; it was not changed"):
        LiveRecord(path, pytest.fail)
    assert path.read_bytes() == b"notes\n"
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path / "pipe", tmp_path, path / "below"):
        with pytest.raises(ArgumentError, match=r"--record .*want"):
            LiveRecord(wrong, pytest.fail)


def test_a_full_disk_ends_the_record_and_not_the_job() -> None:
    said: list[str] = []
    record = LiveRecord(None, said.append)
    os.dup2(os.open("/dev/full", os.O_WRONLY), record.descriptor)
    record.begin("job", "train.py")
    record.add_text("more")
    assert said == ["the record of this job is cut off: No space left on device; the job goes on without it"]


def recorded(rank: int, at_s: float, report: StepReport) -> bytes:
    return json.dumps({"kind": "steps", "rank": rank, "at_s": at_s, **report.to_json()}).encode()


def test_the_page_and_the_metrics_say_what_the_record_says() -> None:
    state = state_of(
        b"\n".join(
            [
                json.dumps({"kind": "job", "format": 1, "job": "j", "program": HOSTILE, "at_s": 1}).encode(),
                json.dumps({"kind": "start", "ranks": 2, "hosts": [[HOSTILE, 2]], "at_s": 2}).encode(),
                recorded(0, 10, StepReport(steps=10, wall_s=10.0, metrics={HOSTILE: 1e308, "loss": math.nan})),
                recorded(
                    0,
                    20,
                    StepReport(
                        steps=15,
                        step=115,
                        wall_s=20.0,
                        input_s=1.0,
                        peers_s=2.0,
                        exposed_s=3.0,
                        collective_bytes=(1 << 50) + 1,
                        metrics={HOSTILE: -1e308, "loss": -math.inf},
                        rails=(RailTotals(rail=0, up=1, connections=2, carried_bytes=12345678901, busy_s=0.5),),
                    ),
                ),
                recorded(1, 20, StepReport()),
                recorded(-1, 20, StepReport()),  # there is no such rank
                recorded(1 << 20, 20, StepReport()),
                b'{"kind":"steps","rank":0}',
                b'{"kind":"ended","rank":1,"code":-9,"how":"killed by SIGKILL","at_s":21}',
                b'{"kind":"said","text":3}',
                b"not json",
            ]
        )
    )
    told = json.loads(json.dumps(state.snapshot(), allow_nan=False))
    first, second = told["ranks"]
    assert first["step"] == pytest.approx({"compute": 0.8, "input": 0.2, "waiting": 0.4, "collective": 0.6})
    assert (first["number"], second["step"], second["ended"]) == (115, {}, "killed by SIGKILL")
    assert told["curves"]["loss"] == [[10, "NaN"], [115, "-Infinity"]]
    found = values_of(state)
    assert found['multiring_step_seconds_total{"part": "compute", "rank": "0"}'] == 14.0
    assert found['multiring_collective_bytes_total{"rank": "0"}'] == (1 << 50) + 1
    assert found['multiring_rail_bytes_total{"rail": "0", "rank": "0"}'] == 12345678901
    assert found['multiring_metric{"name": "loss", "rank": "0"}'] == -math.inf
    assert found["multiring_rank_failures_total{}"] == 1
    assert found["multiring_job_starts_total{}"] == 1
    # The ranks start again: their sums begin at 0, and so do the parts of a step.
    state.take(json.dumps({"kind": "start", "ranks": 2, "hosts": [["a", 2]], "at_s": 30}).encode())
    assert values_of(state)["multiring_job_starts_total{}"] == 2
    state.take(recorded(0, 31, StepReport(steps=2, wall_s=1.0)))
    assert state.ranks[0].step() == {}
    state.take(recorded(0, 32, StepReport(steps=1, wall_s=0.5)))  # its program has joined anew
    state.take(recorded(0, 33, StepReport(steps=3, wall_s=1.5)))
    assert state.ranks[0].step()["compute"] == pytest.approx(0.5)
    state.take(b'{"kind":"newcomer","rank":3,"host":"b"}')
    state.take(recorded(3, 34, StepReport(ranks=4)))
    assert [each.host for each in state.ranks] == ["a", "a", "", "b"]
    assert values_of(state)['multiring_rank_running{"host": "b", "rank": "3"}'] == 1
    state.take(b'{"kind":"start","hosts":[["a",1e9]]}')
    state.take(b'{"kind":"job","format":1}')
    assert (state.ranks, state.starts) == ([], 0)


def test_the_metrics_of_no_job_and_of_many_ranks_are_openmetrics() -> None:
    assert values_of(LiveState())["multiring_job_starts_total{}"] == 0
    state = LiveState()
    state.take(json.dumps({"kind": "start", "hosts": [[f"host {n}", 8] for n in range(128)]}).encode())
    for rank in range(1024):
        state.take(recorded(rank, 1.0, StepReport(steps=rank, wall_s=rank / 3)))
    assert values_of(state)['multiring_steps_total{"rank": "1023"}'] == 1023
    assert len(state.snapshot()["ranks"]) == 1024


def test_a_curve_keeps_its_shape_in_a_bounded_space() -> None:
    curve = Curve()
    for step in range(100_000):
        curve.add(step, step**0.5)
    assert 300 <= len(curve.points) <= 600
    assert [each for each, _ in curve.points] == sorted(each for each, _ in curve.points)
    assert max(np.diff([each for each, _ in curve.points])) <= 512
    assert curve.points[-1][0] > 99_000


def test_the_address_of_the_page() -> None:
    assert PageAddress.parse("8080", None) == PageAddress("127.0.0.1", 8080)
    assert PageAddress.parse("[::1]:0", None) == PageAddress("::1", 0)
    assert PageAddress.parse("node0:80", None) == PageAddress("node0", 80)
    for wrong in ("", "x", "80:", "1.2.3.4", "-1", "65536", "٣", "9" * 5000):
        with pytest.raises(ArgumentError, match=r"want \[HOST:\]PORT"):
            PageAddress.parse(wrong, None)
