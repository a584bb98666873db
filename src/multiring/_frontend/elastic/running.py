"""elastic.run: make a training function resume after a failure."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from multiring._frontend.elastic.state import run_fn
from multiring._frontend.errors import OperationError
from multiring._frontend.lifecycle import init, is_initialized, shutdown
from multiring._frontend.process_sets import keep_sets, sets_to_keep
from multiring._frontend.requests.failures import noted_error
from multiring.errors import MultiringError

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
    return run_fn(_in_our_words(func), _meet_anew, (OperationError,))


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


def _meet_anew() -> None:
    """Leave the job and join it again, with the same process sets."""
    kept, are_dynamic = sets_to_keep() if is_initialized() else ({}, False)
    shutdown()
    init(process_sets="dynamic" if are_dynamic else None)
    keep_sets(kept)
