"""elastic.run: make a training function resume after a failure."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from multiring._frontend.elastic.state import run_fn
from multiring._frontend.errors import OperationError
from multiring._frontend.lifecycle import init, is_initialized, shutdown
from multiring._frontend.process_sets import (
    close_sets,
    keep_sets,
    keep_sets_of_processes,
    sets_to_keep,
    sets_to_keep_by_process,
    world_now,
)
from multiring._frontend.requests.failures import noted_error
from multiring._runtime.job.job import may_go_on, succeed
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

    Raises:
        CollectiveError: the returned function raises it after ten failures in a row without a commit.
        RendezvousError: the returned function raises it if a rank does not return within MULTIRING_INIT_TIMEOUT_S.
    """
    return run_fn(_in_our_words(func), Rejoining().join_again, (OperationError,))


def _in_our_words(func: Callable[..., Result]) -> Callable[..., Result]:
    """Return `func`, changed to raise multiring's error if that error caused a framework's error."""

    @functools.wraps(func)
    def wrapper(*arguments: Any, **keywords: Any) -> Result:
        try:
            return func(*arguments, **keywords)
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

    In a job that goes on without lost ranks, it goes on with those that are left instead.
    """

    def __init__(self) -> None:
        self._sets: tuple[Any, Any, bool] | None = None  # to make, if a rank was lost while they were made
        self._unfinished: tuple[Any, bool] | None = None  # the sets, if a rank was lost while the ranks joined
        self._world: World | None = None  # the job that was joined then, with none or a part of them

    def join_again(self) -> None:
        """Leave the job and join it again, or go on with the ranks that are left."""
        if may_go_on():
            self._go_on()
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

    def _go_on(self) -> None:
        if self._sets is None:
            self._sets = sets_to_keep_by_process()
        close_sets()
        succeed()
        kept, processes, is_dynamic = self._sets
        keep_sets_of_processes(kept, processes, is_dynamic=is_dynamic)
        self._sets = None
