"""Launch random programs in random forms, with signals and hostile options."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from benchmarks.evidence.launching.ran import MULTIRING, PYTHON, lines_by_rank, plain_environment, ran, shown
from benchmarks.evidence.support.cases import Fault, Random

_OURS = re.compile(rb'File "[^"]*/multiring/(launch|cli|__main__)')

# ---- programs

_LAST = (
    "sys.exit({code})", "os._exit({code})", "raise ValueError('x')", "sys.exit('some text')", "sys.exit(256)",
    "sys.exit(-1)", "sys.exit(True)", "raise SystemExit(None)", "raise KeyboardInterrupt", "os.abort()",
    "os.kill(os.getpid(), {number})", "threading.Thread(target=lambda: 1 / 0).start()",
    "atexit.register(lambda: 1 / 0)", "import ctypes; ctypes.string_at(0)",
    "print('Traceback, printed', file=sys.stderr); sys.exit({code})", "pass",
)  # fmt: skip
_WRITES = (
    "pass", "os.write(1, bytes(range(256)) * 20)", "os.write(1, b'no newline')", "os.write(2, b'\\x1b[31mred\\n')",
    "os.write(1, b'\\0' * 70000 + b'\\n')", "print('x' * 300000)", "os.close(1)", "os.close(2)", "os.close(0)",
    "os.write(1, b'half'); time.sleep(0.1); os.write(1, b'line\\n')", "os.write(1, b'\\n\\n')",
    "print(*range(2000), sep='\\n')", "sys.stdout.close()",
    "os.write(1, '\\u2028\\x85 \\x0b\\x0c\\x1c'.encode() + b'\\n')",
)  # fmt: skip
_STARTS = (
    "pass", "subprocess.Popen(['sleep', '{length}'])",
    "subprocess.Popen(['sleep', '{length}'], start_new_session=True, env={{}})",
    "subprocess.Popen(['sh', '-c', '(sleep {length} &)'])",
    "subprocess.Popen(['sh', '-c', 'trap \"\" TERM HUP INT; setsid sleep {length} &'], env={{}})",
    "os.fork() or (os.setsid(), os.execvp('sleep', ['sleep', '{length}']))", "subprocess.Popen(['true'])",
    "os.fork() or os._exit(7)",
)  # fmt: skip
_FORMS = ("plain", "sh", "env", "nohup", "timeout", "pipe", "script", "logs", "timeline")
_SIGNALS = (
    signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM, signal.SIGSEGV, signal.SIGXCPU, 40,
)  # fmt: skip


def programs(random: Random, folder: Path) -> Iterator[Fault]:
    """Launch a random program in a random form.

    The launcher must pass on its exit code and bytes, name one culprit, and leave nothing behind.
    """
    length = f"{int(random.integers(600, 900))}.{int(random.integers(10**6)):06d}{os.getpid()}"
    ranks, form = int(random.integers(1, 4)), str(random.choice(_FORMS))
    lines = [str(random.choice(_STARTS)).format(length=length)]
    lines += [str(each) for each in random.choice(_WRITES, int(random.integers(1, 4)))]
    last = str(random.choice(_LAST))
    lines.append(last.format(code=int(random.integers(256)), number=int(random.choice(_SIGNALS))))
    head = "import atexit, os, signal, subprocess, sys, threading, time\n"
    head += "import multiring; multiring.init()\n" if random.random() < 0.2 else ""
    (folder / "program.py").write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    for name in ("tmp", "bare"):
        (folder / name).mkdir()
    variables = {"TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"}
    bare = ran([PYTHON, "../program.py"], folder / "bare", variables=variables)
    _end(length)
    done = ran(_command(form, ranks), folder, variables=variables, deadline_s=90.0)
    left = _end(length)
    about = f"{form}, {ranks} ranks, {lines}: "
    code = None if bare.code is None else bare.code if bare.code >= 0 else 128 - bare.code
    if done.code != code:
        yield Fault("program: exit code", f"{about}want {code}; {shown(done)}")
    if left:
        yield Fault("program: something is left", f"{about}{left} processes; {shown(done)}")
    if files := sorted((folder / "tmp").iterdir()):
        yield Fault("program: temporary files are left", f"{about}{files}")
    said = done.out + done.err
    if _OURS.search(said):
        yield Fault("program: a traceback of the launcher", about + shown(done))
    if form == "script":  # a terminal changes the line ends
        return
    if code and len(re.findall(rb"multiring: rank \d+ \(pid \d+\) failed: ", said)) != 1:
        yield Fault("program: not one culprit", about + shown(done))
    if code == 0:
        yield from _output_faults(folder, about, ranks, bare.out, done.out)


def _output_faults(folder: Path, about: str, ranks: int, bare: bytes, out: bytes) -> Iterator[Fault]:
    want = bare.split(b"\n")[: -1 if bare.endswith(b"\n") or not bare else None]
    found = lines_by_rank(out, ranks)
    for rank in range(ranks if b"\r" not in bare else 0):
        if found[rank] != want:
            yield Fault("program: output", f"{about}rank {rank}: {len(found[rank])} lines, want {len(want)}")
    for log in (folder / "logs").glob("*.out"):
        if log.read_bytes() != bare:
            yield Fault("program: log", f"{about}{log.name} is not what the program wrote")


def _command(form: str, ranks: int) -> list[str]:
    words = [*MULTIRING, "run", "-n", str(ranks)]
    words += {"logs": ["--log-dir", "logs"], "timeline": ["--timeline", "trace.json"]}.get(form, [])
    program = [PYTHON, "program.py"]
    words += ["--", *{"sh": ["sh", "-c", f"{PYTHON} program.py; exit $?"], "env": ["env", "A=1"]}.get(form, [])]
    words += [] if form == "sh" else program
    if form == "pipe":
        return ["bash", "-c", f"{shlex.join(words)} | cat; exit ${{PIPESTATUS[0]}}"]
    if form == "script":
        return ["script", "-qec", shlex.join(words), "/dev/null"]
    return {"nohup": ["nohup"], "timeout": ["timeout", "80"]}.get(form, []) + words


def _end(length: str) -> int:
    """Kill the processes that sleep for `length`; return their number."""
    found = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            if (
                length.encode() in (entry / "cmdline").read_bytes()
                and b"program.py" not in (entry / "cmdline").read_bytes()
            ):
                os.kill(pid, signal.SIGKILL)
                found += 1
    return found


# ---- signals to the launcher


def signals(random: Random, folder: Path) -> Iterator[Fault]:
    """Send signals to the launcher at random times, once or twice.

    The launcher must end soon, and nothing of the job may remain.
    """
    length = f"{int(random.integers(600, 900))}.{int(random.integers(10**6)):06d}{os.getpid()}"
    ignores = bool(random.random() < 0.3)
    joins = "import multiring; multiring.init()\n" if random.random() < 0.3 else ""
    text = (
        "import signal, subprocess, sys, time\n"
        f"{'signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)' * ignores}\n"
        f"{joins}subprocess.Popen(['sleep', '{length}'], start_new_session=True, env={{}})\n"
        "for number in range(600):\n    print(number, flush=True)\n    time.sleep(0.1)\n"
    )
    (folder / "goes_on.py").write_text(text, encoding="utf-8")
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]
    number = signal.Signals(int(random.choice(numbers)))
    times, after_s = int(random.integers(1, 3)), float(random.choice([0.2, 0.6, 1.0, 2.0]))
    with (folder / "said").open("w+b") as said:
        launcher = subprocess.Popen(  # noqa: S603 -- our own
            [*MULTIRING, "run", "-n", str(int(random.integers(1, 4))), "--grace", "2", "goes_on.py"],
            cwd=folder, env=plain_environment(), stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip
        time.sleep(after_s)
        for _ in range(times):
            launcher.send_signal(number)
            time.sleep(0.05)
        # the launcher ignores these signals once it runs, so SIGTERM must end it
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            launcher.send_signal(signal.SIGTERM)
        try:
            code: int | None = launcher.wait(40)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
        until = time.monotonic() + 15.0
        while (left := _end_after(length, until)) and time.monotonic() < until:
            time.sleep(0.1)
        said.seek(0)
        words = said.read()[-400:]
    about = f"{number.name} {times} times after {after_s} s, ignored {ignores}, joins {bool(joins)}: code {code}; "
    if code is None:
        yield Fault("signal: no end", f"{about}{words!r}")
    elif code == 0:
        yield Fault("signal: code 0", f"{about}{words!r}")
    if left:
        yield Fault("signal: something is left", f"{about}{left}; {words!r}")


def _end_after(length: str, until: float) -> int:
    """Return the number of processes that sleep for `length`.

    After the time `until`, kill them.
    """
    if time.monotonic() >= until:
        return _end(length)
    found = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += length.encode() in entry.read_bytes()
    return found


# ---- commands

_HOSTILE = (
    "", "-1", "0", "1e999", "nan", "inf", "x", "/no/such", "folder", "empty", "binary", "99999999999999999999", "é",
    "a=b", "=", ",", ":", "a:b:c", "--", "-", "[", "a" * 5000, "1,2,,", "0x10", "1KiB", "-5GiB", "1e30GiB", "%s", "{}",
    "*", "1_000", "1.5", "a,a", "3-1", "link", "text", "\n", "'", '"x', "\\", "@x", "65536", "localhost:0", "[::1]:1",
    "http://127.0.0.1:1/x", "file:///no", "multiring::x", "0bit", "1e99gbit", "python",
)  # fmt: skip
_SLOW = ("bench", "probe", "lab")  # with valid options, these commands run long measurements


@cache
def _helped(*words: str) -> str:
    return ran([*MULTIRING, *words, "--help"], Path.cwd()).words


def _drawn_command(random: Random) -> tuple[list[str], list[str]]:
    """Return a random command and the options in its help text."""
    words = [str(random.choice(re.findall(r"(?m)^ {4}([a-z]+)\b", _helped())))]
    if words[0] in ("data", "trace"):
        names = re.search(r"\{([a-z,]+)\}", _helped(*words))
        words += [str(random.choice(names[1].split(",")))] if names else []
    return words, sorted(set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", _helped(*words))) - {"--help"})


def commands(random: Random, folder: Path) -> Iterator[Fault]:
    """Run a command with hostile options and words.

    The command must end with a result or one error, without a traceback.
    """
    os.chdir(folder)
    (folder / "folder").mkdir()
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)) * 40)
    (folder / "link").symlink_to("nowhere")
    (folder / "text").write_text("hello\n", encoding="utf-8")
    words, options = _drawn_command(random)
    given = list(words)
    for option in random.choice(options or ["--x"], int(random.integers(0, 4))):
        value = str(random.choice(_HOSTILE))
        given += [[f"{option}={value}"], [str(option)], [str(option), value]][int(random.choice(3, p=[0.3, 0.2, 0.5]))]
    given += [str(each) for each in random.choice(_HOSTILE, int(random.integers(0, 3)))]
    given += {"run": ["--", "true"], "horovodrun": ["true"]}.get(words[0], []) if random.random() < 0.7 else []
    done = ran([*MULTIRING, *given], folder, deadline_s=8.0 if words[0] in _SLOW else 60.0)
    about = f"{[each[:60] for each in given]}: {shown(done)}"
    lines = [line for line in done.words.splitlines() if line and not line.startswith(("usage:", " "))]
    if "Traceback" in done.words:
        yield Fault(f"command {' '.join(words)}: a traceback", about)
    elif done.code is None and words[0] not in _SLOW:
        yield Fault(f"command {' '.join(words)}: no end", about)
    elif done.code == 2 and not 1 <= len(lines) <= 3:
        yield Fault(f"command {' '.join(words)}: {len(lines)} lines of error", about)
