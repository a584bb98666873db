"""A timeline's clocks, parts and file, with simulated ranks."""

import errno
import gzip
import json
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.timelines import NAMES, OPERATION, WAIT, Span, part, part_bytes, row

from multiring._cli import main
from multiring.errors import ArgumentError, StateError
from multiring.trace import (
    Alignment,
    Claim,
    ClockReading,
    Glossary,
    Part,
    TakenError,
    TraceFile,
    best_reading,
    clear,
    file_path,
    follow,
    is_held,
    merge,
    part_path,
    parts_of,
    read_part,
    recorded,
    span,
    start_spans,
    stop_spans,
)
from multiring.trace.chrome import events_of
from multiring.trace.lanes import lanes
from multiring.trace.part import RAIL, REDUCE, RailSample

MOST = 10**15  # nanoseconds, about twelve days
times = st.integers(0, MOST)


# ---- clocks


@given(
    offset=st.integers(-MOST, MOST),
    pings=st.lists(st.tuples(times, *[st.integers(0, 10**6)] * 3), min_size=1, max_size=10),
)
def test_a_reading_is_as_good_as_it_says(offset: int, pings: list[tuple[int, int, int, int]]) -> None:
    stamps = []
    for sent, out, stay, back in pings:
        received = sent + out + offset
        stamps.append((sent, received, received + stay, sent + out + stay + back))
    reading = best_reading(stamps)
    assert abs(reading.offset_ns - offset) <= reading.error_ns
    assert reading.error_ns == min(-(-(out + back) // 2) for _, out, _, back in pings)


@given(
    start=times,
    length=st.integers(1, MOST),
    offset=st.integers(-MOST, MOST),
    drift_ppm=st.integers(-500, 500),
    errors=st.tuples(st.integers(0, 10**5), st.integers(0, 10**5)),
    at=st.lists(st.floats(0, 1), min_size=1),
)
def test_a_drifting_clock_is_aligned_as_well_as_it_was_read(
    start: int, length: int, offset: int, drift_ppm: int, errors: tuple[int, int], at: list[float]
) -> None:
    def true_offset(time_ns: int) -> int:
        return offset + (time_ns - start) * drift_ppm // 10**6

    end = start + length
    readings = (
        ClockReading(start, true_offset(start) + errors[0], errors[0]),
        ClockReading(end, true_offset(end) - errors[1], errors[1]),
    )
    alignment = Alignment(*readings)
    assert alignment.error_ns == max(errors)
    own = np.array(sorted(start + int(share * length) for share in at), np.int64)
    aligned = alignment.aligned(own)
    assert (np.diff(aligned) >= 0).all()
    rounding = 2 + length // 2**50
    # If two readings contradict each other by more than the elapsed time, the clock counts as stopped between them.
    slack = max(errors) + rounding + max(0, sum(errors) - length)
    for time_ns, found in zip(own.tolist(), aligned.tolist(), strict=True):
        assert abs(found - (time_ns + true_offset(time_ns))) <= slack


def test_without_readings_times_stay_and_with_one_they_are_shifted() -> None:
    own = np.array([5, 10], np.int64)
    assert Alignment().aligned(own).tolist() == [5, 10]
    assert Alignment(ClockReading(7, 100, 1)).aligned(own).tolist() == [105, 110]
    assert Alignment(ClockReading(7, 100, 1), ClockReading(7, 300, 1)).aligned(own).tolist() == [105, 110]
    assert Alignment().error_ns == 0


def test_outside_of_the_readings_the_offset_is_theirs() -> None:
    alignment = Alignment(ClockReading(100, 10, 1), ClockReading(200, 30, 1))
    assert alignment.aligned(np.array([0, 100, 150, 200, 300], np.int64)).tolist() == [10, 110, 170, 230, 330]


def test_whose_clock_needs_no_alignment() -> None:
    readings = (ClockReading(10, 5, 1), ClockReading(15, 6, 1), ClockReading(20, 7, 1))
    assert part(0).alignment("clock 0") == Alignment()
    assert part(1, readings=readings).alignment("clock 1") == Alignment()
    assert part(1, readings=readings).alignment("clock 0") == Alignment(readings[0], readings[2])
    assert part(1, readings=readings[:1]).alignment(None) == Alignment(readings[0])


# ---- lanes


stretches = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40).map(
    lambda each: sorted((start, start + length) for start, length in each)
)


@given(stretches)
def test_lanes_are_as_many_as_are_open_at_once(pieces: list[tuple[int, int]]) -> None:
    chosen = lanes(pieces)
    ends: dict[int, int] = {}
    for (start, end), lane in zip(pieces, chosen, strict=True):
        assert ends.get(lane, start) <= start
        ends[lane] = end
    open_at = [sum(s <= start < e for s, e in pieces) for start, _ in pieces]
    assert len(ends) <= max(open_at, default=0) + sum(s == e for s, e in pieces)


# ---- the events


kinds = st.sampled_from([OPERATION, WAIT, REDUCE, RAIL])


@st.composite
def made_up(draw: st.DrawFn, rank: int = 1) -> Part:
    """Return a part that a rank could have recorded: concurrent operations, and sequential waits and spans."""
    each = []
    for number in range(draw(st.integers(0, 12))):
        start = draw(st.integers(0, 10_000))
        agreed = start + draw(st.integers(0, 1000))
        end = agreed + draw(st.integers(0, 1000))
        key = {"group": draw(st.integers(1, 3)), "sequence": 3 * (number + 1)}
        never = draw(st.booleans())
        name = draw(st.integers(0, 2))
        fields = {"agreed": 0 if never else agreed, "bytes": draw(st.integers(0, 99)), "name": name, "digest": 7}
        each.append(row(OPERATION, start, end, fault=2 if never else 0, **fields, **key))
        cuts = sorted(draw(st.lists(st.integers(start, end), max_size=6)))
        for first, last in zip(cuts[::2], cuts[1::2], strict=False):
            each.append(row(REDUCE, first, last, busy=1, **key))
    at = 0
    spans = []
    for _ in range(draw(st.integers(0, 12))):
        at += draw(st.integers(0, 500))
        end = at + draw(st.integers(0, 500))
        thread = draw(st.sampled_from([101, 7, 8]))
        if draw(st.booleans()):
            spans.append(Span("forward Net", "forward", at, end, thread))
        else:
            each.append(row(WAIT, at, end, thread=thread, group=1, sequence=3))
        at = end
    readings = (
        ClockReading(0, draw(st.integers(-MOST, MOST)), 5),
        ClockReading(20_000, draw(st.integers(-MOST, MOST)), 5),
    )
    words: Any = {"operations": {7: ("all_reduce sum", "a plan", "")}, "groups": {1: "ranks 0-1", 2: "ranks 0-1"}}
    return part(rank, *each, spans=tuple(spans), readings=readings, **words)


@given(made_up(), st.booleans())
def test_what_happened_is_in_the_events(made: Part, mark_cycles: bool) -> None:  # noqa: FBT001 -- drawn
    events = events_of(made, made.alignment("clock 0"), mark_cycles=mark_cycles)
    assert json.loads(json.dumps(events)) == events
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ph"] for event in events[: len(events) - len(timed)]] == ["M"] * (len(events) - len(timed))
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert all(event["dur"] >= 0 for event in timed if event["ph"] == "X")
    assert {event["pid"] for event in events} == {1}
    expect_nested(timed)
    operations = [event for event in timed if event.get("cat") == "operation"]
    recorded_operations = made.rows[made.rows["kind"] == OPERATION]
    assert len(operations) == len(recorded_operations)
    assert sum(event["args"]["bytes"] for event in operations) == int(recorded_operations["bytes"].sum())
    assert all(event["args"]["plan"] == "a plan" for event in operations)
    assert sum(event["name"] == "wait" for event in timed) == int((made.rows["kind"] == WAIT).sum())
    assert sum(event["name"] == "forward Net" for event in timed) == len(made.spans)
    assert bool(operations and mark_cycles) == any(event["name"] == "CYCLE_START" for event in timed)


def expect_nested(events: list[dict[str, Any]]) -> None:
    """Check that slices of a row are nested or disjoint, because viewers show other slices wrong."""
    rows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        start = round(event["ts"] * 1000)
        end = start + round(event["dur"] * 1000)
        around = rows[event["pid"], event["tid"]]
        while around and around[-1] <= start:
            around.pop()
        assert not around or end <= around[-1], event
        around.append(end)


def test_an_operation_tells_its_phases_sizes_and_plan() -> None:
    key = {"group": 1, "sequence": 12}
    words: Any = {"operations": {7: ("all_reduce sum", "direct, shm", "")}, "groups": {1: "ranks 0-1"}}
    made = part(
        0,
        row(OPERATION, 1000, 9000, agreed=5000, bytes=8_000_000, digest=7, **key),
        row(REDUCE, 6000, 8000, busy=1500, **key),
        row(WAIT, 2000, 9500, thread=100, **key),
        **words,
    )
    events = events_of(made, Alignment())
    shown = [(each["name"], each["ts"], each["dur"], each["tid"]) for each in events if each["ph"] == "X"]
    assert shown == [
        ("all_reduce", 1.0, 8.0, 2),
        ("agree", 1.0, 4.0, 2),
        ("wait", 2.0, 7.5, 1),
        ("wire", 5.0, 4.0, 2),
        ("reduce", 6.0, 2.0, 2),
    ]
    named = [each["args"]["name"] for each in events if each["ph"] == "M" and "name" in each["args"]]
    assert named == ["rank 0, host0", "program", "ranks 0-1"]
    arguments = {each["name"]: each["args"] for each in events if each["ph"] == "X" and "args" in each}
    assert arguments["all_reduce"] == {
        "operation": 4,
        "bytes": 8_000_000,
        "horovod": "ALLREDUCE",
        "algbw GB/s": 2000.0,
        "title": "all_reduce sum",
        "plan": "direct, shm",
    }
    assert arguments["agree"] == {"horovod": "NEGOTIATE_ALLREDUCE"}
    assert arguments["reduce"] == {"busy_us": 1.5}
    assert arguments["wait"] == {"for": "all_reduce 4 of ranks 0-1"}


def test_the_time_of_an_agreement_is_no_time_of_an_engine() -> None:
    words: Any = {"operations": {7: ("all_reduce sum", "by nccl", "nccl")}, "groups": {1: "ranks 0-1"}}
    key = {"group": 1, "sequence": 12}
    made = part(0, row(OPERATION, 1000, 9000, agreed=5000, bytes=8_000_000, digest=7, **key), **words)
    shown = {each["name"]: each["args"] for each in events_of(made, Alignment()) if each["ph"] == "X"}
    assert list(shown) == ["all_reduce", "agree"]
    assert (shown["all_reduce"]["engine"], shown["all_reduce"]["bytes"]) == ("nccl", 8_000_000)
    assert not any("algbw" in each for each in shown["all_reduce"])


def test_groups_of_the_same_ranks_have_rows_of_their_own_and_messages_share_one() -> None:
    made = part(
        0,
        row(OPERATION, 0, 10, group=1),
        row(OPERATION, 0, 10, group=2),
        row(OPERATION, 5, 15, group=2),
        row(OPERATION, 0, 10, group=8, name=NAMES.index("send")),
        row(OPERATION, 20, 30, group=9, name=NAMES.index("send")),
        groups={1: "ranks 0-1", 2: "ranks 0-1"},
    )
    events = events_of(made, Alignment())
    named = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert list(named.values()) == ["program", "ranks 0-1", "ranks 0-1, group 2", "ranks 0-1, group 2 (2)", "messages"]
    assert [named[each["tid"]] for each in events if each["name"] == "send"] == ["messages", "messages"]


def test_rails_that_were_given_up_and_what_they_carried() -> None:
    samples = (RailSample(0, ((1, 0, 0), (2, 0, 100))), RailSample(10**9, ((1, 0, 10**9), (2, 0, 100))))
    made = part(0, row(RAIL, 500, 600, name=1, sequence=2), rails=samples)
    events = [each for each in events_of(made, Alignment()) if each["ph"] != "M"]
    assert [(each["ph"], each["name"]) for each in events] == [("C", "rail 0"), ("i", "rail 1 to rank 2 is given up")]
    assert events[0]["args"] == {"GB/s": 1.0}


def test_cycles_begin_where_nothing_is_in_flight() -> None:
    made = part(0, row(OPERATION, 0, 10, group=1), row(OPERATION, 5, 20, group=2), row(OPERATION, 20, 30, group=1))
    marks = [each["ts"] for each in events_of(made, Alignment(), mark_cycles=True) if each["name"] == "CYCLE_START"]
    assert marks == [0.0, 0.02]


# ---- parts


def test_a_part_can_be_read_as_far_as_it_was_written() -> None:
    data = part_bytes(1, row(OPERATION, 1, 2, digest=7), row(WAIT, 1, 2))
    whole = read_part(data)
    assert (whole.rank, len(whole.rows), whole.operations[7], whole.groups[1]) == (
        *(1, 2),
        *(("all_reduce sum", "a plan", ""), "ranks 0-1"),
    )
    assert whole.spans == (Span("forward Net", "forward", 1, 2, 100),)
    assert whole.rails == (RailSample(20, ((1, 0, 500),)),)
    assert whole.readings == (ClockReading(10, 1000, 5), ClockReading(100, 2000, 7))
    assert whole.end is not None
    seen = set()
    for length in range(data.index(b"\n") + 1, len(data)):
        cut = read_part(data[:length])
        assert cut.end is None
        seen.add((len(cut.rows), len(cut.spans), len(cut.rails), len(cut.readings)))
    assert seen == {(0, 0, 0, 0), (0, 0, 0, 1), (2, 0, 0, 1), (2, 1, 0, 1), (2, 1, 1, 1), (2, 1, 1, 2)}


@pytest.mark.parametrize("data", [b"", b"\n", b"nonsense\n", b"[1]\n", b'{"block": "rows", "bytes": 0}\n', b"{}\n"])
def test_what_is_no_part_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(ArgumentError, match="not a part of a timeline"):
        read_part(data)


# ---- the file


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_file_appears_whole(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    file = TraceFile(path)
    file.add(part(0, row(OPERATION, 1, 2)))
    file.add(part(1, row(OPERATION, 3, 4), readings=(ClockReading(0, 500, 20),)))
    file.lack(2, "rank 2 died")
    assert not path.exists()
    file.close()
    assert [each.name for each in tmp_path.iterdir()] == [name]
    text = gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()
    found = json.loads(text)
    assert found["displayTimeUnit"] == "ms"
    shown = [(each["pid"], each["ts"]) for each in found["traceEvents"] if each["name"] == "all_reduce"]
    assert shown == [(0, 0.001), (1, 0.503)]
    metadata = found["metadata"]
    assert (metadata["job"], metadata["size"]) == ("a job", 2)
    assert metadata["ranks"]["0"]["clock"] == "rank 0's"
    assert metadata["ranks"]["1"]["clock"] == "aligned, give or take 0.02 us"
    assert metadata["ranks"]["1"]["readings"] == [{"offset_us": 0.5, "error_us": 0.02, "at_us": 0.0}]
    assert metadata["ranks"]["2"] == {"is_missing": "rank 2 died"}
    assert metadata["ranks"]["1"]["is_complete"] is True


def test_a_file_of_nothing_is_a_file(tmp_path: Path) -> None:
    TraceFile(tmp_path / "empty.json").close()
    assert json.loads((tmp_path / "empty.json").read_text())["traceEvents"] == []


def test_a_part_that_was_cut_off_or_lost_events_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path)
    cut = part_bytes(0).rpartition(b'{"block": "end"')[0]
    file.add(read_part(cut))
    lossy = block_end(part_bytes(1), dropped=12, fault="the disk is full")
    file.add(read_part(lossy))
    file.close()
    ranks = json.loads(path.read_text())["metadata"]["ranks"]
    assert (ranks["0"]["is_complete"], ranks["0"]["dropped_events"]) == (False, 0)
    assert (ranks["1"]["is_complete"], ranks["1"]["dropped_events"]) == (False, 12)
    assert ranks["1"]["fault"] == "the disk is full"


def block_end(data: bytes, **fields: Any) -> bytes:
    return data.rpartition(b'{"block": "end"')[0] + json.dumps({"block": "end", "bytes": 0, **fields}).encode() + b"\n"


def test_a_file_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    file.add(part(0, row(OPERATION, 1, 2)))
    file.discard()
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        TraceFile(tmp_path / "nowhere" / "trace.json")


@pytest.mark.parametrize("path", ["", 3, None, b"trace", "a\0b"])
def test_a_path_that_is_none(path: Any) -> None:
    with pytest.raises(ArgumentError, match="want the path of a file"):
        file_path(path)


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)  # as for a folder with mode 0300 and a user other than root
    with pytest.raises(ArgumentError, match="cannot be searched for an earlier timeline: Permission denied"):
        clear(tmp_path / "a.json")


def test_a_path_that_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=r"'a/b.json': there is no directory '.*/a'; make it first"):
        file_path("a/b.json")
    with pytest.raises(ArgumentError, match="is a directory; want a file in it"):
        file_path(tmp_path)
    assert file_path("b.json") == tmp_path / "b.json"


def test_parts_lie_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for name in ("trace.json", "trace.json.rank-10.part", "trace.json.rank-2.part", "trace.json.rank-x.part", "a.part"):
        (tmp_path / name).touch()
    assert parts_of(path) == [part_path(path, 2), part_path(path, 10)]
    clear(path)
    assert {each.name for each in tmp_path.iterdir()} == {"trace.json.rank-x.part", "a.part"}
    assert parts_of(tmp_path / "nowhere" / "trace.json") == []


def test_what_ranks_left_is_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "whole.json"
    for rank in (0, 2):
        part_path(path, rank).write_bytes(part_bytes(rank, row(OPERATION, 30, 40), size=3))
    assert main(["trace", "merge", str(path), *map(str, parts_of(path))]) == 0
    assert capsys.readouterr().err == "multiring: rank 1 is not in the timeline: it left no part here\n"
    found = json.loads(path.read_text())
    ts = {each["pid"]: each["ts"] for each in found["traceEvents"] if each["name"] == "all_reduce"}
    assert ts[0] == 0.03
    assert ts[2] == pytest.approx(0.03 + 1 + 20 / 90, abs=0.002)
    assert len(parts_of(path)) == 2
    assert main(["trace", "merge", str(path), *map(str, parts_of(path))]) == 2
    assert "exists and may be the timeline of other ranks; want another name" in capsys.readouterr().err
    assert main(["trace", "merge", str(tmp_path / "other"), str(tmp_path / "missing.part")]) == 2
    assert "missing.part: No such file or directory" in capsys.readouterr().err


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(part_bytes(0))
    with pytest.raises(ArgumentError, match="no parts"):
        merge([], tmp_path / "out")
    with pytest.raises(ArgumentError, match="a belongs to rank 0 of job a job; want one part of each rank"):
        merge([first, first], tmp_path / "out")
    second.write_bytes(part_bytes(1, timeline="bad"))
    with pytest.raises(
        ArgumentError, match="b belongs to rank 1 of job a job; want one part of each rank, all of one timeline"
    ):
        merge([first, second], tmp_path / "out")
    second.write_bytes(b"else")
    with pytest.raises(ArgumentError, match="b: not a part of a timeline"):
        merge([first, second], tmp_path / "out")
    assert {each.name for each in tmp_path.iterdir()} == {"a", "b"}


# ---- spans


class Listener:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def started(self, _spans: Any) -> None:
        self.heard.append("started")

    def stopped(self) -> None:
        self.heard.append("stopped")


def test_spans_are_kept_while_a_timeline_is_on_only() -> None:
    with span("before"):
        pass
    kept = start_spans()
    try:
        assert recorded() is kept
        with pytest.raises(StateError, match="has a timeline already"):
            start_spans()
        before = time.monotonic_ns()
        with span("outer"), span("inner"):
            pass
        with pytest.raises(ZeroDivisionError), span("failing"):
            _ = 1 // 0
        names = kept.take()
        assert [each.name for each in names] == ["inner", "outer", "failing"]
        assert all(each.kind == "span" and before <= each.start_ns <= each.end_ns for each in names)
        assert names[0].thread == os.getpid()
        assert kept.take() == []
    finally:
        stop_spans()
    stop_spans()
    with span("after"):
        pass
    assert kept.take() == []
    assert recorded() is None


def test_followers_are_told_once() -> None:
    listener = Listener()
    follow(listener)
    follow(listener)
    start_spans()
    late = Listener()
    follow(late)
    child = os.fork()
    if child == 0:
        is_over = recorded() is None and listener.heard == ["started", "stopped"]
        os._exit(0 if is_over else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stop_spans()
    assert listener.heard == ["started", "stopped"]
    assert late.heard == ["started", "stopped"]


def test_a_glossary_forgets_the_oldest() -> None:
    glossary = Glossary()
    for number in range(5000):
        glossary.note(number.to_bytes(16, "little"), f"operation {number}", None if number % 2 else number)
    assert glossary.find(4999) == ("operation 4999", "", "")
    assert glossary.find(4998) == ("operation 4998", "4998", "")
    assert glossary.find(0) is None
    glossary.note(bytes(16), "by an engine", None, "nccl")
    assert glossary.find(0) == ("by an engine", "", "nccl")


# ---- foreign files and files in use ----


def refused(path: Path, what: str) -> str:
    with pytest.raises(ArgumentError, match=what) as error:
        clear(path)
    return str(error.value)


def test_nothing_that_is_no_timeline_is_removed_or_replaced(tmp_path: Path) -> None:
    """Foreign files lie at any name that a timeline uses, and are found at the start or at the end."""
    foreign = (b"weights", b"{}", b'{"traceEvents":[]}', b'{"traceEvents":[\n]}', b'{"block": "start"}')
    for number, content in enumerate(foreign):
        for name in ("trace.json", "trace.json.gz"):
            path = tmp_path / str(number) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            assert str(path) in refused(path, "no timeline that multiring wrote; it was left as it is")
            with pytest.raises(FileExistsError):
                TraceFile(path)
            part = part_path(path.parent / "other.json", number)
            part.write_bytes(content)
            refused(part.parent / "other.json", "is no part of a timeline")
            with pytest.raises(ArgumentError, match="is no part of a timeline"):
                Claim(part)
            assert path.read_bytes() == part.read_bytes() == content
    late = TraceFile(tmp_path / "late.json")
    (tmp_path / "late.json").write_bytes(b"somebody was quicker")
    with pytest.raises(FileExistsError):
        late.close()
    assert (tmp_path / "late.json").read_bytes() == b"somebody was quicker"
    assert not list(tmp_path.glob("late.json.*"))


def test_what_is_ours_is_removed_also_compressed_or_unfinished(tmp_path: Path) -> None:
    for name in ("trace.json", "trace.json.gz"):
        path = tmp_path / name
        TraceFile(path).close()
        os.close(Claim(part_path(path, 1)).take())
        unfinished = TraceFile(path)
        unfinished._file.write(unfinished._separator)
        unfinished._file.flush()
        assert len(list(tmp_path.iterdir())) == 3
        unfinished._file.close()  # the kernel does the same for a killed process
        clear(path)
        assert not list(tmp_path.iterdir())
        path.touch()
        clear(path)
        assert not path.exists()


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    else:
        path = Path("/dev/null")
    for act in (file_path, clear, Claim):
        with pytest.raises(ArgumentError, match=f"is a {kind}"):
            act(path)
    assert path.exists()
    assert not path.is_file()


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    link = tmp_path / "trace.json"
    link.symlink_to(tmp_path / "data" / "there.json")
    TraceFile(file_path(link)).close()
    assert link.is_symlink()
    assert (tmp_path / "data" / "there.json").is_file()


def test_a_timeline_that_another_process_records_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    program = (
        "import sys; from pathlib import Path; from multiring.trace import Claim; "
        "held = Claim(Path(sys.argv[1])); print(); sys.stdin.read()"
    )
    for rank in (0, 3):
        part = part_path(path, rank)
        command = [sys.executable, "-c", program, str(part)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            assert is_held(part)
            with pytest.raises(TakenError, match="another job is writing its timeline to"):
                clear(path)
            with pytest.raises(TakenError, match="another job is writing its timeline to"):
                Claim(part)
            other.kill()
        assert not is_held(part)
        Claim(part).release()
        assert not part.exists()
