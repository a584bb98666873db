"""`multiring run` when ranks, helpers and signals fail together: the named cause, forwarded signals and cleanup."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEADLINE_S = 240.0
SOON_S = 50.0  # limit for steps that take two seconds on a quiet machine; a bug made them take a minute

Make = Callable[[str], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(text: str) -> Path:
        path = tmp_path / "job.py"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return made


def command(script: Path, *words: str, ranks: int = 2) -> list[str]:
    return [sys.executable, "-m", "multiring", "run", "-n", str(ranks), *words, str(script)]


def ended(script: Path, *words: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command(script, *words), capture_output=True, text=True, timeout=DEADLINE_S, check=False, **options
    )


CAUGHT = """
    import sys, time
    import numpy as np
    import multiring
    group = multiring.init()
    group.all_reduce(np.ones(3))
    try:
        if group.rank == 1:
            raise ValueError("the culprit")
        group.all_reduce(np.ones(3))
    except Exception as error:
        print("ERROR:", error, file=sys.stderr)
        {leaves}
        time.sleep({pause} * group.rank)
        sys.exit(4 + group.rank)
"""


@pytest.mark.parametrize(
    ("leaves", "pause"), [("pass", 0), ("pass", 2), ("multiring.shutdown()", 0.5), ("multiring.shutdown()", 2)]
)
def test_the_culprit_is_named_though_programs_catch_their_errors(make: Make, leaves: str, pause: float) -> None:
    done = ended(make(CAUGHT.format(leaves=leaves, pause=pause)))
    assert done.returncode == 5
    told = done.stderr.partition("multiring: rank 1 (pid ")[2]
    assert "failed: exit code 5\nmultiring: its last lines on stderr:\n    ERROR: the culprit\n" in told


def test_a_rank_that_ends_does_not_wait_with_its_timeline(make: Make, tmp_path: Path) -> None:
    script = make("""
        import sys
        import numpy as np
        import multiring
        group = multiring.init()
        group.all_reduce(np.ones(3))
        if group.rank == 1:
            sys.exit(3)
        group.all_reduce(np.ones(3))
    """)
    began = time.monotonic()
    done = ended(script, "--timeline", str(tmp_path / "t.json"))
    assert (done.returncode, time.monotonic() - began < SOON_S) == (3, True), done.stderr
    assert [each.name for each in tmp_path.glob("t.json*")] == ["t.json"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_ranks_alone_get_the_signals_that_ask_for_a_save(make: Make, number: signal.Signals) -> None:
    """A worker of a rank has no handler, so the signal would end the worker."""
    script = make(f"""
        import multiprocessing, signal, sys, time
        import numpy as np
        import multiring
        asked = []
        def work(queue): queue.get(); queue.put("alive")
        if __name__ == "__main__":
            queue = multiprocessing.get_context("spawn").Queue()
            worker = multiprocessing.get_context("spawn").Process(target=work, args=(queue,))
            worker.start()
            signal.signal({int(number)}, lambda *_: asked.append(1))
            group = multiring.init()
            print("ready", flush=True)
            stop = np.zeros(1, np.int32)
            while not stop[0]:
                time.sleep(0.01)
                stop[0] = len(asked)
                group.all_reduce(stop, "max")
            queue.put("end")
            worker.join()
            print("saved", worker.exitcode, flush=True)
    """)
    shell = f"exec {sys.executable} {script}"
    words = [*command(script)[:-1], "--", "sh", "-c", f"{shell[5:]}; exit $?"]  # the rank's parent is a shell
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(number)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["[0] saved 0", "[1] saved 0"]
    assert f"{number.name} received, and handed on to the ranks" in err


def test_a_signal_before_ranks_have_joined_waits_for_them(make: Make) -> None:
    script = make("""
        import signal, sys, time
        print("up", flush=True)
        time.sleep(1.5)
        got = []
        signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
        import multiring
        multiring.init()
        until = time.monotonic() + 100
        while not got and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.2)  # a second one would come by now
        print("got", len(got))
    """)
    process = subprocess.Popen(command(script), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert sorted(out.splitlines()) == ["[0] got 1", "[1] got 1"], err


@pytest.fixture
def sleepers() -> Iterator[Callable[[], list[int]]]:
    """Yield a function that finds the sleeping processes of this test."""
    length_s = f"9{os.getpid()}.25"

    def found() -> list[int]:
        alive = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if length_s.encode() in (entry / "cmdline").read_bytes():
                    alive.append(int(entry.name))
            except OSError:
                continue
        return alive

    found.length_s = length_s  # type: ignore[attr-defined]
    yield found
    for pid in found():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)", "os.kill(os.getpid(), 9)"])
def test_helpers_without_our_variables_end_with_the_job(
    make: Make, sleepers: Callable[[], list[int]], ending: str
) -> None:
    lines = ("exec sleep {0}", "setsid sleep {0} & true", "trap '' TERM; setsid sleep {0} &")
    texts = [line.format(sleepers.length_s) for line in lines]  # type: ignore[attr-defined]
    script = make(f"""
        import os, subprocess, sys, time
        none = subprocess.DEVNULL
        for text in {texts!r}:
            subprocess.Popen(["/bin/sh", "-c", text], env={{}}, stdin=none, stdout=none, stderr=none)
        time.sleep(0.3)
        {ending}
    """)
    ended(script)
    assert sleepers() == []


def test_children_of_the_shell_before_the_launcher_are_left_alone(
    make: Make, sleepers: Callable[[], list[int]]
) -> None:
    length_s = sleepers.length_s  # type: ignore[attr-defined]
    script = make("print('ran')")
    words = " ".join(command(script))
    line = f"sleep {length_s} >/dev/null 2>&1 & (sleep {length_s} >/dev/null 2>&1 &); exec {words}"
    done = subprocess.run(["/bin/bash", "-c", line], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0
    assert len(sleepers()) == 2


def test_init_says_who_is_missing_while_it_waits(make: Make, tmp_path: Path) -> None:
    script = make(f"""
        import multiring, os, pathlib, time
        waits = pathlib.Path({str(tmp_path / "waits")!r})
        if os.environ["MULTIRING_RANK"] == "0":
            waits.touch()
        else:
            while not waits.exists():
                time.sleep(0.05)
            time.sleep(13)
        multiring.init()
    """)
    done = ended(script)
    assert done.returncode == 0, done.stderr
    told = next(line for line in done.stderr.splitlines() if "init has waited" in line)
    assert told.startswith("[0] init has waited for 10 s: rank 1 did not come yet to @multiring-")
    assert "MULTIRING_RANK=0, MULTIRING_SIZE=2, MULTIRING_RENDEZVOUS=@multiring-" in told


TRACER = """
    import ctypes, os, signal, sys, time
    libc = ctypes.CDLL(None, use_errno=True)
    pid = int(sys.argv[1])
    if libc.ptrace(0x4206, pid, 0, 0) != 0:  # PTRACE_SEIZE
        sys.exit(f"no tracing: {os.strerror(ctypes.get_errno())}")
    print("traced", flush=True)
    time.sleep(600)  # and reaps nothing: the process cannot be reaped by its parent
"""


def test_a_killed_rank_that_the_kernel_holds_does_not_hold_the_launcher(make: Make, tmp_path: Path) -> None:
    script = make("""
        import os, subprocess, sys, time
        if os.environ["MULTIRING_RANK"] == "0":
            open("pid.new", "w").write(str(os.getpid())); os.rename("pid.new", "pid")
            time.sleep(600)
        while not os.path.exists("traced"):
            time.sleep(0.05)
        sys.exit(5)
    """)
    tracer = tmp_path / "tracer.py"
    tracer.write_text(textwrap.dedent(TRACER), encoding="utf-8")
    with subprocess.Popen(command(script), cwd=tmp_path, stderr=subprocess.PIPE, text=True) as launcher:
        until = time.monotonic() + DEADLINE_S
        while not (tmp_path / "pid").exists() and time.monotonic() < until:
            time.sleep(0.05)
        with subprocess.Popen(
            [sys.executable, str(tracer), (tmp_path / "pid").read_text()], stdout=subprocess.PIPE, text=True
        ) as tracing:
            try:
                if tracing.stdout is None or tracing.stdout.readline() != "traced\n":
                    launcher.terminate()
                    pytest.skip("this system does not allow tracing another process")
                (tmp_path / "traced").touch()
                _, said = launcher.communicate(timeout=DEADLINE_S)
            finally:
                tracing.kill()
    assert launcher.returncode == 5
    assert "rank 0 (pid " in said
    assert "and has not ended: the kernel holds it" in said
