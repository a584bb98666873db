"""`multiring bench` with real jobs: verified results, reported failures, and complete cleanup after every ending."""

import json
import os
import runpy
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from multiring._bench.cases import Question
from multiring._bench.compare import Bench, Bound, Manner
from multiring._bench.job import JobCommand, JobError, Jobs, RankAnswer, WrongResultError, answers
from multiring._bench.libraries import WORKERS, OwnWorker, PeerLibrary
from multiring._bench.peers import PEERS, Knob
from multiring._bench.workers import contract
from multiring._bench.workers.contract import Case, write_cases
from multiring._settings import environment_of

PRETENDER = Path(__file__).parents[1] / "support" / "bench_workers" / "pretender.py"
DEADLINE_S = 240.0
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


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the ranks of the pretender run one after the other in this process; return the list of the jobs' titles.

    What a bench makes of the answers is the same as with jobs of processes, which later tests start.
    """
    titles: list[str] = []

    def run(_: Jobs, title: str, start: JobCommand) -> None:
        titles.append(title)
        ranks = int(start.command[start.command.index("-n") + 1])
        monkeypatch.setattr(sys, "argv", list(start.command[start.command.index(str(PRETENDER)) :]))
        for rank in range(ranks):
            for name, value in environment_of(rank=rank, size=ranks).items():
                monkeypatch.setenv(name, value)
            runpy.run_path(str(PRETENDER), run_name="__main__")

    monkeypatch.setattr(sys, "path", list(sys.path))  # the pretender extends it
    monkeypatch.setattr(Jobs, "run", run)
    return titles


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


def test_libraries_are_held_against_ours(jobs: Jobs, told: list[str]) -> None:
    progress: list[str] = []
    ours = OwnWorker(name="multiring", engine="shm", worker=PRETENDER)
    libraries = [ours, pretender("slow"), pretender("fast"), pretender("refuser"), pretender("bound")]
    manner = Manner(alternations=2, seconds=0.2)
    comparison = Bench(jobs, libraries, manner, progress.append).compare(QUESTION)

    seconds = {timing.library: timing.seconds for timing in comparison.timings}
    # Of two ranks the second is twice as slow, and the slower rank counts.
    assert seconds == {"multiring": [0.004] * 2, "slow": [0.008] * 2, "fast": [0.002] * 2, "refuser": []}
    # As many calls are timed as fit.
    calls = {timing.library: timing.calls for timing in comparison.timings if timing.seconds}
    assert calls == {"multiring": 50, "slow": 25, "fast": 100}
    assert {timing.library: timing.not_offered for timing in comparison.timings}["refuser"] == "it never does"
    best = comparison.best_peer
    assert best is not None
    assert best.library == "fast"
    advantage = comparison.advantage_over(best)
    assert advantage is not None
    assert (advantage.low, advantage.middle, advantage.high) == (0.5, 0.5, 0.5)
    assert comparison.bound == Bound(4096 / 0.004)
    assert progress == [
        *(f"verifying {name}" for name in ("multiring", "slow", "fast", "refuser", "bound")),
        *(f"alternation 1 of 2: {name}" for name in ("multiring", "slow", "fast", "bound")),
        *(f"alternation 2 of 2: {name}" for name in ("bound", "fast", "slow", "multiring")),
    ]
    assert len(told) == len(progress)


def test_sizes_share_a_job_where_the_same_is_set(jobs: Jobs, told: list[str]) -> None:
    questions = [(replace(QUESTION, size_bytes=size_bytes), 0) for size_bytes in (64, 4096, 8192)]
    ours = OwnWorker(name="multiring", engine="shm", worker=PRETENDER)
    gloo = PeerLibrary(peer=replace(PEERS["gloo"], worker=PRETENDER, knobs=(SMALL,)))
    compared = Bench(jobs, [ours, gloo], Manner(alternations=1, calls=3)).compare_together(questions)
    assert [each.question.size_bytes for each in compared] == [64, 4096, 8192]
    assert all(timing.seconds == [0.004] for each in compared for timing in each.timings)
    verified = ["multiring, all_reduce of 64, 4096, 8192 bytes", "gloo, all_reduce of 64 bytes"]
    verified.append("gloo, all_reduce of 4096, 8192 bytes")
    assert told == verified * 2


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
        jobs.run("x", JobCommand(command=("no-such-launcher",), variables={}))


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
from multiring._bench.cases import Question
from multiring._bench.compare import Bench, Manner
from multiring._bench.job import Jobs, StoppedError
from multiring._bench.libraries import OwnWorker

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


def answered(jobs: Jobs, script: str, cases: dict[str, Case]) -> dict[str, list[RankAnswer]]:
    """Return the answers of three ranks to each of the cases, which share one job: starting ranks takes longest."""
    folder = jobs.folder / "a b%20c#d"  # Gloo meets in a folder of any name
    folder.mkdir()
    for name in cases:
        (folder / name).mkdir()
    write_cases([replace(case, out_dir=str(folder / name)) for name, case in cases.items()], folder / "case.json")
    jobs.run(script, OwnWorker(name=script, engine="", worker=WORKERS / script).start(folder / "case.json", 3))
    return {name: answers(folder / name, 3) for name in cases}


def case(library: str, collective: str, dtype: str = "float32", op: str = "sum", buffers: str = "ordinary") -> Case:
    count = 0 if collective == "barrier" else 999
    return Case(
        library=library,
        collective=collective,
        dtype=dtype,
        op=op,
        count=count,
        out_dir="",
        buffers=buffers,
        pool_bytes=12_000,  # several buffers
        calls=5,
    )


def cases_of(library: str, buffers: str) -> dict[str, Case]:
    """Return every collective, and every size of an element."""
    cases = {each: case(library, each, buffers=buffers) for each in contract.COLLECTIVES}
    return cases | {each: case(library, "all_reduce", each, "max", buffers) for each in ("bfloat16", "int8", "float64")}


CASES = {
    "multiring_worker.py": {
        f"{buffers} {name}": each
        for buffers in ("arena", "ordinary")
        for name, each in cases_of("multiring", buffers).items()
    },
    "torch_distributed.py": cases_of("gloo", "ordinary")
    | {
        f"ours {buffers} {collective}": case(contract.TORCH_OURS, collective, op=op, buffers=buffers)
        for buffers in ("arena", "ordinary")
        for collective, op in (("all_reduce", "average"), ("reduce_scatter", "sum"))
    },
    "bound.py": {each: case("bound", each, buffers="") for each in contract.COLLECTIVES},
}


@pytest.mark.parametrize("script", CASES)
def test_workers_do_every_collective_and_type_on_every_buffer_of_the_pool(jobs: Jobs, script: str) -> None:
    refused = {"average": case("gloo", "all_reduce", op="average")} if script == "torch_distributed.py" else {}
    given = answered(jobs, script, refused | CASES[script])
    for name in refused:
        assert [answer.not_offered for answer in given.pop(name)] == ["Gloo has no average"] * 3
    for name, each in given.items():
        assert [len(answer.seconds) for answer in each] == [1 if script == "bound.py" else 5] * 3, name
        assert all(answer.version and not answer.not_offered for answer in each), name


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
    options = ["--against", "mpich", "--sizes", "64KiB", "--alternations", "1", "--calls", "3", "--pool-mib", "1"]
    done = bench("all_reduce", *options, "--json", "--plot", str(tmp_path / "figure.svg"))
    assert done.returncode == 0, done.stderr
    records = [SimpleNamespace(**json.loads(line)) for line in done.stdout.splitlines()]
    assert [(record.library, record.pool_bytes) for record in records] == [
        ("multiring", 0),
        ("mpich", 0),
        ("multiring", 1 << 20),
        ("mpich", 1 << 20),
    ]
    for record in records:
        assert vars(record).keys() >= FIELDS
        assert record.verified
        assert record.size_bytes == 65536
        assert record.algbw_bytes_per_s == record.busbw_bytes_per_s == 65536 / record.median_s
        assert record.bound_bytes_per_s > 0
        assert not record.publishable  # a single alternation
    ours, mpich, *_ = records
    assert (ours.against, mpich.against) == ("mpich", "multiring")
    assert ours.ratio == pytest.approx(mpich.median_s / ours.median_s) == pytest.approx(1 / mpich.ratio)
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
    options = ["--against", "none", "--sizes", "64", "--alternations", "1", "--calls", "3", *form]
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
