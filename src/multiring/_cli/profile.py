"""multiring profile: measure the steps of a training script on one rank, for `multiring simulate --profile`.

The script runs unchanged, as a job of one rank, and ends after the measured steps. It may use plain torch,
mt.distribute, DistributedDataParallel, or Keras on torch. The profile has the gradients in the order in which they
become ready, the times of a step's parts, and the peak memory.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from multiring._cli.number_option import RANKS, whole
from multiring._cli.output import counted, show
from multiring._launch import JobOptions, run_local
from multiring._launch.cores import cores_of_cpus, share_cpus, thread_variables, threads_per_rank, usable_cpus
from multiring._launch.profiled import PROFILE, REFUSAL, profiled_command
from multiring._launch.script_copies import running_copies
from multiring._limits.cpu_limit import cpu_limit
from multiring._replacing import replace_file, require_replaceable, words_of
from multiring._settings import inherited_environment
from multiring._simulator.script_profile import ScriptProfile, script_profile_of
from multiring.errors import ArgumentError, UnsupportedError

_FOLDER = "multiring-profile-"
_WITH_VALUES = ("-W", "-X")  # of Python's own options
_WHAT = "a profile"
_MOST_A_CPU = 8  # copies: more would only wait for each other, and fill the memory
_MS = 1e3
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "multiring profile [-o FILE] [OPTIONS] [--] [python] SCRIPT [ARGUMENTS...]"
    parser.add_argument("-o", "--output", type=Path, default=Path("profile.json"), metavar="FILE", help="the profile")
    parser.add_argument("--steps", type=whole(3), default=20, metavar="N", help="steps to measure (default 20)")
    parser.add_argument(
        "--to-end", action="store_true", help="let the script run to its end (default: end it after these steps)"
    )
    parser.add_argument(
        "--ranks-per-host",
        type=RANKS,
        default=1,
        metavar="N",
        help="give the script the cores and threads of one of N ranks of a host, beside N - 1 copies (default 1: all "
        "cores)",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT...", help="a Python script, or -m MODULE")


def run(arguments: argparse.Namespace) -> int:
    """Run the script, write the profile and return 0, or the exit code of a script that failed."""
    python, words = _python_and_script(arguments.program)
    _require_place(arguments.output)
    cores = cores_of_cpus(usable_cpus())
    if arguments.ranks_per_host > _MOST_A_CPU * len(cores):
        raise ArgumentError(
            f"--ranks-per-host {arguments.ranks_per_host}: each is a copy of the script that runs now, on "
            f"{len(cores)} CPUs; want at most {_MOST_A_CPU * len(cores)}"
        )
    threads = threads_per_rank(cores, arguments.ranks_per_host, cpu_limit())
    variables = thread_variables(inherited_environment(), threads)
    own_share, *shares = share_cpus(cores, arguments.ranks_per_host)
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix=_FOLDER)))
        beside = [folder / f"copy-{number}" for number in range(1, arguments.ranks_per_host)]
        for each in beside:
            each.mkdir()
        # A copy goes on until it is ended, or until the script's own end.
        copies = [profiled_command(python, each, steps=sys.maxsize, goes_on=True, words=words) for each in beside]
        ends.enter_context(running_copies(copies, shares, {**inherited_environment(), **variables}))
        ends.enter_context(_on_cpus(own_share))
        command = profiled_command(
            python, folder, steps=arguments.steps, goes_on=arguments.to_end, words=words, beside=beside
        )
        code = run_local(command, 1, JobOptions(variables=variables))
        if (folder / REFUSAL).exists():
            raise UnsupportedError(f"{' '.join(words)}: {(folder / REFUSAL).read_text(encoding='utf-8')}")
        if code:
            return code
        if not (folder / PROFILE).exists():
            raise UnsupportedError(f"{' '.join(words)} ended its process (os._exit) before a profile could be written")
        data = (folder / PROFILE).read_bytes()
    profile = script_profile_of(data.decode())
    try:
        replace_file(arguments.output, data, is_ours=_is_profile, what=_WHAT)
    except OSError as error:
        raise ArgumentError(f"-o {words_of(error, arguments.output)}; the profile was measured, and is lost") from None
    _show(profile, arguments.output)
    if profile.copies < arguments.ranks_per_host:
        show(
            f"multiring: {arguments.ranks_per_host - profile.copies} of {arguments.ranks_per_host - 1} copies of the "
            f"script ended before it was measured, so the times are those of {profile.copies} ranks on a host. Copies "
            "run in the same folder at the same time: give the script enough steps, and no file or port that only one "
            "process can have"
        )
    return 0


@contextmanager
def _on_cpus(cpus: frozenset[int]) -> Iterator[None]:
    """Let this process, and the processes that it starts, run on `cpus`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _python_and_script(program: list[str]) -> tuple[list[str], list[str]]:
    """Return the Python with its own options, and the script with its arguments.

    Raises:
        ArgumentError: the program is not a Python script.
    """
    words = program[1:] if program[:1] == ["--"] else list(program)
    if not words:
        raise ArgumentError("no script: want multiring profile -- python train.py")
    python = [sys.executable]
    if Path(words[0]).name.startswith("python"):
        found = shutil.which(words[0])
        if found is None:
            raise ArgumentError(f"{words[0]}: no such command; want a Python, or a script alone")
        python = [found]
        del words[0]
        while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
            count = 2 if words[0] in _WITH_VALUES else 1
            python += words[:count]
            del words[:count]
    if not words or words[0] in ("-c", "-") or words == ["-m"]:
        raise ArgumentError(f"{' '.join(program)}: want a file, or -m with a module, after the Python")
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise ArgumentError(
            f"{words[0]}: no such file; want a Python script, as in multiring profile -- python train.py"
        )
    return python, words


def _require_place(path: Path) -> None:
    """Raise ArgumentError if a profile clearly cannot be written to `path`: the measurement takes minutes."""
    try:
        require_replaceable(path, is_ours=_is_profile, what=_WHAT)
    except OSError as error:
        raise ArgumentError(f"-o {words_of(error, path)}; want a file that can be written") from None
    if not path.parent.is_dir():
        raise ArgumentError(f"-o {path}: there is no directory {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ArgumentError(f"-o {path}: files cannot be written to {path.parent}; name another directory")


def _is_profile(data: bytes) -> bool:
    return b'"multiring_profile"' in data[:100]


def _show(profile: ScriptProfile, path: Path) -> None:
    seconds = profile.seconds
    show(
        f"{path}: {profile.model} ({profile.form}, {profile.precision}), {profile.samples} samples a step, "
        f"{profile.steps} steps on {profile.threads} threads"
        + (f", beside {profile.copies - 1} more of the script" if profile.copies > 1 else "")
    )
    show(
        f"a step: {seconds.step * _MS:.4g} ms (half of the steps: {seconds.step_low * _MS:.4g} to "
        f"{seconds.step_high * _MS:.4g})"
    )
    for name in ("input", "forward", "backward", "optimizer", "other"):
        show(f"  {name:<10}{getattr(seconds, name) * _MS:>10.4g} ms")
    if profile.feeding is not None:
        fed = profile.feeding
        show(
            f"input: {counted(fed.workers, 'worker')}, {fed.worker_s * _MS:.4g} ms of a worker for a sample, "
            f"{fed.cpu_s * _MS:.4g} ms of a core"
        )
    show(
        f"gradients: {len(profile.gradients)}, {profile.gradient_bytes / _MIB:.4g} MiB; peak memory "
        f"{profile.peak_memory_bytes / _MIB:.4g} MiB"
    )
