"""The agent of one host: it starts this host's ranks for a launcher on another host.

Usage: `python -m multiring._launch.host_agent stdio|socket|connect`.

- stdio: the launcher is at the other end of standard input and standard output, as in an ssh session.
- socket: standard input is a socket to the launcher, which runs on this host.
- connect: standard input has one line of JSON with the launcher's address and the job's secret, as in a Slurm step.

The launcher sends the task. It never comes by the command line or the environment, which other users may read.
"""

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from multiring._launch.commands import CommandError, check_command
from multiring._launch.control_link import AGENT_BEGINS, CALL, ControlLink, StreamData, secret_of_start
from multiring._launch.control_tcp import connect
from multiring._launch.cores import cores_of_cpus, threads_per_rank, usable_cpus
from multiring._launch.host_job import HostJob, HostTask, StdinPipe
from multiring._launch.job import JobOptions
from multiring._launch.pickled_call import FILES, CallFiles, unnamed_file
from multiring._launch.rank_starts import HostPlace, free_port, rank_starts, shares_told
from multiring._limits.cpu_limit import cpu_limit
from multiring._runtime.bootstrap.addresses import host_id, own_address
from multiring._runtime.bootstrap.handshake import Message
from multiring._settings import inherited_environment
from multiring._version import VERSION
from multiring.errors import LaunchError, MultiringError

# This range is below Linux's ephemeral ports, which begin at 32768, and few services use it.
PORTS = (20000, 29999)
LAST_WORDS_S = 5.0  # how long the last messages may take to leave
_LAUNCHER_LOST = 1
_SPARE_PORTS = 4  # where ranks that meet again may listen


class Agent:
    """Serves one launcher until it says goodbye or is lost.

    Args:
        link: the connection to the launcher.
        task: what the ranks run, if the launcher does not say it.
        about: more facts for the first message to the launcher.
        secret: the job's secret, if the launcher does not send it.
    """

    def __init__(
        self,
        link: ControlLink,
        task: HostTask | None = None,
        about: Mapping[str, object] | None = None,
        secret: bytes | None = None,
    ) -> None:
        self._link = link
        self._secret = secret
        self._task = task
        self._call: int | None = None  # the descriptor of a file with the call, if the ranks call a function
        version = ".".join(map(str, sys.version_info[:3]))
        link.send(hello={"version": VERSION, "python": version, "pid": os.getpid(), **(about or {})})

    def run(self) -> int:
        """Serve the launcher and return the exit code that it gives to this process."""
        while True:
            self._listen()
            while (message := self._link.next_message()) is not None:
                if isinstance(message, StreamData):
                    # Other data are the rest of the input of a rank that has ended.
                    if message.stream == CALL and self._call is not None:
                        with open(self._call, "ab", closefd=False) as file:
                            file.write(message.data)
                    continue
                if "bye" in message:
                    self._link.flush(time.monotonic() + LAST_WORDS_S)
                    return int(message["bye"])
                try:
                    self._serve(message)
                except CommandError as error:
                    self._report(message, error=str(error), code=error.exit_code)
                except (MultiringError, OSError) as error:
                    self._report(message, error=str(error), code=None)
            if not self._link.is_open:
                if self._task is not None and not self._task.relays:
                    sys.stderr.write(f"multiring: the launcher was lost: {self._link.failure}\n")
                return _LAUNCHER_LOST

    def _listen(self) -> None:
        """Wait until a message may have arrived."""
        with selectors.PollSelector() as poll:
            self._link.watch(poll)
            if poll.get_map():
                for key, _ in poll.select(max(0.0, self._link.wake_at - time.monotonic())):
                    key.data()
        self._link.ping_if_due()
        if self._link.has_fallen_silent:
            self._link.close("it sends nothing any more")

    def _serve(self, message: Message) -> None:
        if "plan" in message:
            self._prepare(message["plan"])
        elif "begin" in message:
            self._start(message["begin"], message["start"])
            self._report(message, over=True)
        elif "end" in message:
            self._report(message, over=True)
        elif "say" in message:
            sys.stderr.write(f"multiring: {message['say']}\n")

    def _prepare(self, plan: Message) -> None:
        """Check what the ranks need, and answer with what the launcher must know of this host."""
        if self._task is None:
            self._task = _task_of(plan, self._secret)
            self._call = unnamed_file(b"") if plan["calls"] else None
        check_command(self._task.command[0], self._task.environment)
        self._link.patience_s = plan["silence_s"]
        address = _address_of(plan["name"], plan["interface"]) if plan["is_met"] else "127.0.0.1"
        ports = tuple(plan["ports"] or PORTS)
        try:
            port, torch_port, *spare = (free_port(address, (ports[0], ports[1])) for _ in range(2 + _SPARE_PORTS))
        except OSError as error:
            raise LaunchError(
                f"no port of {ports[0]} to {ports[1]} is free at {address} ({error.strerror}); MULTIRING_PORTS sets "
                "the range"
            ) from None
        cores = cores_of_cpus(usable_cpus())
        self._link.send(
            ready={
                "host_id": host_id(),
                "address": address,
                "port": port,
                "torch_port": torch_port,
                "spare_ports": spare,
                "threads": threads_per_rank(cores, plan["ranks"], cpu_limit()),
            }
        )

    def _report(self, asked: Message, **message: object) -> None:
        """Answer a message of the launcher, with the number of the start that it was about."""
        self._link.send(**message, start=asked.get("start"))

    def _start(self, told: Message, number: int) -> None:
        """Run start `number` of the ranks to its end."""
        task = self._task
        if task is None:
            raise LaunchError("internal error: the launcher starts ranks without a plan")
        place = HostPlace(
            hosts=tuple((name, count) for name, count in told["hosts"]),
            index=told["index"],
            job=told["job"],
            rendezvous=told["rendezvous"],
            reports=f"@multiring-{secrets.token_hex(8)}",
            secret=secret_of_start(task.secret, told["job"]),
            threads=told["threads"],
            torch_address=told["torch_address"],
            torch_port=told["torch_port"],
            start=number,
        )
        reads_stdin = told["stdin_rank"] in place.ranks
        stdin = StdinPipe(self._link, number) if reads_stdin else None
        options = _with(task.options, told, number, reads_stdin=reads_stdin)
        starts = rank_starts(task.command, place, options, task.environment, None if stdin is None else stdin.reading)
        cores = cores_of_cpus(usable_cpus())
        said = shares_told(len(place.ranks), len(cores), place.threads, task.environment)
        with contextlib.ExitStack() as stack:
            calls = () if self._call is None else tuple(CallFiles.sharing(self._call) for _ in starts)
            for each in calls:
                stack.callback(each.close)
            if calls:
                starts = [
                    replace(start, command=(*start.command, f"{FILES}{each}"), descriptors=each.descriptors)
                    for start, each in zip(starts, calls, strict=True)
                ]
            HostJob(self._link, place, starts, replace(task, calls=calls, options=options), said, stdin).run()


def _with(options: JobOptions, told: Message, number: int, *, reads_stdin: bool) -> JobOptions:
    logs = options.logs
    return JobOptions(
        log_dir=options.log_dir,
        logs=logs if number == 0 else lambda *rank: tuple_of(f"restart-{number}", logs(*rank)),
        horovod=options.horovod,
        timeline=options.timeline,
        grace_s=options.grace_s,
        variables=options.variables,
        min_ranks=told.get("min_ranks"),
        max_ranks=told.get("max_ranks"),
        record=options.record,
        stdin_rank=told["stdin_rank"] if reads_stdin else None,
        reports_steps=told["reports_steps"],
    )


def tuple_of(folder: str, names: tuple[str, str]) -> tuple[str, str]:
    """Return `names` in `folder`."""
    return f"{folder}/{names[0]}", f"{folder}/{names[1]}"


def _task_of(plan: Message, secret: bytes | None) -> HostTask:
    """Return the task that the launcher sent, and enter its folder.

    `secret` is the job's secret, or None if it is in the plan.

    Raises:
        LaunchError: the folder cannot be entered.
    """
    folder = plan["folder"]
    if folder is not None:
        try:
            os.chdir(folder)
        except OSError as error:
            raise LaunchError(
                f"the folder {folder} cannot be entered there ({error.strerror}): the ranks run in the launcher's "
                "folder, which every host must have under the same path"
            ) from None
    sent: dict[str, str] = plan["environment"]
    options = JobOptions(
        horovod=plan["horovod"],
        timeline=None if plan["timeline"] is None else Path(plan["timeline"]),
        variables=plan["variables"],
    )
    return HostTask(
        command=tuple(plan["command"]),
        environment={**inherited_environment(), **sent, **({} if folder is None else {"PWD": folder})},
        options=options,
        secret=bytes.fromhex(plan["secret"]) if secret is None else secret,
        relays=True,
    )


def _address_of(name: str, interface: str | None) -> str:
    """Return the address of this host at which the other hosts reach it.

    It is the address of the host's name as the user has given it, if this host has such an address. A name of
    ~/.ssh/config may mean nothing here; then it is the address of MULTIRING_INTERFACE or of the default route.
    """
    if interface is None:
        with contextlib.suppress(OSError):
            for *_, place in socket.getaddrinfo(name.rpartition("@")[2], None, type=socket.SOCK_STREAM):
                address = str(place[0])
                if not address.startswith("127.") and address != "::1":
                    with contextlib.suppress(OSError):
                        free_port(address)
                        return address
    return own_address(interface)


def _own_streams() -> tuple[int, int]:
    """Take standard input and output for the connection, and return their new descriptors.

    What this process or its libraries print goes to standard error.
    """
    reading, writing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return reading, writing


def main(arguments: Sequence[str]) -> int:
    """Run the agent and return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback
    kind = arguments[0] if arguments else ""
    if kind == "connect":
        told = json.loads(sys.stdin.readline())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        node = int(inherited_environment()[told["node_variable"]])
        secret = bytes.fromhex(told["secret"])
        link = connect(told["launcher"], secret, node, told["patience_s"])
        return Agent(link, about={"host": os.uname().nodename}, secret=secret).run()
    if kind not in ("stdio", "socket"):
        sys.stderr.write("multiring: only multiring run starts this module, with stdio, socket or connect\n")
        return 2
    reading, writing = _own_streams()
    if kind == "stdio":
        os.write(writing, AGENT_BEGINS)
    else:
        os.close(writing)
        writing = reading
    return Agent(ControlLink(reading, writing)).run()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MultiringError as error:
        sys.stderr.write(f"multiring: {error}\n")
        sys.exit(2)
