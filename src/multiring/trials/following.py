"""Follows the votes of the ranks while a study runs: which ranks are lost, and who holds the study then.

The ranks vote in the background (docs/decisions/0142). Trials on other ranks go on meanwhile. The job itself goes on
as its later generation once the study is over.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from multiring._limits.processes import start_thread
from multiring._runtime.group.generation_end import GenerationEnd
from multiring._runtime.job.world import World
from multiring.errors import StateError

_NEWS_S = 2.0  # how long a lost rank's last messages may take after the vote


class VoteFollower:
    """Tells of each decision which ranks it leaves out. Nothing happens in a job without votes.

    Args:
        world: the job at the start of the study.
        tell: is called with why each rank is lost, by its number at the start, once the processes of this host that are
            out have ended.
        fail: is called with the reason if the ranks cannot go on.
    """

    def __init__(self, world: World, tell: Callable[[Mapping[int, str]], None], fail: Callable[[str], None]) -> None:
        self._world, self._tell, self._fail = world, tell, fail
        self._number, self._ids = world.membership.number, world.membership.ids
        self._first_ids = world.membership.ids
        self._why: dict[int, str] = {}  # of ranks that this one has lost
        self._changed = threading.Condition()
        self._is_over = False
        self._end = world.services.generation  # of the generation `_number`
        self._thread = threading.Thread(target=self._run, name="multiring study votes", daemon=True)

    def start(self) -> None:
        """Follow the votes from now on."""
        self._end.when_over(self._decided)
        start_thread(self._thread, "this rank cannot start the thread that follows the votes of a study")

    def lose(self, rank: int, why: str) -> None:
        """Note that this rank has lost another one."""
        with self._changed:
            self._why.setdefault(rank, why)
            self._changed.notify_all()

    def wait_until_settled(self, seconds: float, lost: Collection[int] = ()) -> None:
        """Wait until the ranks have gone on without those that are lost, but at most `seconds`.

        Args:
            seconds: the time limit.
            lost: ranks that others have lost.
        """

        def is_settled() -> bool:
            return not self._has_news() and all(self._first_ids[rank] not in self._ids for rank in lost)

        with self._changed:
            self._changed.wait_for(lambda: self._is_over or is_settled(), seconds)

    def stop(self) -> None:
        """Follow the votes no more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    @property
    def has_moved(self) -> bool:
        """Whether the ranks have gone on without some."""
        return self._ids != self._first_ids

    def _decided(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _has_news(self) -> bool:
        # A vote without need would have every rank vote again.
        return self._end.is_over or any(self._first_ids[rank] in self._ids for rank in self._why)

    def _run(self) -> None:
        vote = self._world.vote
        while vote is not None:
            with self._changed:
                while not self._is_over and not self._has_news():
                    self._changed.wait(1.0)
                if self._is_over:
                    return
            try:
                number, ids = vote.succeed(self._number, self._ids)
            except StateError as error:
                self._fail(str(error))
                self.stop()
                return
            out = [rank for rank, each in enumerate(self._first_ids) if each in self._ids and each not in ids]
            why = self._reasons(out)
            end = GenerationEnd(self._world.services.world_rank, may_end=True)
            end.when_over(self._decided)
            vote.watch(end, number)
            self._tell(why)
            with self._changed:
                self._number, self._ids, self._end = number, ids, end
                self._changed.notify_all()

    def _reasons(self, out: Sequence[int]) -> dict[int, str]:
        """Return why each of the ranks is lost. A rank's last messages come before this rank knows it by itself."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or set(out) <= set(self._why), _NEWS_S)
            return {rank: self._why.get(rank, "the other ranks have gone on without it") for rank in out}
