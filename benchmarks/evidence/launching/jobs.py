"""Launch random jobs and check their ends, their output and their child processes.

The jobs also check which child processes may join as ranks.
"""

import itertools
import json
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.evidence.launching.ran import MULTIRING, PYTHON, lines_by_rank, ran, shell, shown
from benchmarks.evidence.support.cases import Fault, Random

LATE_S = 45.0  # A job takes two seconds, ten times as long on a loaded machine. A hanging job takes a minute.

# ---- endings

_WAYS = {  # the culprit's last statement, and the exit code that a shell reports without a launcher
    "sys.exit({code})": "code",
    "os._exit({code})": "code",
    "raise ValueError('culprit')": 1,
    "raise SystemExit('culprit')": 1,
    "os.kill(os.getpid(), signal.SIGKILL)": 137,
    "os.kill(os.getpid(), signal.SIGSEGV)": 139,
    "os.abort()": 134,
    "threading.Thread(target=os._exit, args=({code},)).start(); time.sleep(60)": "code",
    "atexit.register(os._exit, {code})": "code",
}
_VICTIMS = {
    "raises": "work()",
    "catches, says so and ends": """
        try:
            work()
        except Exception as error:
            print("ERROR", error, file=sys.stderr)
            sys.exit(1)
    """,
    "catches, leaves and ends": """
        try:
            work()
        except Exception as error:
            print("ERROR", error, file=sys.stderr)
            multiring.shutdown()
            sys.exit(1)
    """,
}
_CULPRITS = {
    "at once": "",
    "after a while": "time.sleep({pause})",
    "having left the job": "multiring.shutdown(); atexit.register(time.sleep, {pause})",
}


def endings(random: Random, folder: Path, *, by_torch: bool = False) -> Iterator[Fault]:
    """End one rank by itself; the other ranks end because they lose it.

    The job must end soon with that rank's exit code, and the launcher must name the rank.
    """
    ranks = int(random.integers(2, 4))
    culprit, code = int(random.integers(ranks)), int(random.integers(1, 120))
    way = str(random.choice(list(_WAYS)))
    victim, pause = str(random.choice(list(_VICTIMS))), round(float(random.uniform(0.1, 0.6)), 2)
    last = str(random.choice(list(_CULPRITS)))
    if by_torch:
        way, victim, last = "raise ValueError('culprit')", "raises", "at once"
    has_timeline = not by_torch and bool(random.random() < 0.4)
    work = "dist.all_reduce(x)" if by_torch else "group.all_reduce(x)"
    start = (
        "import torch, torch.distributed as dist, multiring_torch\ndist.init_process_group('multiring')\n"
        "x = torch.ones(50)\nrank = dist.get_rank()\n"
        if by_torch
        else "group = multiring.init()\nx = np.ones(50, np.float32)\nrank = group.rank\n"
    )
    text = (
        "import atexit, os, signal, sys, threading, time\nimport numpy as np\nimport multiring\n"
        f"{start}def work():\n    for _ in range(1000):\n        {work}\n        time.sleep(0.01)\n{work}\n"
        f"if rank == {culprit}:\n    {_CULPRITS[last].format(pause=pause) or 'pass'}\n    {way.format(code=code)}\n"
        f"else:\n{textwrap.indent(textwrap.dedent(_VICTIMS[victim]), '    ')}\n"
    )
    (folder / "ends.py").write_text(text, encoding="utf-8")
    options = ["--timeline", "trace.json"] if has_timeline else []
    began = time.monotonic()
    late_s = 2 * LATE_S if by_torch else LATE_S  # importing torch is slow on a loaded machine
    done = ran([*MULTIRING, "run", "-n", str(ranks), *options, "ends.py"], folder, deadline_s=late_s + 5)
    took_s = time.monotonic() - began
    about = f"rank {culprit} of {ranks}, {last}: {way.format(code=code)}; the others: {victim}; timeline {has_timeline}"
    wanted = code if _WAYS[way] == "code" else _WAYS[way]
    if took_s > late_s:
        yield Fault(f"late end: {'timeline' if has_timeline else 'plain'}", f"{about}: {took_s:.0f} s; {shown(done)}")
    if done.code is None:
        return
    named = f"multiring: rank {culprit} (pid " in done.words
    kind = "torch's hook" if by_torch else victim
    if not named:
        yield Fault(f"victim named: {kind}", f"{about}; {shown(done)}")
    elif done.code != wanted:
        yield Fault("exit code", f"{about}: want {wanted}; {shown(done)}")


def endings_torch(random: Random, folder: Path) -> Iterator[Fault]:
    """Run `endings` under torch.distributed, whose exception hook prints tracebacks."""
    yield from endings(random, folder, by_torch=True)


# ---- outputs

_WRITES = """
import json, sys, time
plan = json.load(open(sys.argv[1]))
for stream, text, pause in plan[int(sys.argv[2])]:
    where = (sys.stdout, sys.stderr)[stream].buffer
    where.write(bytes.fromhex(text))
    where.flush()
    if pause:
        time.sleep(pause)
"""


def outputs(random: Random, folder: Path) -> Iterator[Fault]:
    """Write lines of random lengths and bytes on both streams.

    Each line must arrive whole, in the order that its rank wrote, with the rank's tag.
    """
    ranks, one_file = int(random.integers(1, 4)), bool(random.random() < 0.6)
    plan = [_writes(random) for _ in range(ranks)]
    (folder / "writes.py").write_text(_WRITES, encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    line = f'exec {PYTHON} -S writes.py plan.json "$MULTIRING_RANK"'
    done = ran([*MULTIRING, "run", "-n", str(ranks), "--", *shell(line)], folder, one_file=one_file)
    if done.code != 0:
        yield Fault("output: exit code", shown(done))
        return
    found = [lines_by_rank(data, ranks) for data in (done.out, done.err)]
    for rank, writes in enumerate(plan):
        bare = [b"".join(bytes.fromhex(text) for stream, text, _ in writes if stream == each) for each in (0, 1)]
        lines = [data.split(b"\n")[: -1 if data.endswith(b"\n") or not data else None] for data in bare]
        got = [found[0][rank]] if one_file else [found[0][rank], found[1][rank]]
        wants = [sorted(lines[0] + lines[1])] if one_file else lines
        for have, want in zip(got, wants, strict=True):
            if (sorted(have) if one_file else have) != want:
                longest = max(map(len, want), default=0)
                sign = "line cut" if longest > 1 << 16 and b"".join(sorted(have)) else "lines mixed"
                sign += ": one file" if one_file else ": two files"
                extra = [each for each in have if each not in want][:2]
                yield Fault(sign, f"{ranks} ranks, rank {rank}, longest {longest}: not written: {str(extra)[:300]}")
                return
    if strays := found[0][-1] + found[1][-1]:
        yield Fault(f"lines mixed: {'one file' if one_file else 'two files'}", f"without a tag: {strays[:2]!r:.300}")


def _writes(random: Random) -> list[tuple[int, str, float]]:
    made = []
    has_long = bool(random.random() < 0.15)
    for number in range(int(random.integers(1, 8 if has_long else 250))):
        size = int(random.integers(0, 400_000 if has_long else 120))
        # any byte except newlines and carriage returns
        body = bytes(random.integers(32, 256, size, dtype="uint8")) if size < 1000 else b"x" * size
        data = b"%d " % number + body + b"\n"
        stream, cut = int(random.integers(2)), int(random.integers(len(data)))
        is_last = random.random() < 0.02
        parts = (data[:cut], data[cut:]) if random.random() < 0.2 else (data,)
        pause_s = 0.001 if random.random() < 0.02 else 0.0
        made += [(stream, part.hex(), pause_s) for part in parts]
        if is_last:
            break
    return made


def bars(random: Random, folder: Path) -> Iterator[Fault]:
    """Print a progress bar on one rank and lines on another rank.

    No line may share a screen line with the bar.
    """
    steps, words = int(random.integers(3, 8)), "".join(random.choice(list("abc%# "), 6))
    bar = int(random.integers(2))  # 0 is standard output, 1 is standard error
    line = 1 - bar if random.random() < 0.7 else bar
    at = sorted(random.choice(np_range(steps - 1), int(random.integers(1, 3)), replace=False).tolist())
    text = f"""
        import os, sys, time
        rank = int(os.environ["MULTIRING_RANK"])
        streams = (sys.stdout, sys.stderr)
        def meet(name):
            open(f"{{name}}{{rank}}", "w").close()
            while not os.path.exists(f"{{name}}{{1 - rank}}"):
                time.sleep(0.01)
            time.sleep(0.1)  # for the launcher to read
        for step in range({steps}):
            if rank == 1:
                print(f"\\r{{step}} {words}", end="", file=streams[{bar}], flush=True)
            meet(f"bar{{step}}-")
            if rank == 0 and step in {at}:
                print(f"line {{step}} of rank 0", file=streams[{line}], flush=True)
            meet(f"line{{step}}-")
        if rank == 1:
            print(file=streams[{bar}])
    """
    (folder / "bars.py").write_text(textwrap.dedent(text), encoding="utf-8")
    done = ran([*MULTIRING, "run", "-n", "2", "bars.py"], folder, one_file=True)
    states = done.out.replace(b"\r", b"\n").split(b"\n")
    for step in at:
        if b"[0] line %d of rank 0" % step not in states:
            where = "both on one stream" if bar == line else "on different streams"
            yield Fault(f"bar and line in one line: {where}", f"{done.out[-400:]!r}")
            return
    if done.code != 0:
        yield Fault("bar: exit code", shown(done))


def np_range(count: int) -> list[int]:
    """Return the numbers below `count`; the random generator draws from such a list."""
    return list(range(count))


# ---- leftovers

_numbers = itertools.count()


def leftovers(random: Random, folder: Path) -> Iterator[Fault]:
    """Start helper processes from ranks in random ways.

    No helper may survive the job, however the job ends.
    """
    length_s = f"{int(random.integers(300, 900))}.{int(random.integers(10**6)):06d}{next(_numbers)}"
    environment = str(random.choice(["{}", "None", "dict(os.environ)", "dict(PATH='/bin:/usr/bin')"]))
    session = bool(random.random() < 0.3)
    wrap = str(random.choice(["", "setsid ", "nohup "]))
    deaf = "trap '' TERM; " if random.random() < 0.3 else ""
    background = bool(random.random() < 0.4)
    line = f"{deaf}{wrap}sleep {length_s}" + (" &" if background else "")
    ending = str(random.choice(["pass", "sys.exit(3)", "os.kill(os.getpid(), 9)", "raise KeyError"]))
    ranks = int(random.integers(1, 3))
    text = f"""
        import os, subprocess, sys, time
        none = subprocess.DEVNULL
        subprocess.Popen(["/bin/sh", "-c", {line!r}], env={environment}, start_new_session={session},
                         stdin=none, stdout=none, stderr=none)
        time.sleep(0.3)
        if os.environ["MULTIRING_RANK"] == "0":
            {ending}
    """
    (folder / "starts.py").write_text(textwrap.dedent(text), encoding="utf-8")
    done = ran([*MULTIRING, "run", "-n", str(ranks), "starts.py"], folder)
    left = list(_sleepers(length_s))
    for pid in left:
        ran(["kill", "-9", str(pid)], folder)
    has_variables = environment in ("None", "dict(os.environ)")
    if left:
        kind = "with our variables" if has_variables else "without our variables"
        yield Fault(f"left behind: {kind}", f"{line!r}, env={environment}, session {session}, {ending}; {shown(done)}")
    wanted = {"pass": 0, "sys.exit(3)": 3, "os.kill(os.getpid(), 9)": 137, "raise KeyError": 1}[ending]
    if done.code != wanted:
        yield Fault("left behind: exit code", f"{ending}, want {wanted}; {shown(done)}")


def _sleepers(length_s: str) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if length_s.encode() in (entry / "cmdline").read_bytes():
                    yield int(entry.name)
            except OSError:
                continue


# ---- child processes as ranks


def workers(random: Random, folder: Path) -> Iterator[Fault]:
    """Start multiprocessing workers of random kinds.

    The workers import a script that joins the job at its top. They must have their parent's rank, and compute the right
    sums.
    """
    method = str(random.choice(["spawn", "forkserver", "fork"]))
    ranks, count = int(random.integers(1, 4)), int(random.integers(1, 4))
    only = int(random.integers(-1, ranks))  # the only rank with workers; -1 gives all ranks workers
    kind = str(random.choice(["Pool", "Process", "Executor"]))
    maker = {
        "Pool": f"with context.Pool({count}) as pool: total = sum(pool.map(work, range(6)))",
        "Process": f"total = by_processes({count})",
        "Executor": f"with ProcessPoolExecutor({count}, context) as pool: total = sum(pool.map(work, range(6)))",
    }[kind]
    text = f"""
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor
        import numpy as np
        import multiring
        group = multiring.init()
        context = multiprocessing.get_context({method!r})

        def work(number):
            return number + 100 * multiring.rank() + 10000 * multiring.size()

        def put(queue, numbers):
            queue.put(sum(map(work, numbers)))

        def by_processes(count):
            queue = context.Queue()
            each = [context.Process(target=put, args=(queue, range(i, 6, count))) for i in range(count)]
            for one in each: one.start()
            found = sum(queue.get(timeout=15) for _ in each)
            for one in each: one.join()
            return found

        if __name__ == "__main__":
            total = 0
            if {only} in (-1, group.rank):
                {maker}
            x = np.array([total], np.float64)
            group.all_reduce(x)
            print("sum", int(x[0]), flush=True)
    """
    (folder / "workers.py").write_text(textwrap.dedent(text), encoding="utf-8")
    variables = {"MULTIRING_INIT_TIMEOUT_S": "12"}
    done = ran([*MULTIRING, "run", "-n", str(ranks), "workers.py"], folder, variables=variables)
    whose = range(ranks) if only == -1 else [only]
    want = sum(6 * (100 * rank + 10000 * ranks) + 15 for rank in whose)
    sums = [line for each in range(ranks) for line in lines_by_rank(done.out, ranks)[each] if line.startswith(b"sum")]
    if done.code != 0 or sums != [b"sum %d" % want] * ranks:
        sign = f"workers join: {method}" if method != "fork" else "workers know no rank: fork"
        yield Fault(sign, f"{ranks} ranks, rank {only} with {count} by {kind}: want {want}; {shown(done)}")


_CHILD = """
import sys, time
import multiring
began = time.monotonic()
try:
    group = multiring.init()
except Exception as error:
    print("kind", type(error).__name__, round(time.monotonic() - began, 1))
    print(error)
    sys.exit(9)
print("joined", group.rank, group.size)
"""


def children(random: Random, folder: Path) -> Iterator[Fault]:
    """Start programs from a rank in random ways; the programs try to join the job.

    They must get an error at once that names the rank's process.
    """
    child = folder / "child.py"
    child.write_text(_CHILD, encoding="utf-8")
    ranks = int(random.integers(2, 4))
    parent = int(random.integers(ranks))
    how = str(random.choice(["child", "shell", "env", "orphan", "nested"]))
    command = {
        "child": f"[{PYTHON!r}, 'child.py']",
        "shell": f"['bash', '-c', '{PYTHON} child.py; exit $?']",
        "env": f"['env', 'A=1', {PYTHON!r}, 'child.py']",
        "orphan": f"['bash', '-c', '{PYTHON} child.py & wait $!']",
        "nested": f"[{PYTHON!r}, '-m', 'multiring', 'run', '-n', '1', 'child.py']",
    }[how]
    before = "dict(os.environ)" if random.random() < 0.5 else "None"
    text = f"""
        import os, subprocess, sys
        before = {before}
        import multiring
        group = multiring.init()
        if group.rank == {parent}:
            done = subprocess.run({command}, env=before, capture_output=True, text=True)
            print("pid", os.getpid(), "code", done.returncode, done.stdout.replace("\\n", " | "))
        group.barrier()
        group.barrier()
    """
    (folder / "parent.py").write_text(textwrap.dedent(text), encoding="utf-8")
    variables = {"MULTIRING_INIT_TIMEOUT_S": "10"}
    done = ran([*MULTIRING, "run", "-n", str(ranks), "parent.py"], folder, variables=variables)
    told = next((line.decode() for line in lines_by_rank(done.out, ranks)[parent] if line.startswith(b"pid")), "")
    if how == "nested":
        if done.code != 0 or "joined 0 1" not in told:
            yield Fault("child: a job of its own", f"{told}; {shown(done)}")
        return
    words = told.split()
    is_right = (
        done.code == 0 and "kind StateError" in told and words[1] in told.partition("kind")[2]
        # normally under a second; up to two seconds on a loaded machine
        and float(told.partition("kind StateError ")[2].split()[0]) < 2.0
    )  # fmt: skip
    if not is_right:
        yield Fault(f"child joins: {how}", f"rank {parent} of {ranks}, env {before}: {told}; {shown(done)}")
