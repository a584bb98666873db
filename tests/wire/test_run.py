"""`multiring run` with real processes: exit codes, output, and complete cleanup after every ending."""

import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from multiring.errors import PeerLostError

DEADLINE_S = 240.0
# 5 s are promised, which benchmarks measure. On a machine with much other work it may be more, but less than the 30 s
# that ranks have after a signal.
STOP_S = 25.0
GONE_S = 120.0  # how long a busy machine may take until processes that end by themselves have ended
KINDS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

Launcher = Callable[..., "Running"]


class Running:
    """A `multiring run` in its own session; a mark in the environment identifies its processes."""

    def __init__(self, arguments: list[str], environment: dict[str, str], **popen: object) -> None:
        self.mark = f"TEST_MARK={secrets.token_hex(8)}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(  # type: ignore[call-overload]  # keyword arguments as the test gives them
            [sys.executable, "-m", "multiring", "run", *arguments],
            env={**os.environ, **environment, name: value},
            start_new_session=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen},
        )
        self.out = self.err = ""

    def finish(self, deadline_s: float = DEADLINE_S) -> int:
        out, err = self.process.communicate(timeout=deadline_s)
        self.out, self.err = (out or b"").decode(errors="replace"), (err or b"").decode(errors="replace")
        return int(self.process.returncode)

    def wait_for_lines(self, count: int) -> list[str]:
        """Return the next `count` lines of output, which show that the ranks are running."""
        return [self.process.stdout.readline().decode() for _ in range(count)]

    def alive(self) -> dict[int, str]:
        """Return the living processes with the mark and their command lines, independently of the launcher."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def is_gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


@pytest.fixture
def launch() -> Iterator[Launcher]:
    started: list[Running] = []

    def start(*arguments: str, environment: dict[str, str] | None = None, **popen: object) -> Running:
        started.append(Running(list(arguments), environment or {}, **popen))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.communicate()
        for pid in running.alive():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a function that makes a command from Python code; in the code, `rank` is the rank's number."""

    def make(text: str) -> list[str]:
        path = tmp_path / f"script_{secrets.token_hex(4)}.py"
        head = "import os, signal, subprocess, sys, time\nrank = int(os.environ['MULTIRING_RANK'])\n"
        path.write_text(head + textwrap.dedent(text), encoding="utf-8")
        return [sys.executable, "-S", str(path)]

    return make


def sh(text: str) -> list[str]:
    return ["sh", "-c", text]


# -- exit codes


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("exit 0", 0),
        ("exit $((MULTIRING_RANK * 3))", 3),
        ("[ $MULTIRING_RANK = 0 ] || kill -9 $$", 137),
        ("[ $MULTIRING_RANK = 1 ] || kill -SEGV $$", 139),
        ("[ $MULTIRING_RANK = 1 ] || kill -40 $$", 168),
    ],
)
def test_the_exit_code_is_the_jobs(launch: Launcher, text: str, code: int) -> None:
    running = launch("-n", "2", *sh(text))
    assert running.finish() == code
    assert running.is_gone_within(0)


def test_the_code_is_that_of_the_first_rank_that_failed(launch: Launcher) -> None:
    late = "trap 'exit 9' TERM; while :; do sleep 0.05; done"
    running = launch("-n", "3", *sh(f"case $MULTIRING_RANK in 1) sleep 0.2; exit 4;; *) {late};; esac"))
    assert running.finish() == 4
    assert "rank 1 (pid " in running.err
    assert "failed: exit code 4" in running.err


def test_a_failing_ranks_traceback_is_shown_and_the_others_are_stopped(
    launch: Launcher, script: Callable[[str], list[str]]
) -> None:
    running = launch("-n", "3", *script("if rank == 1:\n    raise ValueError('rank one is unhappy')\ntime.sleep(1000)"))
    assert running.finish() == 1
    told = running.err.partition("multiring: rank 1 (pid ")[2]
    assert "failed: exit code 1\nmultiring: its last lines on stderr:\n    Traceback (most recent" in told
    assert "    ValueError: rank one is unhappy\n" in told
    assert "multiring: stopping ranks 0, 2\n" in told
    assert running.is_gone_within(0)


def test_a_signal_is_named_and_silence_is_said(launch: Launcher) -> None:
    running = launch("-n", "1", *sh("kill -ABRT $$"))
    assert running.finish() == 134
    assert "failed: killed by SIGABRT\nmultiring: it wrote nothing on stderr\n" in running.err


def test_a_rank_that_ended_normally_before_the_failure_is_named(launch: Launcher, tmp_path: Path) -> None:
    # Rank 1 waits until the launcher has seen the end of rank 0: until then, the process is there.
    waits = "until [ -s pid ]; do sleep 0.05; done; while kill -0 $(cat pid) 2>/dev/null; do sleep 0.05; done; exit 5"
    first = "echo $$ >new; mv new pid; exit 0"
    running = launch("-n", "2", *sh(f"[ $MULTIRING_RANK = 1 ] || {{ {first}; }}; {waits}"), cwd=tmp_path)
    assert running.finish() == 5
    assert "rank 0 had ended normally (exit code 0) before that" in running.err


def test_the_cause_is_blamed_although_its_consequence_ends_first(launch: Launcher) -> None:
    lost = f"{PeerLostError.__module__}.{PeerLostError.__name__}: rank 1 is gone"
    running = launch(
        "-n", "3", *sh(f"case $MULTIRING_RANK in 0) echo '{lost}' >&2; exit 1;; 1) sleep 0.4; exit 6;; esac; sleep 9")
    )
    assert running.finish() == 6
    assert "rank 1 (pid " in running.err
    assert "rank 0 failed too: exit code 1" in running.err


def test_a_consequence_without_a_cause_is_blamed_after_a_moment(launch: Launcher) -> None:
    lost = f"{PeerLostError.__module__}.{PeerLostError.__name__}: rank 1 left"
    for others in ("sleep 100", "exit 0"):
        text = f"if [ $MULTIRING_RANK = 0 ]; then sleep 0.2; echo '{lost}' >&2; exit 1; fi; {others}"
        running = launch("-n", "2", *sh(text))
        assert running.finish() == 1
        assert "rank 0 (pid " in running.err
        assert ("rank 1 had ended normally" in running.err) == (others == "exit 0")


def test_a_rank_that_ignores_being_asked_is_killed_within_the_promise(launch: Launcher, tmp_path: Path) -> None:
    is_deaf = tmp_path / "deaf"
    deaf = f"trap '' TERM; touch {is_deaf}; while :; do sleep 0.1; done"
    failing = f"until [ -e {is_deaf} ]; do sleep 0.05; done; echo go; exit 3"
    running = launch("-n", "2", *sh(f"[ $MULTIRING_RANK = 1 ] && {{ {failing}; }}; {deaf}"))
    running.wait_for_lines(1)
    begin = time.monotonic()
    assert running.finish() == 3
    assert time.monotonic() - begin < STOP_S
    assert "killing rank 0, which did not stop" in running.err
    assert running.is_gone_within(0)


def test_a_stopped_process_is_ended_too(launch: Launcher) -> None:
    running = launch("-n", "2", *sh("[ $MULTIRING_RANK = 1 ] && { sleep 0.3; exit 3; }; kill -STOP $$"))
    assert running.finish() == 3
    assert "killing" not in running.err


# -- variables of a rank


def test_each_rank_gets_its_place_and_the_jobs_secret(launch: Launcher) -> None:
    command = sh('printf "%s|" "$MULTIRING_RANK" "$MULTIRING_SIZE" "$MULTIRING_LOCAL_RANK" "$MULTIRING_LOCAL_SIZE" '
                 '"$MULTIRING_RENDEZVOUS" "$MULTIRING_SECRET" "$MULTIRING_SECRET_FILE"; echo')  # fmt: skip
    jobs = []
    for _ in range(2):
        running = launch("-n", "3", *command, environment={"MULTIRING_SECRET_FILE": "/outer"})
        assert running.finish() == 0
        ranks = [line.partition("] ")[2].split("|") for line in sorted(running.out.splitlines())]
        assert [rank[:4] for rank in ranks] == [[str(n), "3", str(n), "3"] for n in range(3)]
        assert [rank[6] for rank in ranks] == [""] * 3
        (shared,) = {tuple(rank[4:6]) for rank in ranks}
        jobs.append(shared)
    assert jobs[0][0].startswith("@")
    assert len(jobs[0][1]) == 64
    assert jobs[0][0] != jobs[1][0]
    assert jobs[0][1] != jobs[1][1]


LOOKING_ROUND = """
import os
from pathlib import Path
secret, found, seen = os.environ["MULTIRING_SECRET"].encode(), [], 0
for file in [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]:
    try:
        mode, text = file.stat().st_mode, file.read_bytes()
    except OSError:
        continue  # the process has ended, or is another user's
    seen += 1
    if secret in text and (file.name == "cmdline" or mode & 0o077):
        found.append(str(file))
print(found, seen > 6)
"""


def test_no_other_user_can_read_the_secret(launch: Launcher, script: Callable[[str], list[str]]) -> None:
    running = launch("-n", "2", *script(LOOKING_ROUND))
    assert running.finish() == 0
    assert sorted(running.out.splitlines()) == ["[0] [] True", "[1] [] True"]


def test_the_ranks_share_the_cores_and_know_how_many_threads_they_have(
    launch: Launcher, script: Callable[[str], list[str]]
) -> None:
    text = "print(sorted(os.sched_getaffinity(0)), '|', os.environ['OMP_NUM_THREADS'], flush=True)"
    ranks = len(os.sched_getaffinity(0))
    running = launch("-n", str(ranks), *script(text))
    assert running.finish() == 0
    shares = [json.loads(line.partition("] ")[2].partition(" |")[0]) for line in running.out.splitlines()]
    assert sorted(cpu for share in shares for cpu in share) == sorted(os.sched_getaffinity(0))
    running = launch("-n", str(ranks + 1), *script(text), environment={"OMP_NUM_THREADS": "17"})
    assert running.finish() == 0
    assert running.out.count("| 17\n") == ranks + 1
    assert running.out.count(str(sorted(os.sched_getaffinity(0)))) == ranks + 1


def test_stdin_is_empty_and_python_does_not_buffer(launch: Launcher, script: Callable[[str], list[str]]) -> None:
    running = launch("-n", "2", *script("print(repr(sys.stdin.read()))\nprint('out')\nos.kill(os.getpid(), 9)"))
    assert running.finish() == 137
    assert "] ''\n" in running.out
    assert "] out\n" in running.out


def test_one_rank_may_read_standard_input(launch: Launcher, script: Callable[[str], list[str]]) -> None:
    command = script("""
        if rank == 1:
            sys.stdout.write("(Pdb) ")
            sys.stdout.flush()
        print(repr(sys.stdin.readline()))
    """)
    running = launch("--stdin", "1", "-n", "2", *command, stdin=subprocess.PIPE)
    seen = b""
    while b"(Pdb) " not in seen:  # the prompt has no newline, and it waits for an answer
        seen += os.read(running.process.stdout.fileno(), 1000)
    running.process.stdin.write(b"p x\n")
    running.process.stdin.flush()
    assert running.finish() == 0
    lines = (seen.decode() + running.out).splitlines()
    assert "[0] ''" in lines
    assert [line for line in lines if line.startswith("[1]")][-1].endswith("'p x\\n'")


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        ("2", "rank 2 cannot read standard input: want a rank from 0 to 1"),
        ("-1", "--stdin -1: want a whole number, 0 to "),
    ],
)
def test_no_such_rank_reads_standard_input(launch: Launcher, rank: str, told: str) -> None:
    running = launch(f"--stdin={rank}", "-n", "2", "true")
    assert running.finish() == 2
    assert told in running.err


def test_variables_reach_the_ranks(launch: Launcher) -> None:
    running = launch("--env", "GIVEN=a b", "-n", "1", *sh("echo $GIVEN"))
    assert running.finish() == 0
    assert running.out == "[0] a b\n"


# -- output


def test_every_line_is_tagged_and_stdout_and_stderr_stay_apart(
    launch: Launcher, script: Callable[[str], list[str]], tmp_path: Path
) -> None:
    command = script("""
        os.write(1, b"a\\xff\\x00b\\n" * 2 + b"no end")
        os.write(2, b"error %d\\n" % rank)
    """)
    running = launch("--log-dir", str(tmp_path / "new" / "logs"), "-n", "2", *command)
    out, err = running.process.communicate(timeout=DEADLINE_S)
    assert running.process.returncode == 0
    for rank in (b"0", b"1"):
        lines = [line for line in out.split(b"\n") if line.startswith(b"[%s] " % rank)]
        assert lines == [b"[%s] a\xff\x00b" % rank] * 2 + [b"[%s] no end" % rank]
        assert b"[%s] error %s\n" % (rank, rank) in err
        log = tmp_path / "new" / "logs" / f"rank-{int(rank)}"
        assert log.with_suffix(".out").read_bytes() == b"a\xff\x00b\na\xff\x00b\nno end"
        assert log.with_suffix(".err").read_bytes() == b"error %s\n" % rank
    assert out.count(b"\n") == 6
    assert err.count(b"\n") == 4
    assert NEVER_JOINED.encode() in err
    assert b"multiring: each of the 2 ranks has CPUs of its own, and each computes with " in err


def test_lines_of_different_ranks_never_mix(launch: Launcher, script: Callable[[str], list[str]]) -> None:
    running = launch("-n", "4", *script("for i in range(2000):\n    os.write(1, b'%d' % rank * 50 + b'\\n')"))
    assert running.finish() == 0
    lines = running.out.splitlines()
    assert len(lines) == 8000
    assert set(lines) == {f"[{rank}] " + str(rank) * 50 for rank in range(4)}


def test_a_slow_reader_gets_everything_and_ranks_wait_for_it(
    launch: Launcher, script: Callable[[str], list[str]]
) -> None:
    running = launch("-n", "2", *script("for i in range(40000):\n    os.write(1, b'x' * 99 + b'\\n')"))
    time.sleep(1.0)
    held = int((Path("/proc") / str(running.process.pid) / "statm").read_text(encoding="ascii").split()[1])
    assert running.finish() == 0
    assert len(running.out) == 2 * 40000 * 104
    assert held * resource.getpagesize() < 200 << 20


def test_nobody_reads_the_output(launch: Launcher, script: Callable[[str], list[str]]) -> None:
    running = launch("-n", "2", *script("while True:\n    os.write(1, b'y\\n')\n    time.sleep(0.01)"))
    running.wait_for_lines(1)
    running.process.stdout.close()
    assert running.process.wait(DEADLINE_S) == 128 + signal.SIGPIPE
    assert b"nobody reads the output any more" in running.process.stderr.read()
    assert running.is_gone_within(0)


def test_output_that_cannot_be_written_is_reported(launch: Launcher) -> None:
    with Path("/dev/full").open("wb") as full:
        running = launch("-n", "1", *sh("echo lost; sleep 0.3"), stdout=full)
        assert running.finish() == 0
    assert "the ranks' output is cut off: No space left on device" in running.err


# -- commands that cannot be started


def test_a_missing_interpreter_is_127_and_no_format_126(launch: Launcher, tmp_path: Path) -> None:
    program = tmp_path / "program"
    for text, code in (("#!/no/such/interpreter\n", 127), ("no shebang\n", 126)):
        program.write_text(text, encoding="ascii")
        program.chmod(0o755)
        running = launch("-n", "2", str(program))
        assert running.finish() == code
        assert f"cannot execute '{program}'" in running.err


def test_a_log_directory_that_cannot_be_written(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    running = launch("-n", "2", "--log-dir", str(tmp_path / "file"), "true")
    assert running.finish() == 2
    assert f"cannot write {tmp_path}/file/rank-0.out" in running.err


def test_a_system_that_refuses_leaves_nothing(launch: Launcher) -> None:
    few = (40, 40)
    running = launch("-n", "40", "sleep", "1000", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, few))
    assert running.finish() == 2
    assert "of 40 ranks, then: Too many open files" in running.err
    assert running.is_gone_within(0)


# -- signals to the launcher


@pytest.mark.parametrize("number", KINDS)
def test_a_signal_is_forwarded_and_ends_the_job(
    launch: Launcher, script: Callable[[str], list[str]], number: signal.Signals
) -> None:
    command = script(f"""
        def heard(n, frame):
            print('heard', n, flush=True)
            sys.exit(0)
        signal.signal({int(number)}, heard)
        print('up', flush=True)
        time.sleep(1000)
    """)
    running = launch("-n", "2", *command)
    running.wait_for_lines(2)
    running.process.send_signal(number)
    assert running.finish() == 128 + number
    assert running.out.count(f"heard {int(number)}\n") == 2
    assert f"multiring: {number.name} received" in running.err
    assert running.is_gone_within(0)


def test_asking_twice_kills_at_once(launch: Launcher) -> None:
    running = launch("-n", "2", *sh("trap '' INT TERM; echo up; while :; do sleep 0.1; done"))
    running.wait_for_lines(2)
    begin = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    while b"SIGINT received" not in running.process.stderr.readline():  # else, two signals may be one
        assert running.process.poll() is None
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 130
    assert time.monotonic() - begin < STOP_S
    assert running.is_gone_within(0)


def test_a_signal_leaves_ten_seconds_to_save_together(
    launch: Launcher, script: Callable[[str], list[str]], tmp_path: Path
) -> None:
    # The save takes far longer than the grace period after a failure. It needs a collective and outlasts other ranks.
    python, _, program = script("""
        import numpy as np
        import multiring

        group = multiring.init()
        asked = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: asked.append(number))
        print("up")
        while not asked:
            time.sleep(0.05)
        time.sleep(4.0)
        data = np.ones(4)
        group.all_reduce(data)
        multiring.shutdown()
        if rank == 0:
            time.sleep(6.0)
            open(sys.argv[1], "w").write(str(data.sum()))
    """)
    kinds = (signal.SIGINT, signal.SIGTERM)
    running = {number: launch("-n", "2", python, program, str(tmp_path / number.name)) for number in kinds}
    for job in running.values():
        job.wait_for_lines(2)
    begin = time.monotonic()
    for number, job in running.items():
        job.process.send_signal(number)
    for number, job in running.items():
        assert job.finish() == 128 + number
        assert time.monotonic() - begin > 9.0
        assert (tmp_path / number.name).read_text() == "8.0"
        assert "which may take 30 s; a second signal kills now" in job.err
        assert "killing" not in job.err


def test_the_grace_can_be_chosen(launch: Launcher) -> None:
    running = launch("--grace", "0.5", "-n", "2", *sh("trap '' INT; echo up; while :; do sleep 0.1; done"))
    running.wait_for_lines(2)
    begin = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 130
    assert time.monotonic() - begin < STOP_S
    assert "killing ranks 0, 1, which did not stop" in running.err


def test_a_signal_that_is_ignored_on_entry_stays_ignored(launch: Launcher) -> None:
    running = launch(
        "-n", "1", *sh("echo up; sleep 1"), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    running.wait_for_lines(1)
    running.process.send_signal(signal.SIGHUP)
    assert running.finish() == 0


# -- cleanup

FAMILY = """
    import multiprocessing
    def work():
        if DEAF:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if __name__ == '__main__':
        for _ in range(2):
            multiprocessing.Process(target=work).start()
        subprocess.Popen(['sleep', '1000'], start_new_session=True)
        time.sleep(0.1)
        print('up', flush=True)
"""


def family(then: str, *, deaf: bool = False) -> str:
    """Return the code of a rank with two data-loader workers and a detached child.

    Args:
        then: code that the rank runs once all processes are up.
        deaf: whether the workers ignore SIGTERM, which costs the grace period.
    """
    return f"DEAF = {deaf}\n{textwrap.dedent(FAMILY)}    {then}\n"


def test_ranks_that_are_over_take_their_children_with_them(
    launch: Launcher, script: Callable[[str], list[str]]
) -> None:
    running = launch("-n", "2", *script(family("os._exit(0)", deaf=True)))
    assert running.finish() == 0
    assert running.is_gone_within(0)


def test_a_killed_ranks_children_go_with_the_job(launch: Launcher, script: Callable[[str], list[str]]) -> None:
    running = launch("-n", "2", *script(family("rank == 1 and os.kill(os.getpid(), 9); time.sleep(1000)")))
    running.wait_for_lines(2)
    begin = time.monotonic()
    assert running.finish() == 137
    assert time.monotonic() - begin < STOP_S
    assert running.is_gone_within(0)


@pytest.mark.parametrize(("ranks", "deaf"), [(1, False), (2, True), (4, False)])
def test_kill_9_of_the_launcher_leaves_nothing(
    launch: Launcher, script: Callable[[str], list[str]], ranks: int, *, deaf: bool
) -> None:
    running = launch("-n", str(ranks), *script(family("time.sleep(1000)", deaf=deaf)))
    running.wait_for_lines(ranks)
    assert len(running.alive()) >= 4 * ranks
    running.process.kill()
    assert running.is_gone_within(GONE_S), running.alive()


def test_kill_9_of_the_launcher_while_it_starts_ranks(launch: Launcher) -> None:
    for delay_s in (0.05, 0.15, 0.25, 0.35):
        running = launch("-n", "32", "sleep", "1000")
        time.sleep(delay_s)
        running.process.kill()
        assert running.is_gone_within(GONE_S), running.alive()


def test_kill_9_of_the_launchers_whole_group(launch: Launcher, script: Callable[[str], list[str]]) -> None:
    running = launch("-n", "2", *script(family("time.sleep(1000)")))
    running.wait_for_lines(2)
    os.killpg(running.process.pid, signal.SIGKILL)
    assert running.is_gone_within(GONE_S), running.alive()


def test_a_child_with_another_environment_is_found_through_its_ranks_group(
    launch: Launcher, script: Callable[[str], list[str]]
) -> None:
    command = script("""
        child = subprocess.Popen(['sleep', '1000'], env={})
        print(child.pid, flush=True)
        time.sleep(1000)
    """)
    running = launch("-n", "1", *command)
    (line,) = running.wait_for_lines(1)
    child = Path("/proc") / line.split()[1]
    assert child.exists()
    running.process.kill()
    deadline = time.monotonic() + GONE_S
    while child.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists()


def test_a_killed_guard_is_missed_by_nobody(launch: Launcher, tmp_path: Path) -> None:
    running = launch("-n", "1", *sh("echo up; until [ -e killed ]; do sleep 0.05; done; echo end"), cwd=tmp_path)
    running.wait_for_lines(1)
    (guard,) = [
        pid for pid, command in running.alive().items() if "multiring" in command and pid != running.process.pid
    ]
    os.kill(guard, signal.SIGKILL)
    (tmp_path / "killed").touch()
    assert running.finish() == 0
    assert "end" in running.out


def test_a_job_within_a_rank_ends_with_the_outer_job(launch: Launcher, script: Callable[[str], list[str]]) -> None:
    inner = [sys.executable, "-m", "multiring", "run", "-n", "2", *script(family("time.sleep(1000)"))]
    running = launch("-n", "1", *inner)
    assert all(line.startswith("[0] [") for line in running.wait_for_lines(2))
    running.process.kill()
    assert running.is_gone_within(GONE_S), running.alive()


def test_64_ranks_start_and_end(launch: Launcher) -> None:
    running = launch("-n", "64", *sh("echo $MULTIRING_RANK"))
    assert running.finish() == 0
    assert sorted(running.out.split()[1::2], key=int) == [str(rank) for rank in range(64)]


NEVER_JOINED = "multiring: none of the 2 ranks joined the job: "
NO_TIMELINE = "multiring: nobody wrote the timeline "
# Code with which each rank joins: a program, the framework's adapter, or torch's own call.
JOINING = {
    "init": "import multiring; multiring.init()",
    "a child": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import multiring; multiring.init()'])",
    "torch": "import torch.distributed as dist, multiring.torch; dist.init_process_group('multiring'); dist.barrier()",
}


@pytest.mark.parametrize("name", [*JOINING, "nothing"])
def test_ranks_that_never_join_are_told_of(name: str, launch: Launcher, tmp_path: Path) -> None:
    program = [sys.executable, "-c", JOINING.get(name, "print('trained')")]
    with_timeline = ["--timeline", str(tmp_path / "job.json")] if name in ("init", "nothing") else []
    running = launch("-n", "2", *with_timeline, "--", *program)
    assert running.finish(240.0) == 0, running.err
    assert (NEVER_JOINED in running.err) == (name == "nothing"), running.err
    assert (NO_TIMELINE in running.err) == (name == "nothing"), running.err


def test_one_rank_and_those_that_failed_are_not_told_of(launch: Launcher) -> None:
    alone, failing = launch("-n", "1", "true"), launch("-n", "2", "false")
    assert (alone.finish(), failing.finish()) == (0, 1)
    assert NEVER_JOINED.replace("2", "1") not in alone.err
    assert NEVER_JOINED not in failing.err


def test_a_rank_that_the_system_killed_for_memory_is_told_so(tmp_path: Path) -> None:
    """Only root can make control groups. The test lets the launcher read a counter from a file of its own."""
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.events").write_text("oom_kill 0\n")
    (group / "memory.max").write_text(f"{64 << 20}\n")
    program = (
        "import pathlib, sys\n"
        "from multiring._launch import JobOptions, memory_limit, run_local\n"
        f"memory_limit.group_here = lambda: pathlib.Path({str(group)!r})\n"
        "die = 'import os, pathlib, signal; pathlib.Path(%r).write_text(\"oom_kill 1\"); os.kill(os.getpid(), 9)'\n"
        f"sys.exit(run_local([sys.executable, '-c', die % {str(group / 'memory.events')!r}], 1, JobOptions()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 128 + 9
    assert f"the memory of its control group of 64 MiB ({group}) was used up" in done.stderr
