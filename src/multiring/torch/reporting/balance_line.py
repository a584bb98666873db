"""The balance line of a training with torch: which of its data, its computation or its wire bounded it."""

from typing import Any

from multiring.data.balance.decision import Counted
from multiring.data.balance.watching import BalanceWatch
from multiring.data.feeding.loader import Loader
from multiring.frontend.lifecycle import local_size
from multiring.frontend.object_collectives import allgather_object
from multiring.runtime import is_initialized


def balance(loader: Loader) -> BalanceWatch:
    """Begin to count what bounds a training that `loader` feeds.

        watch = mt.balance(loader)
        for batch in loader:
            ...
        with watch.paused():
            evaluate(model)
        mt.print_once(watch.finish())

    `finish` returns a `Balance`, whose text is the line; every rank calls it. Nothing is called at each step: what
    workers did the loader counts, what the wire did the runtime. Operations that are no training's, between `balance`
    and `finish` and outside of `paused`, count as its own.

    Args:
        loader: a `DataLoader`, or multiring.data's Loader.
    """
    if not is_initialized():
        return BalanceWatch(loader)
    return BalanceWatch(loader, local_size(), _every)


def _every(own: Counted) -> list[Counted]:
    found: list[Any] = allgather_object(own, name="balance")
    return found
