"""The launcher of a job that outlives it: `multiring run --survive-launcher S`.

It starts a keeper, which runs the job, or adopts the job of a keeper whose launcher was lost. Then it passes on
signals, and ends with the job's exit code. The job's output is written by the keeper, to this process's standard
streams.

The keeper has the exit code until this process has ended: whoever started a launcher that was killed gets the code from
the next one. This process therefore tells the keeper that it ends in its last but one system call.
"""

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from multiring._launch.keeper_address import KeeperPlace, KeptJob, bound, command_told, meet, receive, send
from multiring._launch.own_modules import module_command
from multiring._launch.signals import StopSignals
from multiring._launch.standard_streams import open_closed_streams
from multiring._limits.processes import refused
from multiring.errors import LaunchError

_ATTEMPTS = 50
_AGAIN_S = 0.2
_END_S = 5.0  # how long a keeper that was killed may take to be gone


def run_kept(words: Sequence[str], survive_s: float, keeper: str) -> NoReturn:
    """Run a job that outlives this process by `survive_s` seconds, or adopt it, and end with its exit code.

    The process ends without the interpreter's exit functions.

    Args:
        words: the command, behind `multiring`. The same words in the same folder adopt the job.
        survive_s: how long the job goes on without a launcher.
        keeper: the module that runs a keeper; its arguments are those of `started_keeper`.

    Raises:
        LaunchError: the job runs and has a launcher, or it is ending; another job of this folder has lost its launcher;
            or the system refuses a process.
    """
    open_closed_streams()  # otherwise a socket of this function gets the number of a closed output
    place = KeeperPlace.of(words)
    with StopSignals() as signals:  # a signal that comes before the job has this launcher must not be lost
        for _ in range(_ATTEMPTS):
            listener = bound(place)
            if listener is not None:
                with listener:
                    _refuse_others(place, words)
                    link, process = _started(listener, words, survive_s, keeper)
                _serve(link, process, signals)
            met = meet(place.address)
            if met is not None:
                _serve(_adopted(*met), None, signals)
            time.sleep(_AGAIN_S)  # a keeper that ends
    raise LaunchError("the keeper of this command's job in this folder neither answers nor ends; try again")


def _refuse_others(place: KeeperPlace, words: Sequence[str]) -> None:
    """Refuse to start a job beside one of this folder that waits for its launcher: this may be a slip of the pen."""
    for address in place.others():
        met = meet(address)
        if met is None:
            continue
        link, job = met
        link.close()
        if job.launcher is None and not job.ends and not job.is_over:
            raise LaunchError(
                f"a job of this folder has lost its launcher and waits for `{job.command}`, which is not "
                f"`{command_told(words)}`: start that command to adopt it, end it by `kill {job.keeper}`, or use "
                "another folder"
            )


def _started(
    listener: socket.socket, words: Sequence[str], survive_s: float, keeper: str
) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        descriptors = (listener.fileno(), theirs.fileno())
        command = module_command(keeper, *map(str, descriptors), repr(survive_s), *words)
        try:
            process = subprocess.Popen(  # noqa: S603 -- multiring itself
                command, stdin=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True
            )
        except OSError as error:
            ours.close()
            raise refused("the job's keeper cannot be started", error) from None
    return ours, process


def _adopted(link: socket.socket, job: KeptJob) -> socket.socket:
    """Become the launcher of a job, and return the connection to its keeper."""
    with contextlib.ExitStack() as stack:
        stack.callback(link.close)
        if job.launcher is not None:
            raise LaunchError(
                f"this job runs in this folder already, and process {job.launcher} is its launcher. A new launcher "
                "adopts it once that one was lost; another job needs another folder"
            )
        if job.ends:
            raise LaunchError(f"this job ends ({job.ends}; keeper: process {job.keeper}): start it again afterwards")
        send(link, (1, 2), adopt=os.getpid())
        try:
            message, _ = receive(link)
        except TimeoutError:
            message = {}
        if message != {"adopted": True}:
            why = "it does not answer" if message == {} else "another launcher was faster, or it ends"
            raise LaunchError(f"the job of keeper {job.keeper} cannot be adopted: {why}")
        stack.pop_all()
    return link


def _serve(link: socket.socket, process: "subprocess.Popen[bytes] | None", signals: StopSignals) -> NoReturn:
    """Pass on signals until the keeper tells the exit code of the job, and end with the code."""
    with link:
        link.setblocking(False)
        while True:
            with selectors.PollSelector() as poll:
                poll.register(link, selectors.EVENT_READ)
                poll.register(signals.descriptor, selectors.EVENT_READ)
                poll.select()
            signals.clear()
            for number in signals.take():
                send(link, signal=number)
            try:
                message, _ = receive(link)
            except BlockingIOError:
                continue
            if message is None:
                break
            if isinstance(told := message.get("code"), int):
                _end(link, told)
    if process is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    raise LaunchError("the process that keeps the job was killed, and the job with it")


def _end(link: socket.socket, code: int) -> NoReturn:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # a stream that was closed is None, or refuses
        sys.stdout.flush()
        sys.stderr.flush()
    send(link, taken=True)
    os._exit(code)
