"""Launch with random input.

The input consists of scripts, options, variables, settings, limits, closed streams, plan files and devices.
"""

import os
import socket
import stat
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from benchmarks.evidence.launching.ran import MULTIRING, PYTHON, lines_by_rank, ran, shell, shown
from benchmarks.evidence.support.cases import Fault, Random

from multiring._bench.install import folder_of

JOINS = """
import multiring, numpy
group = multiring.init()
x = numpy.ones(3)
group.all_reduce(x)
print("sum", int(x[0]))
"""

# ---- standard streams


def streams(random: Random, folder: Path) -> Iterator[Fault]:
    """Close the launcher's standard streams or redirect them.

    The exit code must be that of the program without a launcher.
    """
    closed = [each for each in ("<&-", ">&-", "2>&-") if random.random() < 0.5] or [">&-"]
    odd = str(random.choice(["", "", "< /dev/null", "2> /dev/full", "> /dev/null"]))
    code, ranks = int(random.choice([0, 0, int(random.integers(1, 100))])), int(random.integers(1, 4))
    joins = "import multiring; multiring.init().barrier(); " if random.random() < 0.3 else ""
    (folder / "says.py").write_text(
        f"import sys; {joins}print('out'); print('err', file=sys.stderr); sys.exit({code})\n", encoding="utf-8"
    )
    line = " ".join([*MULTIRING, "run", "-n", str(ranks), "says.py", odd, *closed])
    done = ran(shell(line), folder)
    if done.code != code:
        for each in closed if code == 0 or not odd else ():
            yield Fault(f"closed stream: {each}", f"{line}: want {code}; {shown(done)}")
        return
    if ">&-" not in closed and ">" not in odd.replace("2>", "") and done.out.count(b"out") != ranks and not code:
        yield Fault("closed stream: output lost", f"{line}: {shown(done)}")


# ---- scripts and options


def scripts(random: Random, folder: Path) -> Iterator[Fault]:
    """Launch Python files with random names and forms of the path.

    Each must run as with `python FILE`, or the error must report a missing script.
    """
    name = "".join(random.choice(list("abcXYZ019_-. üñ"), int(random.integers(1, 9)))).strip("-. ") or "x"
    place = str(random.choice(["", "", "sub", "a b"]))
    path = folder / place / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    bang = str(
        random.choice(["", "", "", f"#!{PYTHON}\n", "#!/no/such/python\n", "\ufeff", "# -*- coding: utf-8 -*-\n"])
    )
    executable = bool(random.random() < 0.7)
    words = [str(each) for each in random.choice(["a", "-n", "--env", "x y", "-m", "3", "--", "ü"], 3)]
    path.write_text(f"{bang}import sys\nprint(sys.argv[1:])\n", encoding="utf-8")
    path.chmod(0o755 if executable else 0o644)
    relative = f"{place}/{path.name}" if place else path.name
    form = str(random.choice([relative, f"./{relative}", str(path)]))
    missing = bool(random.random() < 0.1)
    if missing:
        form = form.removesuffix(".py") + "q.py"
    done = ran([*MULTIRING, "run", "-n", "1", form, *words], folder)
    about = f"{form!r}, {bang.strip()!r}, executable {executable}: "
    if missing:
        if done.code != 127 or form.encode() not in done.err or b"script" not in done.err:
            yield Fault("script: a missing one is not named", about + shown(done))
        return
    is_command = executable and "/" in form and bang.startswith("#!")
    bare = ran([form if is_command else PYTHON, *([] if is_command else [form]), *words], folder) if (
        bang != "#!/no/such/python\n" or not is_command) else None  # fmt: skip
    if bare is None:
        if done.code not in (126, 127) or b"Traceback" in done.err:
            yield Fault("script: no interpreter", about + shown(done))
    elif done.code != bare.code or b"".join(b"%b\n" % line for line in lines_by_rank(done.out, 1)[0]) != bare.out:
        kind = "executable, and names no interpreter" if executable and not bang.startswith("#!") else "other"
        yield Fault(f"script: {kind}", f"{about}want {bare.out!r}; {shown(done)}")


_LETTERS = list("abcdefghijklmopqrstuvwxyz")  # without n
_LONG = ("hostfile", "machinefile", "module", "np", "nproc", "timeline", "grace", "stdin", "log-dir", "options", "env")


def options(random: Random, folder: Path) -> Iterator[Fault]:
    """Pass short, abbreviated or joined options.

    The launcher must accept them, or name the option exactly as written.
    """
    kind = int(random.integers(3))
    option = f"-{random.choice(_LETTERS)}"
    if kind == 1:
        long = str(random.choice(_LONG))
        option = f"-{'-' if random.random() < 0.5 else ''}{long[: int(random.integers(1, len(long)))]}"
    command = str(random.choice(["run", "run", "horovodrun"]))
    count = ["-n", "1"] if command == "run" else ["-np", "1"]
    if option in ("-n", "-h", "--h", "-v", "-np", "--np", "--n", "--nproc", "-H", "-f", "-p", "-i"):
        return
    done = ran([*MULTIRING, command, *count, option, "true"], folder)
    error = done.words.strip().rpartition("\n")[2]
    spoken = [word.strip(",:;?'") for word in error.split() if word.startswith("-")]
    if done.code == 2 and spoken and not option.startswith(spoken[0]) and "did you mean" not in error:
        yield Fault("option: another one is named", f"{command} {option}: {error}")
    elif done.code not in (0, 2) or "Traceback" in done.words:
        yield Fault("option: no error", f"{command} {option}: {shown(done)}")


_HOROVOD = {
    "-np": ["0", "-1", "x", "1e3", "99999999999999999999"],
    "--mpi-args": ['"x', "'", "a 'b", "\\"],
    "--hosts": ["a:0", ":", "a:b:c", "a:1,a:1", ""],
    "--start-timeout": ["x", "-1", "0", "1e99"],
    "--timeline-filename": ["/no/such/folder/t.json", "/", ""],
    "--cycle-time-ms": ["x", "nan?"],
    "--config-file": ["/no/such/file.yaml", "/"],
    "--log-level": ["LOUD"],
}  # fmt: skip


def horovodrun(random: Random, folder: Path) -> Iterator[Fault]:
    """Pass wrong values for horovodrun's options.

    There must be one error that names the option or its value, and no traceback.
    """
    option = str(random.choice(list(_HOROVOD)))
    value = str(random.choice(_HOROVOD[option]))
    words = [option, value] if option == "-np" else ["-np", "1", option, value]
    done = ran([*MULTIRING, "horovodrun", *words, "true"], folder)
    about = f"horovodrun {option} {value!r}: {shown(done)}"
    error = done.words.strip().rpartition("\n")[2]
    if "Traceback" in done.words:
        yield Fault(f"horovodrun: a traceback of {option}", about)
    elif done.code != 0 and option == "-np" and "--hosts" in error:
        yield Fault("horovodrun: another option is named for -np", about)
    elif done.code == 0 and option in ("-np", "--mpi-args", "--hosts", "--config-file"):
        yield Fault(f"horovodrun: {option} is taken", about)


def readers_gone(random: Random, folder: Path) -> Iterator[Fault]:
    """Print a table into a closed pipe.

    The command must print no error, and exit as shells expect after SIGPIPE.
    """
    command = [
        "settings", "settings --markdown", f"plan --hosts {int(random.integers(1, 5))}",
        f"plan --hosts 2 --sizes {int(random.integers(1, 64))}KiB --top {int(random.integers(1, 4))}",
    ][int(random.integers(4))]  # fmt: skip
    program = " ".join(MULTIRING)
    done = ran(shell(f"{program} {command} | true; exit ${{PIPESTATUS[0]}}"), folder)
    if done.code not in (0, 141) or done.err:
        yield Fault("reader gone: a word, or another code", f"{command}: {shown(done)}")


_GIVEN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MULTIRING_RANK",
    "MULTIRING_SIZE", "MULTIRING_LOCAL_RANK", "MULTIRING_LOCAL_SIZE", "MULTIRING_RENDEZVOUS", "MULTIRING_SECRET",
    "MULTIRING_SECRET_FILE", "MULTIRING_STALL_WARN_S", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONUNBUFFERED", "PATH",
    "HOME", "A", "SLURM_PROCID", "PMI_RANK",
)  # fmt: skip


def env_options(random: Random, folder: Path) -> Iterator[Fault]:
    """Set variables with `--env`: the ranks must get them, or an error must name them."""
    names = [str(each) for each in random.choice(_GIVEN, int(random.integers(1, 4)), replace=False)]
    given = {name: str(int(random.integers(1024, 60000))) for name in names}
    if "PATH" in given:
        given["PATH"] = f"{os.environ['PATH']}:/x{given['PATH']}"  # noqa: TID251 -- what the shell needs
    words = [word for name, text in given.items() for word in ("--env", f"{name}={text}")]
    asks = f"import os; print([os.environ.get(name) for name in {names!r}])"
    done = ran([*MULTIRING, "run", "-n", "1", *words, "--", PYTHON, "-S", "-c", asks], folder)
    want = f"[0] {[given[name] for name in names]}\n".encode()
    if done.code == 0 and done.out != want:
        yield Fault("env: replaced without a word", f"{given}: {done.out!r}")
    elif done.code != 0 and not any(f"{name}=" in done.words for name in names):
        yield Fault("env: the error names none", f"{given}: {shown(done)}")


# ---- settings


def settings(random: Random, folder: Path) -> Iterator[Fault]:
    """Set random values, most of them absurd, as settings.

    The job must run, or one error must name the variable and its value.
    """
    seconds = ["3000000", "1e9", "inf", "1e400", "9e18", "nan", "-1", "0", "", "1h", "1e-320", "5", "3.5e7", "2147484"]
    counts = ["0", "1", "-1", "4095", "99999999999999999999", "9223372036854775807", "1e6", "", "0x10", "65536", "٣"]
    kinds = {
        "MULTIRING_INIT_TIMEOUT_S": seconds, "MULTIRING_STALL_WARN_S": seconds, "MULTIRING_STALL_TIMEOUT_S": seconds,
        "MULTIRING_RAIL_TIMEOUT_S": seconds, "MULTIRING_WIRE_TIMEOUT_S": seconds,
        "MULTIRING_SEGMENT_BYTES": counts, "MULTIRING_DATA_MEMORY": counts,
        "MULTIRING_PORTS": ["1-2", "2-1", "0", "70000", "-", "1-2-3"], "MULTIRING_ENGINE": ["shm", "x", ""],
        "MULTIRING_REPLAN": ["0", "maybe", ""], "MULTIRING_TOPOLOGY": ["/no", "/", ""], "MULTIRING_PLAN": ["/no", "/"],
        "MULTIRING_RAILS": ["", "a,a", "a:0bit", "lo:1gbit"],
    }  # fmt: skip
    weight = [5.0 if name.endswith(("INIT_TIMEOUT_S", "SEGMENT_BYTES")) else 1.0 for name in kinds]
    name = str(random.choice(list(kinds), p=np.array(weight) / sum(weight)))
    value = str(random.choice(kinds[name]))
    ranks = int(random.integers(1, 3))
    (folder / "joins.py").write_text(JOINS, encoding="utf-8")
    done = ran([*MULTIRING, "run", "-n", str(ranks), "joins.py"], folder, variables={name: value})
    about = f"{name}={value!r}, {ranks} ranks: {shown(done)}"
    if done.code == 0:
        if done.out.count(b"sum %d" % ranks) != ranks:
            yield Fault(f"setting {name}: wrong sum", about)
        return
    is_named = (
        f"{name}={value}" in done.words or f"{name}={value!r}" in done.words or (not value and name in done.words)
    )
    if name in ("MULTIRING_TOPOLOGY", "MULTIRING_PLAN", "MULTIRING_ENGINE", "MULTIRING_RAILS"):
        is_named = is_named or repr(value) in done.words or not value
    if done.code is None or not is_named or "OverflowError" in done.words or "TypeError" in done.words:
        yield Fault(f"setting {name}: {'no end' if done.code is None else 'a raw error, or none that names it'}", about)


# ---- environments


def limits(random: Random, folder: Path) -> Iterator[Fault]:
    """Set system limits with `ulimit`.

    The job must run, or the error must name the limit or the setting that avoids it.
    """
    flag = str(random.choice(["-f", "-f", "-v", "-n", "-l", "-s"]))
    value = {
        "-f": int(random.integers(100, 10**6)), "-v": int(random.integers(10**7, 6 * 10**7)),
        "-n": int(random.integers(20, 200)), "-l": int(random.integers(0, 200)), "-s": int(random.integers(512, 16384)),
    }[flag]  # fmt: skip
    (folder / "joins.py").write_text(JOINS, encoding="utf-8")
    line = f"ulimit {flag} {value} && {' '.join(MULTIRING)} run -n {int(random.integers(1, 3))} joins.py"
    done = ran(shell(line), folder)
    if done.code == 0:
        return
    setting = "MULTIRING_SEGMENT_BYTES" if flag in ("-f", "-v") else "ulimit"
    if f"ulimit {flag}" not in done.words and setting not in done.words:
        yield Fault(f"limit {flag}: not named", f"{line}: {shown(done)}")


def remains(random: Random, folder: Path) -> Iterator[Fault]:
    """Set variables that other launchers leave behind.

    The program must run as one rank, or an error must name the variables in time.
    """
    size, rank = int(random.integers(2, 9)), 0
    job = int(random.integers(10**6))
    sets: dict[str, dict[str, object]] = {
        "srun --pty": {
            "SLURM_JOB_ID": job, "SLURM_STEP_ID": int(random.integers(5)), "SLURM_PROCID": rank, "SLURM_NTASKS": size,
            "SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_NUM_NODES": 1, "SLURM_NNODES": 1, "SLURM_LOCALID": 0,
        },
        "sbatch": {"SLURM_JOB_ID": job, "SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_NNODES": 1},
        "torchrun": {
            "TORCHELASTIC_RUN_ID": job, "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "localhost", "MASTER_PORT": int(random.integers(20000, 30000)),
        },
        "kubeflow": {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500},
        "some": {"NODE_RANK": 1, "GROUP_RANK": 1, "LOCAL_RANK": 1},
    }  # fmt: skip
    name = str(random.choice(list(sets)))
    variables = {key: str(value) for key, value in sets[name].items()}
    (folder / "joins.py").write_text(JOINS, encoding="utf-8")
    waits = {"MULTIRING_INIT_TIMEOUT_S": "2"}
    done = ran([PYTHON, "joins.py"], folder, variables={**variables, **waits})
    if (done.code != 0 or b"sum 1" not in done.out) and not any(f"{key}=" in done.words for key in variables):
        yield Fault(f"remains: variables of {name} are not named", f"{variables}: {shown(done)}")
    launched = ran([*MULTIRING, "run", "-n", "2", "joins.py"], folder, variables=variables)
    if launched.code != 0 or launched.out.count(b"sum 2") != 2:
        yield Fault(f"remains: multiring run within {name}", f"{variables}: {shown(launched)}")


def addresses(random: Random, folder: Path) -> Iterator[Fault]:
    """Give all hosts one shared, unroutable address, as docker0 does.

    There must be one error that names the address and the setting.
    """
    if os.geteuid() != 0:
        return
    second, third = (int(each) for each in random.integers(16, 250, 2))
    address = f"{random.choice(['172', '10'])}.{second}.{third}.1"
    (folder / "joins.py").write_text(JOINS, encoding="utf-8")
    line = (
        f"ip addr add {address}/24 dev lo; MULTIRING_INIT_TIMEOUT_S=10 MULTIRING_INTERFACE={address} {PYTHON} joins.py"
    )
    words = ["lab", "--hosts", "2", "--slots", "1", "--no-topology", "--link", "1gbit", "--", "bash", "-c", line]
    done = ran([*MULTIRING, *words], folder, deadline_s=60.0)
    if done.code is None or (done.code != 0 and not (address in done.words and "MULTIRING_INTERFACE" in done.words)):
        yield Fault("addresses: a shared one is not named", f"{address}: {shown(done)}")


# ---- files


def plans(random: Random, folder: Path) -> Iterator[Fault]:
    """Save a plan with `multiring plan --save` in a random job, and run a job with it."""
    ranks, size = int(random.integers(2, 4)), int(random.integers(1, 2048))
    top = int(random.integers(1, 4))
    planned = ["plan", "--sizes", f"{size}KiB", "--top", str(top), "--save", "plan.toml"]
    made = ran([*MULTIRING, "run", "-n", str(ranks), "--", *MULTIRING, *planned], folder)
    if made.code != 0 or not (folder / "plan.toml").exists():
        yield Fault("plan: not saved", shown(made))
        return
    (folder / "joins.py").write_text(JOINS.replace("ones(3)", f"ones({size * 256}, 'f4')"), encoding="utf-8")
    done = ran([*MULTIRING, "run", "-n", str(ranks), "joins.py"], folder, variables={"MULTIRING_PLAN": "plan.toml"})
    if done.code != 0 or done.out.count(b"sum %d" % ranks) != ranks:
        yield Fault("plan: a saved one is refused", f"{ranks} ranks, {size} KiB: {shown(done)}")


def devices(random: Random, folder: Path) -> Iterator[Fault]:
    """Pass a timeline path that is no regular file.

    Afterwards, the path must have the same kind and the same inode.
    """
    kinds = ["pipe", "socket", "folder", "link to a pipe"] + (["null"] * 2 if os.geteuid() == 0 else [])
    kind, path = str(random.choice(kinds)), folder / f"it{int(random.integers(100))}"
    if kind == "null":
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.fspath(path))
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(folder / "fifo" if kind.startswith("link") else path)
        if kind.startswith("link"):
            path.symlink_to(folder / "fifo")
    before = path.lstat()
    (folder / "joins.py").write_text(JOINS, encoding="utf-8")
    by_option = bool(random.random() < 0.5)
    words = ["--timeline", path.name] if by_option else []
    variables = {} if by_option else {"MULTIRING_TIMELINE": path.name}
    done = ran(
        [*MULTIRING, "run", "-n", str(int(random.integers(1, 3))), *words, "joins.py"], folder, variables=variables
    )
    after = path.lstat() if path.is_symlink() or path.exists() else None
    same = after is not None and (stat.S_IFMT(after.st_mode), after.st_ino) == (
        stat.S_IFMT(before.st_mode),
        before.st_ino,
    )
    if not same:
        yield Fault("device: replaced by a timeline", f"{kind}, option {by_option}: {shown(done)}")


_PAPER = {
    "--topology": ["/no/such/file", "/", "a.npy"],
    "--samples": ["-1", "0", "x", "10"],
    "--source-rate": ["nan", "-1", "1"],
    "--ranks": ["-1", "0", "4"],
    "--sample-bytes": ["-5", "x", "100"],
    "--hosts": ["0", "-2", "3"],
}


def ignored_options(random: Random, folder: Path) -> Iterator[Fault]:
    """Pass `multiring data plan URL` the options for a plan without data.

    Every option must cause an error or change the plan.
    """
    (folder / "a.npy").parent.mkdir(exist_ok=True)
    rows = int(random.integers(20, 300))
    np.save(folder / "a.npy", np.ones((rows, 4), "f4"))
    packed = ran([*MULTIRING, "data", "pack", "a.npy", "pk"], folder)
    if packed.code != 0:
        yield Fault("plan of data: no pack", shown(packed))
        return
    helped = ran([*MULTIRING, "data", "plan", "--help"], folder).words
    known = [option for option in _PAPER if f"{option} " in helped]
    chosen = [str(each) for each in random.choice(known, int(random.integers(1, 3)), replace=False)]
    words = [word for option in chosen for word in (option, str(random.choice(_PAPER[option])))]
    plain = ran([*MULTIRING, "data", "plan", "pk"], folder)
    done = ran([*MULTIRING, "data", "plan", "pk", *words], folder)
    if done.code == 0 and plain.code == 0 and done.out == plain.out:
        yield Fault("plan of data: an option is ignored", f"{' '.join(words)}: {shown(done)}")
    elif "Traceback" in done.words:
        yield Fault("plan of data: a traceback", f"{' '.join(words)}: {shown(done)}")


# ---- several hosts


def host_lines(random: Random, folder: Path) -> Iterator[Fault]:
    """Print lines in parts and of random lengths from ranks that mpiexec starts.

    Each line must arrive whole, with its rank's tag.
    """
    peers = folder_of("mpich").parent
    found = next((path for path in peers.glob("mpich*/**/bin/mpiexec") if path.exists()), None)
    if found is None:
        return
    ranks, count = int(random.integers(2, 4)), int(random.integers(20, 120))
    words = [str(int(each)) for each in random.integers(0, 10**6, 5)]
    length = int(random.integers(1, 200))
    text = f"""
        import sys, multiring
        group = multiring.init()
        for i in range({count}):
            print("step", i, {", ".join(words)}, "x" * {length}, "of rank", group.rank)
            if i % {int(random.integers(1, 10))} == 0:
                group.barrier()
    """
    (folder / "steps.py").write_text(textwrap.dedent(text), encoding="utf-8")
    variables = {"PATH": f"{found.parent}:/usr/bin:/bin"}
    command = [*MULTIRING, "run", "--hosts", f"localhost:{ranks}", "--", PYTHON, "steps.py"]
    done = ran(command, folder, variables=variables, deadline_s=60.0)
    if done.code != 0:
        yield Fault("hosts: exit code", shown(done))
        return
    lines = lines_by_rank(done.out, ranks)
    want = {
        rank: [f"step {i} {' '.join(words)} {'x' * length} of rank {rank}".encode() for i in range(count)]
        for rank in range(ranks)
    }
    wrong = [line for rank in range(ranks) for line in lines[rank] if line not in want[rank]] + lines[-1]
    if wrong or any(lines[rank] != want[rank] for rank in range(ranks)):
        yield Fault("hosts: lines mixed", f"{ranks} ranks, {count} lines: {len(wrong)} wrong, as {wrong[:2]!r:.300}")
