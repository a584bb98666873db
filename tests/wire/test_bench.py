"""`multiring bench` with real jobs: verified results, reported failures, and complete cleanup after every ending."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multiring.bench.cases import Question
from multiring.bench.compare import Bench, Bound, Manner
from multiring.bench.job import JobError, Jobs, Start, WrongResultError, answers
from multiring.bench.libraries import WORKERS, OwnWorker, PeerLibrary
from multiring.bench.peers import PEERS, Knob
from multiring.bench.workers import contract
from multiring.bench.workers.contract import Case, write_cases

PRETENDER = Path(__file__).parent / "bench_workers" / "pretender.py"
DEADLINE_S = 60.0
QUESTION = Question(collective="all_reduce", ranks=2, size_bytes=4096)
TWICE = Manner(alternations=2, calls=3)
SMALL = Knob(name="OF_SMALL", value="1", when=lambda case, _: case.size_bytes <= 64, why="a test", source="none")


def pretender(name: str) -> OwnWorker:
    return OwnWorker(name=name, engine="none", worker=PRETENDER)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Jobs(DEADLINE_S) as entered:
        yield entered
    assert list(tmp_path.iterdir()) == []


@dataclass
class Marked:
    """A mark in the environment, which child processes inherit and by which the test finds them."""

    mark: str

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                try:
                    environment = (entry / "environ").read_bytes()
                except OSError:
                    continue
                found += [int(entry.name)] * (self.mark.encode() in environment)
        return found


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Marked:
    value = secrets.token_hex(8)
    monkeypatch.setenv("TEST_MARK", value)
    return Marked(f"TEST_MARK={value}")


# ---- comparisons ----


def test_libraries_are_held_against_ours(jobs: Jobs) -> None:
    told: list[str] = []
    ours = OwnWorker(name="multiring", engine="shm", worker=PRETENDER)
    libraries = [ours, pretender("slow"), pretender("fast"), pretender("refuser"), pretender("bound")]
    comparison = Bench(jobs, libraries, TWICE, told.append).compare(QUESTION)

    seconds = {timing.library: timing.seconds for timing in comparison.timings}
    # Of two ranks the second is twice as slow, and the slower rank counts.
    assert seconds == {"multiring": [0.004] * 2, "slow": [0.008] * 2, "fast": [0.002] * 2, "refuser": []}
    assert {timing.library: timing.not_offered for timing in comparison.timings}["refuser"] == "it never does"
    best = comparison.best_peer
    assert best is not None
    assert best.library == "fast"
    advantage = comparison.advantage_over(best)
    assert advantage is not None
    assert (advantage.low, advantage.middle, advantage.high) == (0.5, 0.5, 0.5)
    assert comparison.bound == Bound(4096 / 0.004)
    assert told == [
        *(f"verifying {name}" for name in ("multiring", "slow", "fast", "refuser", "bound")),
        *(f"alternation 1 of 2: {name}" for name in ("multiring", "slow", "fast", "bound")),
        *(f"alternation 2 of 2: {name}" for name in ("bound", "fast", "slow", "multiring")),
    ]


def test_sizes_share_a_job_where_the_same_is_set(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    run_for = Jobs.run_for

    def counted(self: Jobs, title: str, *others: Any) -> list[Any]:
        told.append(title)
        return run_for(self, title, *others)

    monkeypatch.setattr(Jobs, "run_for", counted)
    questions = [(replace(QUESTION, size_bytes=size_bytes), 0) for size_bytes in (64, 4096, 8192)]
    ours = OwnWorker(name="multiring", engine="shm", worker=PRETENDER)
    gloo = PeerLibrary(peer=replace(PEERS["gloo"], worker=PRETENDER, knobs=(SMALL,)))
    compared = Bench(jobs, [ours, gloo], Manner(alternations=1, calls=3)).compare_together(questions)
    assert [each.question.size_bytes for each in compared] == [64, 4096, 8192]
    assert all(timing.seconds == [0.004] for each in compared for timing in each.timings)
    verified = ["multiring, all_reduce of 64, 4096, 8192 bytes", "gloo, all_reduce of 64 bytes"]
    verified.append("gloo, all_reduce of 4096, 8192 bytes")
    assert told == verified * 2


def test_as_many_calls_are_timed_as_fit(jobs: Jobs) -> None:
    slow, fast = (
        Bench(jobs, [pretender("slow"), pretender("fast")], Manner(alternations=1, seconds=0.2))
        .compare(QUESTION)
        .timings
    )
    assert (slow.calls, fast.calls) == (25, 100)


def test_a_wrong_result_ends_the_bench(jobs: Jobs) -> None:
    with pytest.raises(WrongResultError, match="liar has a wrong result: all_reduce sum of 1024 float32, rank 1: 1 of"):
        Bench(jobs, [pretender("multiring"), pretender("liar")], TWICE).compare(QUESTION)


def test_a_failed_job_shows_what_its_ranks_wrote(jobs: Jobs) -> None:
    with pytest.raises(JobError, match=r"(?s)^crasher, all_reduce of 4096 bytes: exit code 1; .*I break on rank 1"):
        Bench(jobs, [pretender("crasher")], TWICE).compare(QUESTION)


def test_a_rank_without_an_answer_is_an_error(jobs: Jobs) -> None:
    with pytest.raises(JobError, match="mute, all_reduce of 4096 bytes: only 0 of 2 ranks wrote their results"):
        Bench(jobs, [pretender("mute")], TWICE).compare(QUESTION)


def test_a_launcher_that_does_not_exist_is_named(jobs: Jobs) -> None:
    with pytest.raises(JobError, match="x: cannot start 'no-such-launcher': No such file"):
        jobs.run("x", Start(command=("no-such-launcher",), variables={}))


def test_a_job_that_hangs_ends_at_its_deadline_with_all_it_started(
    tmp_path: Path, marked: Marked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Jobs(3.0) as jobs, pytest.raises(JobError, match="no end within 3 s; its processes wrote"):
        Bench(jobs, [pretender("litterer")], TWICE).compare(QUESTION)
    assert marked.processes() == []
    assert list(tmp_path.iterdir()) == []


# ---- signals ----

SLEEP = f"""
import sys
from pathlib import Path
from multiring.bench.cases import Question
from multiring.bench.compare import Bench, Manner
from multiring.bench.job import Jobs, StoppedError
from multiring.bench.libraries import OwnWorker

try:
    with Jobs(600.0) as jobs:
        library = OwnWorker(name="litterer", engine="none", worker=Path({str(PRETENDER)!r}))
        Bench(jobs, [library], Manner()).compare(Question(collective="all_reduce", ranks=2, size_bytes=64))
except StoppedError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def wait_until(condition: object, what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"timed out while waiting until {what}"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_all(tmp_path: Path, marked: Marked, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEP],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def all_sleep() -> bool:
        return any("I sleep" in output.read_text() for output in tmp_path.glob("*/output"))

    wait_until(all_sleep, "a rank sleeps")
    process.send_signal(number)
    said, _ = process.communicate(timeout=DEADLINE_S)
    wait_until(lambda: not marked.processes(), "nothing is left")
    if number is signal.SIGKILL:
        assert process.returncode == -number
        return
    assert process.returncode == 128 + number
    assert said == f"{number.name} received\n"
    assert list(tmp_path.iterdir()) == []


# ---- the workers ----


@pytest.mark.parametrize("collective", contract.COLLECTIVES)
@pytest.mark.parametrize(
    ("script", "buffers"),
    [
        ("multiring_worker.py", "arena"),
        ("multiring_worker.py", "ordinary"),
        ("torch_distributed.py", "ordinary"),
        ("bound.py", ""),
    ],
)
def test_workers_do_every_collective_on_every_buffer_of_the_pool(
    jobs: Jobs, script: str, buffers: str, collective: str
) -> None:
    case = Case(
        library=script,
        collective=collective,
        dtype="float32",
        count=0 if collective == "barrier" else 999,
        out_dir=str(jobs.folder),
        buffers=buffers,
        pool_bytes=12_000,
        calls=5,
    )
    write_cases([case], jobs.folder / "case.json")
    library = OwnWorker(name=script, engine="", worker=WORKERS / script)
    jobs.run(script, library.start(jobs.folder / "case.json", 3))
    given = answers(jobs.folder, 3)
    assert [len(answer.seconds) for answer in given] == [1 if script == "bound.py" else 5] * 3
    assert all(answer.version and not answer.not_offered for answer in given)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float64"])
@pytest.mark.parametrize("script", ["multiring_worker.py", "torch_distributed.py"])
def test_workers_reduce_other_types(jobs: Jobs, script: str, dtype: str) -> None:
    case = Case(library=script, collective="all_reduce", dtype=dtype, count=99, out_dir=str(jobs.folder), op="max")
    write_cases([case], jobs.folder / "case.json")
    jobs.run(script, OwnWorker(name=script, engine="", worker=WORKERS / script).start(jobs.folder / "case.json", 2))
    assert len(answers(jobs.folder, 2)) == 2


@pytest.mark.parametrize("buffers", ["arena", "ordinary"])
@pytest.mark.parametrize(("collective", "op"), [("all_reduce", "average"), ("reduce_scatter", "sum")])
def test_the_backend_of_torch_is_timed_like_the_others(jobs: Jobs, collective: str, op: str, buffers: str) -> None:
    case = Case(
        library="multiring-torch",
        collective=collective,
        dtype="float32",
        count=998,
        out_dir=str(jobs.folder),
        op=op,
        buffers=buffers,
        calls=3,
    )
    write_cases([case], jobs.folder / "case.json")
    library = OwnWorker(name="multiring-torch", engine="", worker=WORKERS / "torch_distributed.py")
    jobs.run("multiring-torch", library.start(jobs.folder / "case.json", 2))
    given = answers(jobs.folder, 2)
    assert [len(answer.seconds) for answer in given] == [3, 3]


def test_gloo_meets_in_a_folder_of_any_name(jobs: Jobs) -> None:
    folder = jobs.folder / "a b%20c#d"
    folder.mkdir()
    case = Case(library="gloo", collective="all_reduce", dtype="float32", count=9, out_dir=str(folder), calls=2)
    write_cases([case], folder / "case.json")
    jobs.run(
        "gloo",
        OwnWorker(name="gloo", engine="", worker=WORKERS / "torch_distributed.py").start(folder / "case.json", 2),
    )
    assert len(answers(folder, 2)) == 2


def test_gloo_offers_no_average(jobs: Jobs) -> None:
    case = Case(
        library="gloo", collective="all_reduce", dtype="float32", count=9, out_dir=str(jobs.folder), op="average"
    )
    write_cases([case], jobs.folder / "case.json")
    gloo = OwnWorker(name="gloo", engine="", worker=WORKERS / "torch_distributed.py")
    jobs.run("gloo", gloo.start(jobs.folder / "case.json", 2))
    assert [answer.not_offered for answer in answers(jobs.folder, 2)] == ["Gloo has no average"] * 2


# ---- the command ----

FIELDS = {
    "collective",
    "library",
    "engine",
    "buffers",
    "ranks",
    "hosts",
    "size_bytes",
    "dtype",
    "median_s",
    "algbw_bytes_per_s",
    "busbw_bytes_per_s",
    "bound_bytes_per_s",
    "bound_formula",
    "verified",
    "interval",
    "hardware",
    "commit",
    "command",
}


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "multiring", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S * 2,
        check=False,
    )


def test_the_command_prints_a_record_for_each_library_and_pool(tmp_path: Path) -> None:
    options = ["--against", "gloo", "--sizes", "64KiB", "--alternations", "1", "--calls", "3", "--pool-mib", "1"]
    done = bench("all_reduce", *options, "--json", "--plot", str(tmp_path / "figure.svg"))
    assert done.returncode == 0, done.stderr
    records = [SimpleNamespace(**json.loads(line)) for line in done.stdout.splitlines()]
    assert [(record.library, record.pool_bytes) for record in records] == [
        ("multiring", 0),
        ("gloo", 0),
        ("multiring", 1 << 20),
        ("gloo", 1 << 20),
    ]
    for record in records:
        assert vars(record).keys() >= FIELDS
        assert record.verified
        assert record.size_bytes == 65536
        assert record.algbw_bytes_per_s == record.busbw_bytes_per_s == 65536 / record.median_s
        assert record.bound_bytes_per_s > 0
        assert not record.publishable  # a single alternation
    ours, gloo, *_ = records
    assert (ours.against, gloo.against) == ("gloo", "multiring")
    assert ours.ratio == pytest.approx(gloo.median_s / ours.median_s) == pytest.approx(1 / gloo.ratio)
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_the_table_says_what_was_done() -> None:
    done = bench("barrier", "--against", "gloo", "--alternations", "1", "--calls", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith("bench barrier --against gloo --alternations 1 --calls 3")
    assert "multiring is faster by" in done.stdout
    assert "not publishable: no 95 % interval from 1 alternations" in done.stdout
    assert any(line.startswith("  gloo: torch 2") and "torch.set_num_threads=1" in line for line in lines)


@pytest.mark.parametrize("form", [["--json"], []])
def test_a_reader_that_goes_ends_it_quietly(tmp_path: Path, marked: Marked, form: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    options = ["--against", "gloo", "--sizes", "64", "--alternations", "1", "--calls", "3", *form]
    done = subprocess.run(
        [sys.executable, "-m", "multiring", "bench", "all_reduce", *options],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S * 2,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ("multiring: timing all_reduce of 64 B: 1 of 1\n" if form else "")
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: not marked.processes(), "nothing is left")


@pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root")
def test_in_a_lab_every_library_is_started_by_a_launcher_it_has_there() -> None:
    options = ["--hosts", "2", "--slots", "2", "--link", "1gbit", "--alternations", "1", "--calls", "2"]
    done = bench("all_reduce", *options, "--against", "gloo", "--sizes", "64KiB", "--json")
    assert done.returncode == 0, done.stderr
    ours, gloo = [SimpleNamespace(**json.loads(line)) for line in done.stdout.splitlines()]
    assert (ours.library, ours.engine, ours.hosts, ours.ranks) == ("multiring", "shm+tcp", 2, 4)
    assert (gloo.library, gloo.hosts, gloo.network) == ("gloo", 2, "lab of 2 hosts x 2 ranks, links of 1gbit")
    assert 0 < ours.bound_bytes_per_s < 1.3e8  # for a wire of 0.125 GB/s
