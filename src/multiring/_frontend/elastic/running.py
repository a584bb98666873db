"""elastic.run: make a training function resume after a failure."""

import functools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from multiring._frontend.elastic.state import LEAVES, HostsUpdatedInterrupt, HostUpdateResult, State, run_fn
from multiring._frontend.errors import OperationError
from multiring._frontend.lifecycle import init, is_initialized, shutdown
from multiring._frontend.process_sets import (
    adopt_sets,
    close_sets,
    keep_sets,
    keep_sets_of_processes,
    moved,
    promised_sets,
    sets_to_keep,
    sets_to_keep_by_process,
    world_now,
)
from multiring._frontend.requests.failures import noted_error
from multiring._runtime.job.job import come_in, let_in, lets_in, may_go_on, newcomers, succeed, waits_outside
from multiring._runtime.job.leaving import EXIT_CODE as LEFT_CODE
from multiring._runtime.job.leaving import LeaveRequest, leave_at_commit
from multiring.errors import MultiringError

if TYPE_CHECKING:
    from multiring._runtime.job.world import World

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Make `func` resume after a failure (a decorator).

    The first argument of `func` is a State. The state is synchronised before each call of `func`, so all collectives of
    the ranks must be inside `func`. If a collective fails (CollectiveError), the ranks shut down and join the job
    again, each rank restores its last commit, and `func` is called again. If the hosts changed (HostsUpdatedInterrupt),
    the same happens, but nothing is rolled back.

    A newcomer (`multiring run --max-ranks`) is alone in its job until it calls the returned function, which waits until
    the ranks let it in.

    If SIGTERM comes in a job that goes on without this rank, the rank leaves at its next commit, unless the program
    handles the signal. The returned function then raises SystemExit(143).

    Raises:
        CollectiveError: the returned function raises it after ten failures in a row without a commit.
        RendezvousError: the returned function raises it if a rank does not return within MULTIRING_INIT_TIMEOUT_S.
    """
    rejoining = Rejoining()
    resuming = run_fn(_in_our_words(func, rejoining), rejoining.join_again, (OperationError,))

    @functools.wraps(func)
    def wrapper(state: Any, *arguments: Any, **keywords: Any) -> Result:
        if waits_outside():
            rejoining.come_in()
            state.on_reset()
        with rejoining.leave_request.heard():
            return resuming(state, *arguments, **keywords)

    return wrapper


def _in_our_words(func: Callable[..., Result], rejoining: "Rejoining") -> Callable[..., Result]:
    """Return `func`, changed to raise multiring's error if that error caused a framework's error."""

    @functools.wraps(func)
    def wrapper(state: Any, *arguments: Any, **keywords: Any) -> Result:
        if isinstance(state, State):
            state.watch_hosts(rejoining.host_changes)
        try:
            return func(state, *arguments, **keywords)
        except HostsUpdatedInterrupt as interrupt:
            rejoining.stand_at_commit(interrupt.leaving)
            raise
        except MultiringError:
            raise
        except Exception as error:
            found = noted_error(error)
            if found is None:
                raise
            raise found from error

    return wrapper


class Rejoining:
    """Has this rank leave the job and join it again, with the same process sets.

    In a job that goes on without lost ranks, it goes on with those that are left instead, or lets newcomers in.
    """

    def __init__(self) -> None:
        self.leave_request = LeaveRequest()
        self._is_at_commit = False  # whether all ranks are, and none has failed as far as this one knows
        self._leaves = False  # whether the others have been told at this commit that this rank leaves
        self._leaving: set[int] = set()  # the numbers of the processes that leave at this commit
        self._sets: tuple[Any, Any, bool] | None = None  # to make, if a rank was lost while they were made
        self._unfinished: tuple[Any, bool] | None = None  # the sets, if a rank was lost while the ranks joined
        self._world: World | None = None  # the job that was joined then, with none or a part of them

    def stand_at_commit(self, leaving: Sequence[int]) -> None:
        """Note that all ranks are at a commit, of which these leave."""
        self._is_at_commit = True
        self._leaving = {world_now().membership.ids[rank] for rank in leaving}

    def host_changes(self) -> int:
        """Return whether newcomers wait, and whether this rank leaves: a HostUpdateResult, perhaps with LEAVES."""
        added = HostUpdateResult.added if newcomers() else HostUpdateResult.no_update
        self.leave_request.follow_up()
        self._leaves = self.leave_request.has_come
        return added | (HostUpdateResult.removed | LEAVES if self._leaves else HostUpdateResult.no_update)

    def join_again(self) -> None:
        """Leave the job and join it again, or go on with the ranks that are left."""
        is_at_commit, self._is_at_commit = self._is_at_commit, False
        leaving, self._leaving = self._leaving, set()
        # A request that has come since is for the next commit: the others would begin without knowing of it.
        if is_at_commit and self._leaves:
            close_sets()
            leave_at_commit()
            raise SystemExit(LEFT_CODE)
        if is_at_commit and lets_in():
            self._let_in(leaving)
            return
        if may_go_on():
            self._go_on(leaving)
            return
        world = world_now() if is_initialized() else None
        if self._unfinished is None or (world is not None and world is not self._world):
            self._unfinished = sets_to_keep() if world is not None else ({}, False)
        kept, are_dynamic = self._unfinished
        shutdown()
        init(process_sets="dynamic" if are_dynamic else None)
        self._world = world_now()
        keep_sets(kept)
        self._unfinished = self._world = None

    def come_in(self) -> None:
        """Wait until the ranks let this newcomer in."""
        promised, is_dynamic = promised_sets()
        close_sets()
        place = come_in()
        adopt_sets(promised, place.told, place.former, is_dynamic=is_dynamic)

    def _let_in(self, leaving: set[int]) -> None:
        """Let newcomers in. They get the numbers and ranks of the process sets, in which they are not."""
        kept, processes, is_dynamic = self._sets = self._sets or sets_to_keep_by_process()
        close_sets()
        former = let_in(json.dumps(processes))
        while leaving & set(former):
            former = succeed().membership.ids
        ids = world_now().membership.ids
        processes = {number: moved(ones, former, ids) for number, ones in processes.items()}
        self._sets = kept, processes, is_dynamic
        self._keep_sets()

    def _go_on(self, leaving: set[int]) -> None:
        self._sets = self._sets or sets_to_keep_by_process()
        close_sets()
        # Two may leave at one commit, and be left out by two votes.
        while leaving & set(succeed().membership.ids):
            pass
        self._keep_sets()

    def _keep_sets(self) -> None:
        if self._sets is None:
            return
        kept, processes, is_dynamic = self._sets
        keep_sets_of_processes(kept, processes, is_dynamic=is_dynamic)
        self._sets = None
