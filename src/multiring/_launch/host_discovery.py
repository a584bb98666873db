"""Asks a script of the user which hosts there are: `multiring run --host-discovery SCRIPT`.

The script prints a line `host:slots` for each host. It is asked again and again. If it fails, hangs or prints something
else, the last good answer is kept, and the reason is told once.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from multiring._launch.leftovers import signal_group
from multiring._launch.mpiexec import parse_hosts
from multiring.errors import ArgumentError, LaunchError

_PAUSE_S = 1.0  # between two questions
_MOST_S = 10.0  # how long an answer may take
_MOST_BYTES = 1 << 20
_LOOK_S = 0.1
_SHOWN = 80

Hosts = tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscoveryOptions:
    """How to find hosts.

    Args:
        script: a command for /bin/sh.
        slots: the number of places of a host that the script prints without one.
        timeout_s: how long the start waits for enough places.
        places: how many are enough; None: as many as ranks are started.

    Raises:
        ArgumentError: `slots` is less than 1, or `timeout_s` is negative.
    """

    script: str
    slots: int = 1
    timeout_s: float = 600.0
    places: int | None = None

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ArgumentError(f"--slots-per-host {self.slots}: want 1 or more")
        if self.timeout_s < 0:
            raise ArgumentError(f"--elastic-timeout {self.timeout_s:g}: want 0 or more seconds")


def hosts_in(text: str, slots: int) -> Hosts:
    """Return the hosts in a script's output, with their numbers of places.

    Args:
        text: the output.
        slots: the number of places of a host without one.

    Raises:
        ValueError: the output is no list of hosts; the text says why.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError("it printed no host")
    found: dict[str, int] = {}
    for line in lines:
        try:
            ((name, count),) = parse_hosts(line if ":" in line else f"{line}:{slots}")
        except ValueError:
            raise ValueError(f"it printed {line[:_SHOWN]!r}, want lines like host:4") from None
        if name in found:
            raise ValueError(f"it printed {name} twice")
        found[name] = count
    return tuple(found.items())


class HostDiscovery:
    """The script, and its last good answer.

    Args:
        options: how to find hosts.
        say: shows a message.
    """

    def __init__(self, options: DiscoveryOptions, say: Callable[[str], None]) -> None:
        self._options, self._say = options, say
        self.hosts: Hosts = ()  # the last good answer
        self.failure = ""  # why the last answer was not good; empty if it was
        self._told = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._output = b""
        self._act_at = 0.0  # when to ask again, or to give up waiting for the answer

    @property
    def acts_at(self) -> float:
        """The monotonic time at which `act` must be called."""
        return self._act_at

    def watch(self, poll: selectors.BaseSelector) -> None:
        """Register the pipe of the script with `poll`, with what to do as its data."""
        if self._process is not None and self._process.stdout is not None:
            poll.register(self._process.stdout, selectors.EVENT_READ, self._read)

    def act(self) -> bool:
        """Ask if it is time, and return whether an answer has come since the last call."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._act_at:
                self._ask(now)
            return False
        if now < self._act_at and not self._has_answered():
            return False
        self._finish(now)
        return True

    def first(self, places: int) -> Hosts:
        """Wait until the hosts have so many places, and return them.

        Raises:
            LaunchError: the first answer is not good, or there are too few places for too long.
        """
        until = time.monotonic() + self._options.timeout_s
        has_good = False
        while True:
            if self.act():
                if self.failure and not has_good:
                    raise LaunchError(f"--host-discovery {self._options.script}: {self.failure}")
                has_good = True
                if sum(count for _, count in self.hosts) >= places:
                    return self.hosts
            if time.monotonic() >= until:
                spelt = ",".join(f"{name}:{count}" for name, count in self.hosts)
                raise LaunchError(
                    f"--host-discovery {self._options.script}: {spelt or 'no hosts'} after "
                    f"{self._options.timeout_s:g} s; want at least {places} places"
                )
            with selectors.PollSelector() as poll:
                self.watch(poll)
                for key, _ in poll.select(_LOOK_S):
                    key.data()

    def close(self) -> None:
        """End the script if it runs."""
        if self._process is not None:
            self._end(self._process)
            self._process = None

    def _ask(self, now: float) -> None:
        self._output, self._act_at = b"", now + _MOST_S
        try:
            self._process = subprocess.Popen(  # noqa: S603 -- the user's script
                ["/bin/sh", "-c", self._options.script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._note(f"it cannot be started: {error.strerror}")
            self._act_at = now + _PAUSE_S
            return
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)

    def _read(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            self._output += data
            if not data or len(self._output) > _MOST_BYTES:
                self._process.stdout.close()
                self._process.stdout = None

    def _has_answered(self) -> bool:
        return self._process is not None and self._process.stdout is None and self._process.poll() is not None

    def _finish(self, now: float) -> None:
        process, self._process = self._process, None
        self._act_at = now + _PAUSE_S
        if process is None:
            return
        code, is_whole = process.poll(), process.stdout is None
        self._end(process)
        if code is None or not is_whole:
            self._note(f"it has not ended within {_MOST_S:g} s")
        elif len(self._output) > _MOST_BYTES:
            self._note(f"it printed more than {_MOST_BYTES} bytes")
        elif code != 0:
            how = f"exit code {code}" if code > 0 else f"it was killed by signal {-code}"
            self._note(how)
        else:
            try:
                self.hosts = hosts_in(self._output.decode("utf-8", "replace"), self._options.slots)
            except ValueError as error:
                self._note(str(error))
            else:
                self.failure = self._told = ""

    def _note(self, failure: str) -> None:
        self.failure = failure
        if self._told != failure and self.hosts:
            self._told = failure
            kept = ",".join(f"{name}:{count}" for name, count in self.hosts)
            self._say(f"--host-discovery {self._options.script}: {failure}; its last good answer is kept: {kept}")

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal_group(process.pid, signal.SIGKILL)
        if process.stdout is not None:
            process.stdout.close()
        process.wait()
