"""A job on several hosts: the launcher decides, and the agents of the hosts act."""

import contextlib
import secrets
import signal
import time

from multiring._launch.host_sessions import HostSession
from multiring._launch.hosts_loop import HostsLoop, ToldLines
from multiring._launch.job_process import JobProcess, Start
from multiring._launch.live_record import JobRecorder
from multiring._launch.local_job import LONG_S
from multiring._launch.logs import open_log
from multiring._launch.rank_reports import ANY, name_of
from multiring._runtime.bootstrap.addresses import TcpAddress
from multiring._runtime.bootstrap.handshake import Message
from multiring._settings import JobNews
from multiring.errors import LaunchError

_LINE_S = 10.0
_LOOK_S = 0.1
_END_S = 15.0  # how long agents may take to end their ranks' leftover processes


class HostsJob(HostsLoop):
    """One start of the ranks on all hosts.

    Args:
        sessions: the sessions with the hosts' agents; those that are not open are opened.
        task: what the ranks run.
        options: the job's options.
        number: the number of this start, from 0.
        listener: where agents come by themselves, if they do.
    """

    @property
    def made_progress(self) -> bool:
        """Whether the ranks reported progress (a step, a save), or ran for a minute; valid after the job's end."""
        return JobNews.PROGRESS.value.decode() in self._news or time.monotonic() - self._began_s >= LONG_S

    # -- the beginning

    def _open(self, stack: contextlib.ExitStack) -> None:
        # A stopped launcher would look dead to the agents, which then end the ranks.
        former = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        stack.callback(signal.signal, signal.SIGTSTP, former)

    def _start_all(self) -> None:
        self._sessions.open()
        if not self._wait_until_ready():
            return
        told = self._start_message()
        # A log that cannot be opened ends the job here, before an agent starts the user's program.
        hosts = [session for session in self._sessions.all for _ in range(session.ranks)]
        members: list[JobProcess] = []
        try:
            for rank, session in enumerate(hosts):
                members.append(self._member(session, rank, len(hosts)))
        except BaseException:
            for member in members:
                member.out.close()
                member.err.close()
            raise
        self._members, self._host_of = members, hosts
        places = [(session.host, session.ranks) for session in self._sessions.all]
        self._recorder = JobRecorder(self._options.record, len(hosts), places)
        self._prepare_start(told)
        for session in self._sessions.all:
            session.is_over = False
            session.send(begin={**told, "index": session.index}, start=self._number)
        self._began_s = time.monotonic()

    def _prepare_start(self, told: Message) -> None:
        """Complete the message with which agents start their ranks, which are known."""

    def _start_message(self) -> Message:
        """Return what agents need to start their ranks."""
        ready = [each.ready or {} for each in self._sessions.all]
        is_alone = len(ready) == 1
        address, port = ready[0]["address"], ready[0]["port"]
        met_at = f"@multiring-{secrets.token_hex(8)}" if is_alone else str(TcpAddress(address, port))
        return {
            "hosts": [(each.host, each.ranks) for each in self._sessions.all],
            # Leftovers are found by this name: an agent that notices late that it was lost must not end a later start.
            "job": f"{self._task.job}-{self._number}",
            "rendezvous": self._task.rendezvous or met_at,
            # All ranks get the same number, because the number of threads can change floating-point results.
            "threads": min(each["threads"] for each in ready),
            "torch_address": address,
            "torch_port": ready[0]["torch_port"],
            "stdin_rank": self._options.stdin_rank,
            "reports_steps": self._options.reports_steps,
        }

    def _member(self, session: HostSession, rank: int, ranks: int) -> JobProcess:
        name, place = f"rank {rank}", f" on {session.name}"
        if session.shows_itself:
            return JobProcess(name, None, ToldLines(), ToldLines(), place=place)
        names = self._options.logs(rank, ranks)
        start = Start(
            name=name,
            tag=f"[{rank}] ",
            log_files=names,
            command=(),
            environment={},
            prepare=lambda: None,
            has_stdin=rank == self._options.stdin_rank,
        )
        out, err = self._outputs(start, [open_log(self._log_dir, each) for each in names])
        return JobProcess(name, None, out, err, place=place)

    def _wait_until_ready(self) -> bool:
        """Wait until all agents are ready, and return whether they are; a signal of the user ends the waiting."""
        self._is_waiting = True
        until = time.monotonic() + self._task.patience_s
        line_at = time.monotonic() + _LINE_S
        for session in self._sessions.all:
            session.ready = None
            if session.hello is not None:
                self._send_plan(session)
        while missing := [each for each in self._sessions.all if each.ready is None]:
            names = ", ".join(each.name for each in missing)
            now = time.monotonic()
            if now >= until:
                raise LaunchError(
                    f"{names}: no answer within {self._task.patience_s:g} s; {self._task.absent}{self._refused()}"
                )
            for session in missing:
                if session.has_ended_early:
                    raise LaunchError(f"{session.name}: no agent runs there: {session.reason()}")
            if now >= line_at:
                line_at = now + _LINE_S
                self._say(f"waiting for {names}{self._refused()}")
            wakes = [until, line_at, *(at for at in (self._wake_at(),) if at is not None)]
            self._poll(min(wakes))
            self._do_more()
            for number in self._signals.take():
                if number not in (signal.SIGUSR1, signal.SIGUSR2):
                    self._say(f"{name_of(number)} received; no rank was started")
                    self.was_stopped, self._code = True, 128 + number
                    return False
        self._is_waiting = False
        return True

    def _refused(self) -> str:
        refusals = () if self._listener is None else self._listener.refusals
        return f"; refused meanwhile: {'; '.join(refusals)}" if refusals else ""

    # -- ends and signals of ranks

    def _reap_ended(self) -> list[JobProcess]:
        ended, self._ended = self._ended, []
        return ended

    def _goes_on(self) -> bool:
        return super()._goes_on() or bool(self._ended)

    def _wait_for_ends(self, pause_s: float) -> None:
        self._poll(time.monotonic() + pause_s)
        self._do_more()

    def _lost_by(self, member: JobProcess) -> set[JobProcess] | None:
        rank = self._members.index(member)
        lost = self._lost.get(rank, set()) - {rank}
        if ANY in lost or (not lost and member.is_consequence):
            return None
        return {self._members[each] for each in lost if each < len(self._members)}

    def _signal(self, member: JobProcess, number: int) -> None:
        rank = self._members.index(member)
        self._host_of[rank].send(signal=number, ranks=[rank])

    def _pass_on(self, number: int) -> None:
        self._said.clear()  # the agents' answers are news, though they may be the same as the last time
        self._sessions.broadcast(pass_on=number)

    def _stop_leftovers(self, known: set[int]) -> None:
        del known
        self._sessions.broadcast(stop_leftovers=True)

    def _end_everyone(self) -> None:
        self._is_ending = True
        super()._end_everyone()

    def _end_leftovers(self, grace_s: float) -> None:
        self._sessions.broadcast(end=grace_s, start=self._number)
        until = time.monotonic() + grace_s + _END_S
        while left := [each for each in self._sessions.all if not each.is_over and each.is_open]:
            if time.monotonic() >= until:
                self._say(f"{', '.join(each.name for each in left)}: the agent did not end its ranks in time")
                return
            self._wait_for_ends(_LOOK_S)

    def _say(self, text: str) -> None:
        super()._say(text)
        self._recorder.say(text)
        for session in self._sessions.all:
            if session.shows_itself:
                session.send(say=text)

    def _conclude(self) -> None:
        self._recorder.look(self._members)
        if not self._code and len(self._members) > 1 and not self._news:
            self._say(
                f"none of the {len(self._members)} ranks joined the job: each of them seems to have run the whole "
                "program on its own. Call multiring.init() in the program, directly or through a library; or use -n 1"
            )
