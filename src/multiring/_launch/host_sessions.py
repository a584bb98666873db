"""The launcher's sessions with the agents of its hosts: how they are opened, and why they failed."""

import contextlib
import os
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, cast

from multiring._launch.commands import CommandError
from multiring._launch.control_link import AGENT_BEGINS, ControlLink
from multiring._launch.leftovers import signal_group
from multiring._launch.rank_starts import dying_with

AGENT = "multiring._launch.host_agent"
_HERE = ("localhost", "127.0.0.1", "::1")
_READ_BYTES = 1 << 16
_SHOWN_LINES = 20
_LAST_WORDS_S = 1.0  # how long a process may take to end and to say why, after its connection has closed
_BYE_S = 5.0
# Words of ssh's or the shell's errors -> what to do.
_REMEDIES = {
    "Host key verification failed": "its key is not known here, or has changed: connect once by hand with "
    "`ssh {host}`, compare the key and accept it, or add it to ~/.ssh/known_hosts",
    "Permission denied": "ssh would have to ask for a password, and it cannot: set up a key, for example with "
    "`ssh-copy-id {host}`, or unlock it in ssh-agent",
    "Could not resolve": "want names that ssh knows, from DNS, /etc/hosts or ~/.ssh/config",
    "No module named": "that Python has no multiring of this version: install it there, into {python}",
    "not found": "this Python must be on every host under the same path: {python}",
    "No such file or directory": "this Python must be on every host under the same path: {python}",
}


class HostSession:
    """The session with the agent of one host.

    Args:
        name: the host's name, for messages.
        index: the host's number in the job.
        ranks: the number of ranks on the host.
        opener: starts the agent and gives the session its connection. None: the agent comes by itself.
        shows_itself: the agent has a task of its own, and shows the output of its ranks. Otherwise the launcher does.
    """

    def __init__(
        self,
        name: str,
        index: int,
        ranks: int,
        opener: "Callable[[HostSession], None] | None" = None,
        *,
        shows_itself: bool = False,
    ) -> None:
        self.name, self.index, self.ranks = name, index, ranks
        self.host = name.rpartition("@")[2]  # the name for programs that run there
        self.shows_itself = shows_itself
        self._opener = opener
        self.link: ControlLink | None = None
        self.hello: dict[str, Any] | None = None
        self.ready: dict[str, Any] | None = None
        self.is_over = True  # the agent runs no ranks
        self.lines: deque[str] = deque(maxlen=_SHOWN_LINES)  # what the agent or ssh has printed
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._partial = b""
        self._program: str | None = None  # the program that connects to the agent

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""
        return self.link is not None and self.link.is_open

    @property
    def is_opened_here(self) -> bool:
        """Whether this process starts the agent. Otherwise the agent comes by itself."""
        return self._opener is not None

    @property
    def has_ended_early(self) -> bool:
        """Whether the program that starts the agent has ended, and no agent has come."""
        return self.link is None and self._process is not None and self._process.poll() is not None

    def send(self, **message: object) -> None:
        """Send a message if the connection is open."""
        if self.link is not None:
            self.link.send(**message)

    def take_link(self, link: ControlLink) -> None:
        """Use a new connection to the agent."""
        self.link, self.hello, self.ready = link, None, None

    def open(self) -> None:
        """Open the session if it is not open, and if the agent does not come by itself."""
        if not self.is_open and self._opener is not None:
            self._opener(self)

    def open_here(self) -> None:
        """Start an agent on this host."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: S603 -- a module of multiring
                [sys.executable, "-m", AGENT, "socket"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        descriptor = ours.detach()
        self._opened(process, ControlLink(descriptor, descriptor))

    def open_by(self, words: Sequence[str]) -> None:
        """Start a command that connects its standard streams to the agent, such as ssh."""
        process = subprocess.Popen(  # noqa: S603 -- ssh, or the scheduler's program
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C at the terminal must not end ssh, which still carries the ends of the ranks; and without a
            # terminal ssh cannot ask for anything.
            start_new_session=True,
            preexec_fn=dying_with(os.getpid()),  # noqa: PLW1509 -- this process has one thread
            bufsize=0,
        )
        pipes = cast("IO[bytes]", process.stdout), cast("IO[bytes]", process.stdin)
        reading, writing = (os.dup(pipe.fileno()) for pipe in pipes)
        for pipe in pipes:
            pipe.close()
        self._program = words[0]
        self._opened(process, ControlLink(reading, writing, begins_with=AGENT_BEGINS))

    def open_step(self, words: Sequence[str], environment: Mapping[str, str], text: bytes) -> None:
        """Start a program that starts agents on all hosts, such as srun; they come by themselves.

        Args:
            words: the command. Its output is taken for errors.
            environment: the command's environment.
            text: the agents' standard input.
        """
        process = subprocess.Popen(  # noqa: S603 -- the scheduler's program
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            preexec_fn=dying_with(os.getpid()),  # noqa: PLW1509 -- this process has one thread
            bufsize=0,
        )
        self._program = words[0]
        self._process, self._errors = process, cast("IO[bytes]", process.stderr)
        os.set_blocking(self._errors.fileno(), False)
        with contextlib.suppress(BrokenPipeError), cast("IO[bytes]", process.stdin) as pipe:
            pipe.write(text)  # it fits into the pipe

    def _opened(self, process: "subprocess.Popen[bytes]", link: ControlLink) -> None:
        self._process = process
        self._errors = cast("IO[bytes]", process.stderr)
        os.set_blocking(self._errors.fileno(), False)
        self.lines.clear()
        self.take_link(link)

    def watch(self, poll: selectors.BaseSelector, *, reads: bool) -> None:
        """Register the descriptors with `poll`, each with a callable as its data."""
        if self.link is not None:
            self.link.watch(poll, reads=reads)
        if self._errors is not None:
            poll.register(self._errors, selectors.EVENT_READ, self._read_errors)

    def _read_errors(self) -> None:
        if self._errors is None:
            return
        try:
            data = os.read(self._errors.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._errors.close()
            self._errors = None
        *lines, self._partial = (self._partial + data).split(b"\n")
        if not data and self._partial:
            lines.append(self._partial)
        self.lines += [line.decode("utf-8", "replace").rstrip() for line in lines if line.strip()]

    def reason(self) -> str:
        """Return why the connection has ended. It may wait a second for the last words of the agent or of ssh."""
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_LAST_WORDS_S)
            self._read_errors()
        told = "; ".join(self.lines)
        program = "the agent" if self._program is None else self._program
        failure = "" if self.link is None else self.link.failure
        said = told or (failure if code is None else f"{program} ended with exit code {code}")
        remedy = next((text for words, text in _REMEDIES.items() if words in told), "")
        fix = remedy.format(host=self.name, python=sys.executable)
        return f"{said}{'; ' if fix else ''}{fix}"

    def close(self, until: float) -> None:
        """Close the connection, and wait for the end of the agent until the monotonic time `until` at most."""
        if self.link is not None:
            self.link.flush(until)
            self.link.close()
        if self._process is not None:
            try:
                self._process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                signal_group(self._process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LAST_WORDS_S)
                signal_group(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None


def is_here(name: str) -> bool:
    """Return whether `name` is this host for the user who runs this process."""
    return name in (*_HERE, os.uname().nodename)


def ssh_words(name: str, words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts the agent on host `name` by ssh.

    Args:
        name: the host, perhaps as user@host.
        words: more options for ssh.
        environment: the variables of the ranks; only PATH and PYTHONPATH are used.

    Raises:
        CommandError: there is no ssh.
    """
    if shutil.which("ssh", path=environment.get("PATH", os.defpath)) is None:
        raise CommandError(
            "--hosts needs OpenSSH's ssh, and there is none on PATH: install it (Debian: openssh-client), or start the "
            "ranks by an MPI with --launcher mpiexec",
            127,
        )
    # BatchMode: ssh asks for nothing. An unknown host key is then an error, unless ~/.ssh/config accepts it.
    # ControlMaster: this ssh ends with the job, so it must not carry other sessions of the user. It may use an existing
    # master.
    options = ("-oBatchMode=yes", "-oLogLevel=ERROR", "-oControlMaster=no")
    return ["ssh", "-T", "-x", *options, *words, name, agent_command("stdio", environment)]


def agent_command(kind: str, environment: Mapping[str, str]) -> str:
    """Return the shell command that starts an agent of `kind`, with this process's Python and PYTHONPATH."""
    path = environment.get("PYTHONPATH")
    variables = [f"PYTHONPATH={path}"] if path else []
    return "exec " + shlex.join(["env", *variables, sys.executable, "-m", AGENT, kind])


class HostSessions:
    """The sessions with all hosts of a job, in the order of the hosts. They outlive restarts of the ranks.

    Args:
        sessions: the sessions.
    """

    def __init__(self, sessions: Sequence[HostSession]) -> None:
        self.all = list(sessions)

    def open(self) -> None:
        """Open the sessions that are not open.

        Raises:
            CommandError: there is no ssh.
        """
        for session in self.all:
            session.open()

    def broadcast(self, **message: object) -> None:
        """Send a message to all hosts whose session is open."""
        for session in self.all:
            session.send(**message)

    def seat(self, node: int, link: ControlLink) -> None:
        """Use the connection of an agent that has come by itself as host number `node`.

        A second one with the same number is told to leave.
        """
        if node < len(self.all) and not self.all[node].is_open:
            self.all[node].take_link(link)
            return
        taken = f"node {node} is here already" if node < len(self.all) else f"want a node below {len(self.all)}"
        link.send(say=f"the launcher refuses this host: {taken}")
        link.send(bye=2)
        link.flush(time.monotonic() + _LAST_WORDS_S)
        link.close()

    def watch(self, poll: selectors.BaseSelector, *, reads: bool) -> None:
        """Register the descriptors with `poll`, each with a callable as its data."""
        for session in self.all:
            session.watch(poll, reads=reads)

    def close(self, code: int) -> None:
        """End all agents with exit code `code`."""
        for session in self.all:
            session.send(bye=code)
            if session.link is not None:
                session.link.write_some()
        until = time.monotonic() + _BYE_S
        for session in self.all:
            session.close(until)
