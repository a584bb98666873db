"""Start one checker on each of several hosts by ssh.

`multiring run` is not used: it refuses hosts with another Python, and it starts no rank if one host does not answer.
Both are findings here.
"""

import contextlib
import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from multiring._diagnosis.readings import Absence
from multiring._launch.host_sessions import is_here, ssh_command, with_remedy
from multiring._launch.mpiexec import parse_hosts
from multiring._launch.over_mpiexec import rendezvous_of
from multiring._launch.own_modules import module_command
from multiring._settings import Settings, environment_of, inherited_environment

_CONNECT_S, _HELLO_S = 8, 20.0
_CHECK_S = 100.0  # longer than a check in which every question runs into its limit is likely to take
_MOST_AT_ONCE = 32
_SHOWN = 300  # characters of a host's last words


@dataclass(frozen=True, slots=True)
class PlannedHost:
    """A host, perhaps as user@host, and the number of ranks that it is to have; None: the check does not say."""

    name: str
    ranks: int | None


@dataclass(frozen=True, slots=True)
class RemoteReport:
    """What rank 0 printed, and its exit code; None if it has not ended in time. `said` are its last words."""

    output: str
    code: int | None
    said: str


def planned_hosts(text: str, ranks: int | None) -> list[PlannedHost]:
    """Return the hosts in a text like a:4,b:4 or a,b.

    Args:
        text: the hosts, with the number of ranks of each if it is known.
        ranks: the number of ranks of each host, in place of those in `text`.

    Raises:
        ArgumentError: the text is malformed.
    """
    places = parse_hosts(text)
    has_count = {word.strip().partition(":")[0] for word in text.split(",") if ":" in word}
    return [
        PlannedHost(name, ranks if ranks is not None else count if name in has_count else None)
        for name, count in places
    ]


def answering(hosts: Sequence[PlannedHost]) -> tuple[list[PlannedHost], list[Absence]]:
    """Return the hosts on which this Python can import multiring, and the others with the reason.

    No host is waited for longer than 20 s.
    """
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        faults = list(pool.map(_fault_of, hosts))
    found = [host for host, fault in zip(hosts, faults, strict=True) if not fault]
    return found, [Absence(who=host.name, why=fault) for host, fault in zip(hosts, faults, strict=True) if fault]


def _fault_of(host: PlannedHost) -> str:
    words = _words(host, [*module_command("multiring", "--version")])
    try:
        done = subprocess.run(  # noqa: S603 -- ssh, or this Python
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_HELLO_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer by ssh within {_HELLO_S:g} s"
    except OSError as error:
        return f"{words[0]}: {error.strerror}"
    if done.returncode == 0:
        return ""
    told = " ".join((done.stderr or done.stdout).split())[-_SHOWN:]
    return with_remedy(told or f"exit code {done.returncode}", host.name)


def _words(host: PlannedHost, command: Sequence[str]) -> list[str]:
    if is_here(host.name):
        return list(command)
    path = inherited_environment().get("PYTHONPATH")
    variables = [f"PYTHONPATH={path}"] if path else []
    line = "exec " + shlex.join(["env", *variables, *command])
    return ssh_command(host.name, [f"-oConnectTimeout={_CONNECT_S}"], line)


def check_over_ssh(
    hosts: Sequence[PlannedHost], absent: Sequence[Absence], words: Sequence[str], settings: Settings
) -> RemoteReport:
    """Start `multiring doctor` on each host, and return what rank 0, on the first one, printed.

    Args:
        hosts: hosts that answer.
        absent: the other ones, for the report.
        words: the options of the doctor on each host.
        settings: this process's settings.
    """
    here = os.uname().nodename
    names = [here if is_here(host.name) else host.name.rpartition("@")[2] for host in hosts]
    common = rendezvous_of(settings, names[0])
    common |= _own_settings(inherited_environment())
    with contextlib.ExitStack() as stack:
        outputs, processes = [], []
        for rank, host in enumerate(hosts):
            place = {"rank": rank, "size": len(hosts), "local_rank": 0, "local_size": 1}
            told: dict[str, Any] = {
                "variables": {**common, **environment_of(**place)},
                "peers": names,
                "planned": host.ranks,
                "absent": [asdict(each) for each in absent] if rank == 0 else [],
            }
            files = tuple(stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            command = module_command("multiring", "doctor", "--told", *words)
            process = subprocess.Popen(  # noqa: S603 -- ssh, or this Python
                _words(host, command), stdin=subprocess.PIPE, stdout=files[0], stderr=files[1], start_new_session=True
            )
            stack.callback(_end, process)
            _tell(process, told)
            outputs.append(files)
            processes.append(process)
        code = _waited(processes[0])
        for each in outputs[0]:
            each.seek(0)
        output, said = (each.read().decode(errors="replace") for each in outputs[0])
        return RemoteReport(output, code, said.strip()[-_SHOWN:])


def _own_settings(environment: Mapping[str, str]) -> dict[str, str]:
    place = environment_of(rank=0, size=1, local_rank=0, local_size=1, rank_process="", launched_in="", reports="")
    return {name: text for name, text in environment.items() if name.startswith("MULTIRING_") and name not in place}


def _tell(process: "subprocess.Popen[bytes]", told: Mapping[str, Any]) -> None:
    """Send a checker its place and the secret by standard input: other users can read command lines."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps(told).encode() + b"\n")


def _waited(process: "subprocess.Popen[bytes]") -> int | None:
    try:
        return process.wait(_CHECK_S)
    except subprocess.TimeoutExpired:
        return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + 2.0
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, until - time.monotonic()))
    if process.poll() is None:
        process.kill()
    process.wait()
