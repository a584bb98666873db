"""The launcher's sessions with the agents of its hosts: how they are opened, and why they failed."""

import contextlib
import os
import selectors
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, cast

from multiring._launch.agent_process import LAST_WORDS_S, AgentProcess, end_all
from multiring._launch.commands import CommandError
from multiring._launch.control_link import AGENT_BEGINS, ControlLink
from multiring._launch.own_modules import module_command
from multiring._launch.rank_starts import dying_with
from multiring._limits.processes import refused

AGENT = "multiring._launch.host_agent"
_HERE = ("localhost", "127.0.0.1", "::1")
_BYE_S = 5.0
_AWAY_S = 0.5  # how long the reason may take to leave that one agent is told
_REFUSED_CODE = 2
# Words of ssh's or the shell's errors -> what to do.
_REMEDIES = {
    "Host key verification failed": "its key is not known here, or has changed: connect once by hand with "
    "`ssh {host}`, compare the key and accept it, or add it to ~/.ssh/known_hosts",
    "Permission denied (": "ssh would have to ask for a password, and it cannot: set up a key, for example with "
    "`ssh-copy-id {host}`, or unlock it in ssh-agent",
    "Permission denied": "the user of this job must be able to execute this Python on every host: {python}",
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
        slots: the number of places for ranks, if it is more than `ranks`.
    """

    def __init__(
        self,
        name: str,
        index: int,
        ranks: int,
        opener: "Callable[[HostSession], None] | None" = None,
        *,
        shows_itself: bool = False,
        slots: int = 0,
    ) -> None:
        self.name, self.index, self.ranks = name, index, ranks
        self._slots = slots
        self.host = name.rpartition("@")[2]  # the name for programs that run there
        self.shows_itself = shows_itself
        self._opener = opener
        self.link: ControlLink | None = None
        self.hello: dict[str, Any] | None = None
        self.ready: dict[str, Any] | None = None
        self.is_over = True  # the agent runs no ranks
        self.process: AgentProcess | None = None  # what starts the agent, and perhaps other agents, too
        self._told_by: float | None = None  # when a lost agent's last words are no longer waited for
        self._lines_before = 0  # the lines that `process` had printed when the agent said hello

    @property
    def slots(self) -> int:
        """The number of places for ranks on the host."""
        return max(self._slots, self.ranks)

    @slots.setter
    def slots(self, count: int) -> None:
        self._slots = count

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
        """Whether the agent, or the program that starts it, has ended, and no agent has come."""
        if self.link is not None or self.process is None:
            return False
        if self.process.has_lost_task(self.index) and self._told_by is None:
            self._told_by = time.monotonic() + LAST_WORDS_S  # the reason may come after the end
        return self.process.has_ended or (self._told_by is not None and time.monotonic() >= self._told_by)

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended, and the last words of the agent or of ssh have had time to arrive."""
        if self.link is None or self.link.is_open:
            return False
        if self._told_by is None:
            self._told_by = time.monotonic() + LAST_WORDS_S
        return self.process is None or self.process.has_ended or time.monotonic() >= self._told_by

    @property
    def wake_at(self) -> float | None:
        """The monotonic time at which the connection needs attention, or None."""
        return self._told_by if self.link is None or not self.link.is_open else self.link.wake_at

    def send(self, **message: object) -> None:
        """Send a message if the connection is open."""
        if self.link is not None:
            self.link.send(**message)

    def take_link(self, link: ControlLink) -> None:
        """Use a new connection to the agent."""
        self.link, self.hello, self.ready, self._told_by, self._lines_before = link, None, None, None, 0

    def take_hello(self, hello: dict[str, Any]) -> None:
        """Record what the agent says of itself. What was printed before, such as a warning of srun, ends no session."""
        self.hello = hello
        self._lines_before = 0 if self.process is None else self.process.lines_told()

    def open(self) -> None:
        """Open the session if it is not open, and if the agent does not come by itself."""
        if not self.is_open and self._opener is not None:
            self._opener(self)

    def open_here(self) -> None:
        """Start an agent on this host."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = _spawned(
                module_command(AGENT, "socket"),
                "the agent of this host",
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            descriptor = ours.detach()
        self.process = AgentProcess(process, "the agent")
        self.take_link(ControlLink(descriptor, descriptor))

    def open_by(self, words: Sequence[str]) -> None:
        """Start a command that connects its standard streams to the agent, such as ssh."""
        process = _spawned(
            words,
            words[0],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C at the terminal must not end ssh, which still carries the ends of the ranks; and without a
            # terminal ssh cannot ask for anything: _spawned gives it a session of its own.
            preexec_fn=dying_with(os.getpid()),
        )
        pipes = cast("IO[bytes]", process.stdout), cast("IO[bytes]", process.stdin)
        reading, writing = (os.dup(pipe.fileno()) for pipe in pipes)
        for pipe in pipes:
            pipe.close()
        self.process = AgentProcess(process, words[0])
        self.take_link(ControlLink(reading, writing, begins_with=AGENT_BEGINS))

    def reason(self) -> str:
        """Return why the connection has ended, or why there is none."""
        process = self.process
        told, ending = ("", "") if process is None else (process.told(self._lines_before), process.ending)
        failure = "" if self.link is None else self.link.failure
        return with_remedy(told or ending or failure, self.name)

    def leave(self) -> AgentProcess | None:
        """Forget the connection, after closing it, and return the process that has connected to the agent."""
        if self.link is not None:
            self.link.close()
        process = self.process
        self.link = self.hello = self.process = self._told_by = None
        self.is_over = True
        return process


def with_remedy(told: str, host: str) -> str:
    """Return an error of ssh or of a remote shell, with what to do if that is known."""
    remedy = next((text for words, text in _REMEDIES.items() if words in told), "")
    fix = remedy.format(host=host, python=sys.executable)
    return f"{told}{'; ' if fix else ''}{fix}"


def _spawned(words: Sequence[str], program: str, **options: Any) -> "subprocess.Popen[bytes]":
    """Start a process that starts an agent; `options` are those of Popen. This process has one thread.

    Raises:
        LaunchError: the system refuses.
    """
    try:
        return subprocess.Popen(words, bufsize=0, start_new_session=True, **options)  # noqa: S603 -- multiring, ssh, srun
    except OSError as error:
        raise refused(f"{program} cannot be started", error) from None


def open_step(words: Sequence[str], environment: Mapping[str, str], text: bytes) -> AgentProcess:
    """Start a program that starts agents on all hosts, such as srun; they come by themselves.

    Args:
        words: the command. Its output is taken for errors.
        environment: the command's environment.
        text: the agents' standard input.
    """
    process = _spawned(
        words,
        words[0],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=dying_with(os.getpid()),
    )
    with contextlib.suppress(BrokenPipeError), cast("IO[bytes]", process.stdin) as pipe:
        pipe.write(text)  # it fits into the pipe
    return AgentProcess(process, words[0])


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
    return ssh_command(name, words, agent_command("stdio", environment))


def ssh_command(name: str, words: Sequence[str], command: str) -> list[str]:
    """Return the words that run a shell command on host `name` by ssh, without asking the user for anything.

    Args:
        name: the host, perhaps as user@host.
        words: more options for ssh.
        command: the command.
    """
    # BatchMode: ssh asks for nothing. An unknown host key is then an error, unless ~/.ssh/config accepts it.
    # ControlMaster: this ssh ends with the job, so it must not carry other sessions of the user. It may use an existing
    # master.
    # RemoteCommand and forwardings of ~/.ssh/config are for the user's own sessions: ssh would refuse the agent's
    # command, or find the forwarded port taken.
    options = ("-oBatchMode=yes", "-oLogLevel=ERROR", "-oControlMaster=no")
    not_ours = ("-oRemoteCommand=none", "-oClearAllForwardings=yes")
    return ["ssh", "-T", "-x", *options, *not_ours, *words, name, command]


def agent_command(kind: str, environment: Mapping[str, str]) -> str:
    """Return the shell command that starts an agent of `kind`, with this process's Python and PYTHONPATH."""
    path = environment.get("PYTHONPATH")
    variables = [f"PYTHONPATH={path}"] if path else []
    return "exec " + shlex.join(["env", *variables, *module_command(AGENT, kind)])


class HostSessions:
    """The sessions with all hosts of a job, in the order of the hosts. They outlive restarts of the ranks.

    Args:
        sessions: the sessions.
        step: starts one program that starts the agents of all hosts, if there is one.
    """

    def __init__(self, sessions: Sequence[HostSession], step: Callable[[], AgentProcess] | None = None) -> None:
        self.all = list(sessions)
        self._start_step = step
        self._step: AgentProcess | None = None
        self._ending: list[AgentProcess] = []  # processes that were asked to end

    def open(self) -> None:
        """Open the sessions that are not open. A step begins again if one is missing, as it starts all agents.

        Raises:
            CommandError: there is no ssh.
        """
        for session in self.all:
            session.open()
        if self._start_step is None or all(session.is_open for session in self.all):
            return
        self.broadcast(bye=0)
        for session in self.all:
            if session.link is not None:
                session.link.write_some()
            session.leave()
        if self._step is not None:
            self._end(self._step)
        self._step = self._start_step()
        for session in self.all:
            session.process = self._step

    def broadcast(self, **message: object) -> None:
        """Send a message to all hosts whose session is open."""
        for session in self.all:
            session.send(**message)

    def seat(self, node: int, link: ControlLink) -> None:
        """Use the connection of an agent that has come by itself as host number `node`.

        A second one with the same number is told to leave.
        """
        if node < len(self.all) and self.all[node].link is None:
            self.all[node].take_link(link)
            return
        taken = f"node {node} is here already" if node < len(self.all) else f"want a node below {len(self.all)}"
        link.send(say=f"the launcher refuses this host: {taken}")
        link.send(bye=_REFUSED_CODE)
        link.write_some()  # it fits into the empty buffer of a new connection
        link.close()

    def send_away(self, session: HostSession, why: str, code: int = _REFUSED_CODE) -> None:
        """End an agent that has come by itself, for the reason `why`, with exit code `code`; forget its connection."""
        if session.shows_itself and session.link is not None:
            session.send(say=why)
            session.send(bye=code)
            session.link.flush(time.monotonic() + _AWAY_S)
        self.lose(session)

    def watch(self, poll: selectors.BaseSelector, *, reads: bool) -> None:
        """Register the descriptors with `poll`, each with a callable as its data."""
        for session in self.all:
            if session.link is not None:
                session.link.watch(poll, reads=reads)
        for process in {session.process for session in self.all if session.process is not None}:
            process.watch(poll)

    @property
    def wake_at(self) -> float | None:
        """The monotonic time at which a session or an ending process needs attention, or None."""
        times = [each.wake_at for each in self.all] + [each.wake_at for each in self._ending]
        return min((at for at in times if at is not None), default=None)

    def lose(self, session: HostSession) -> None:
        """Close a session whose agent was lost, and let its process end, unless it serves other agents, too."""
        process = session.leave()
        if process is None:
            return
        if process is self._step:
            session.process = process
        else:
            self._end(process)

    def end_processes(self) -> None:
        """Do what is due for the processes of lost sessions."""
        self._ending = [process for process in self._ending if not process.end_if_due()]

    def _end(self, process: AgentProcess) -> None:
        process.ask_to_end()
        self._ending.append(process)

    def close(self, code: int) -> None:
        """End all agents with exit code `code`. This takes no longer than 7 s."""
        self.broadcast(bye=code)
        until = time.monotonic() + _BYE_S
        self._flush(until)
        processes = {process: None for session in self.all if (process := session.leave()) is not None}
        end_all([*processes, *self._ending], until)
        self._step, self._ending = None, []

    def _flush(self, until: float) -> None:
        while (left_s := until - time.monotonic()) > 0:
            with selectors.PollSelector() as poll:
                for session in self.all:
                    if session.link is not None:
                        session.link.watch(poll, reads=False)
                if not poll.get_map():
                    return
                for key, _ in poll.select(left_s):
                    key.data()
