"""A process of a job: what to start, and what became of it."""

import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from multiring._launch.output import RankOutput, Tagger
from multiring.errors import PeerLostError, RendezvousError

# The last line of a traceback. torch's excepthook writes the rank before it.
_CONSEQUENCES = re.compile(
    rb"(?:\[rank\d+\]: )?"
    + f"{PeerLostError.__module__}.(?:{PeerLostError.__name__}|{RendezvousError.__name__})".encode()
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A process to start.

    - name: its name in messages, a kind and a number if there are several of the kind.
    - prepare: runs in the new process between fork and exec.
    - birthplace: makes a context that this process enters while it forks.
    - has_stdin: the new process reads this process's standard input. Its output is shown before a line ends, because
      the output may be a question to the user.
    - descriptors: open files that the new process inherits.
    - stdin_from: the descriptor that a process with `has_stdin` reads instead of this process's standard input.
    """

    name: str
    tag: str
    log_files: tuple[str, str]  # for stdout and stderr, in the job's log folder
    command: tuple[str, ...]
    environment: Mapping[str, str]
    prepare: Callable[[], None]
    birthplace: Callable[[], AbstractContextManager[object]] = nullcontext
    has_stdin: bool = False
    stdin_from: int | None = None
    descriptors: tuple[int, ...] = ()
    taggers: tuple[Tagger, Tagger] | None = None  # for stdout and stderr; default: put `tag` before each line


def spawn(start: Start) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own, with pipes for its output.

    Call it from a process with one thread.

    Raises:
        OSError: the system refuses.
    """
    with start.birthplace():
        return subprocess.Popen(  # noqa: S603 -- the user asked for this command
            start.command,
            bufsize=0,
            stdin=start.stdin_from if start.has_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=start.environment,
            start_new_session=True,  # its own process group, which its children inherit
            pass_fds=start.descriptors,
            preexec_fn=start.prepare,  # noqa: PLW1509 -- this process has one thread
        )


@dataclass(slots=True, eq=False)
class JobProcess:
    """A started process of the job.

    `code` is None while it runs, then its exit code, or -n for signal n.

    With `is_excused`, the launcher requested the end, which does not count as a failure. `process` is None for a
    process on another host.
    """

    name: str
    process: subprocess.Popen[bytes] | None
    out: RankOutput
    err: RankOutput
    code: int | None = None
    is_excused: bool = False
    known_as: int = 0  # the process ID that the user sees, if it differs from `pid`
    place: str = ""  # the host, in the form " on b", if the job has several hosts
    told_ending: str = ""  # how the process ended, if its exit code does not say so
    told_of_memory: str = ""  # the report of its host that the process was killed for lack of memory

    @property
    def pid(self) -> int:
        """The ID of the process and of the process group that it leads."""
        return self.known_as if self.process is None else self.process.pid

    def set_code(self, code: int) -> None:
        """Record the end of the process."""
        self.code = code
        if self.process is not None:
            self.process.returncode = code

    @property
    def has_failed(self) -> bool:
        """Whether the process ended with an error, and its end was not requested."""
        return self.code not in (None, 0) and not self.is_excused

    @property
    def was_killed_here(self) -> bool:
        """Whether the process ran on this host, and SIGKILL ended it."""
        return self.code == -signal.SIGKILL and self.process is not None

    @property
    def is_consequence(self) -> bool:
        """Whether the process's last lines on stderr report the loss of another rank."""
        return self.has_failed and any(map(_CONSEQUENCES.match, self.err.last_lines))

    @property
    def exit_code(self) -> int:
        """The exit code in a shell's form: 128 + n for signal n."""
        code = self.code or 0
        return code if code >= 0 else 128 - code

    @property
    def ending(self) -> str:
        """A text that says how the process ended."""
        if self.code is None:
            return "is running"
        if self.told_ending:
            return self.told_ending
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


def text_of(members: Sequence[JobProcess]) -> str:
    """Return the names of `members` as a short text.

    Examples are "rank 3", and "ranks 0, 1 and 20 more".
    """
    kind, _, _ = members[0].name.partition(" ")
    if len(members) == 1:
        return members[0].name
    numbers = ", ".join(member.name.partition(" ")[2] for member in members[:16])
    more = f" and {len(members) - 16} more" if len(members) > 16 else ""
    return f"{kind}s {numbers}{more}"
