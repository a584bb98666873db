"""A job whose hosts come and go as a script says: `multiring run --host-discovery SCRIPT`.

New hosts get newcomers. The ranks of hosts that the script does not name any more leave after their next commit, and so
do ranks for which a host has no place any more; but not so many that fewer than --min-ranks were left.
"""

import contextlib
import selectors
import signal

from multiring._launch.elastic_hosts import END_S, GrowingHostsJob
from multiring._launch.host_sessions import HostSession
from multiring._launch.job_process import text_of


class DiscoveringHostsJob(GrowingHostsJob):
    """A job on hosts that a script names. The arguments are those of GrowingHostsJob."""

    def _open(self, stack: contextlib.ExitStack) -> None:
        super()._open(stack)
        self._asked: set[int] = set()  # processes that were asked to leave
        self._dismissed: set[HostSession] = set()  # whose agents were told to end
        if self._discovery is not None:
            stack.callback(self._discovery.close)

    def _slots_of(self, session: HostSession) -> int:
        if self._discovery is None or session in self._dismissed:
            return 0
        return dict(self._discovery.hosts).get(session.name, 0)

    def _watch_more(self, poll: selectors.BaseSelector) -> None:
        super()._watch_more(poll)
        if self._discovery is not None and not self._is_waiting:
            self._discovery.watch(poll)

    def _wake_at(self) -> float | None:
        own = super()._wake_at()
        if self._discovery is None or self._is_waiting:
            return own
        return self._discovery.acts_at if own is None else min(own, self._discovery.acts_at)

    def _do_more(self) -> None:
        super()._do_more()
        if self._discovery is None or self._is_waiting or self._is_ending or self._code is not None:
            return
        if self._discovery.act():
            known = {session.name for session in self._sessions.all}
            self._spares = [place for place in self._discovery.hosts if place[0] not in known]
            self._free_places()
            self._dismiss_hosts()

    def _free_places(self) -> None:
        """Ask ranks to leave that have no place any more."""
        if not self._votes.is_complete or not self._intake.was_committed or not self._intake.is_open:
            return
        left = len(self._survivors()) - len([each for each in self._asked if self._members[each].code is None])
        for session in self._sessions.all:
            running = self._running_on(session)
            over = [each for each in running[self._slots_of(session) :] if each not in self._asked]
            inside = [each for each in over if each in self._intake.members]
            leaving = inside[: max(0, left - self._least)]
            left -= len(leaving)
            leaving += [each for each in over if each not in inside]  # newcomers that are not in yet
            if not leaving:
                continue
            self._asked.update(leaving)
            members = [self._members[each] for each in leaving]
            verb = "is" if len(members) == 1 else "are"
            self._say(f"{session.name} has {self._slots_of(session)} places now: {text_of(members)} {verb} to leave")
            for member in members:
                self._signal(member, signal.SIGTERM)

    def _dismiss_hosts(self) -> None:
        """End the agents of hosts that are named no more, once they run nothing."""
        for session in self._sessions.all:
            is_idle = session.is_open and not session.is_over and not self._running_on(session)
            if is_idle and not self._slots_of(session) and session not in self._dismissed:
                self._dismissed.add(session)
                session.send(end=END_S, start=self._number)
                session.send(bye=0)

    def _on_lost_host(self, session: HostSession) -> None:
        if session in self._dismissed:
            self._dismissed.discard(session)
            self._sessions.lose(session)
            self._forget_processes(session)
        else:
            super()._on_lost_host(session)
