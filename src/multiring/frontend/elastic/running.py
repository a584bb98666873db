"""elastic.run: a training function that goes on after a failure."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from multiring.errors import MultiringError
from multiring.frontend.elastic.state import run_fn
from multiring.frontend.errors import HorovodInternalError
from multiring.frontend.lifecycle import init, is_initialized, shutdown
from multiring.frontend.process_sets import keep_sets, sets_to_keep
from multiring.frontend.requests.failures import error_of

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Return `func`, which takes a State and whatever else, made to go on after a failure (a decorator).

    The state is synchronised before `func` is called; so all collectives of the ranks are to be within it. Where one of
    them fails (HorovodInternalError), every rank takes back what it did since the last commit, the ranks meet anew, and
    `func` is called again; where the hosts changed (HostsUpdatedInterrupt), the same, but nothing is taken back.

    Raises:
        HorovodInternalError: from the function made: ten failures in a row without a commit.
        RendezvousError: from the function made: a rank did not come back, within MULTIRING_INIT_TIMEOUT_S.
    """
    return run_fn(_in_our_words(func), _meet_anew, (HorovodInternalError,))


def _in_our_words(func: Callable[..., Result]) -> Callable[..., Result]:
    """Return `func`, raising multiring's error where a framework raised its own because of that."""

    @functools.wraps(func)
    def wrapper(*arguments: Any, **keywords: Any) -> Result:
        try:
            return func(*arguments, **keywords)
        except MultiringError:
            raise
        except Exception as error:
            found = error_of(error)
            if found is None:
                raise
            raise found from error

    return wrapper


def _meet_anew() -> None:
    """Leave the job and join it again, with the process sets that there are."""
    kept, are_dynamic = sets_to_keep() if is_initialized() else ({}, False)
    shutdown()
    init(process_sets="dynamic" if are_dynamic else None)
    keep_sets(kept)
