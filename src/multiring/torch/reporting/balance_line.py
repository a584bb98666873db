"""The balance line: whether data, computation or the wire bounds a training run."""

from typing import Any

from multiring._frontend.lifecycle import local_size
from multiring._frontend.object_collectives import allgather_object
from multiring._runtime import is_initialized
from multiring.data.balance.decision import TrainingCounts
from multiring.data.balance.watching import BalanceWatch
from multiring.data.feeding.loader import Loader


def measure_bottleneck(loader: Loader) -> BalanceWatch:
    """Start to measure what bounds a training run that `loader` feeds.

        watch = mt.measure_bottleneck(loader)
        for batch in loader:
            ...
        with watch.paused():
            evaluate(model)
        mt.print_once(watch.finish())

    `finish` returns a `Balance`, whose text is the balance line; every rank calls it. Steps need no call: the loader
    counts the work of its workers, and the runtime counts the work of the wire. Every operation between
    `measure_bottleneck` and `finish` counts as training, unless it runs within `paused`.

    Args:
        loader: a `DataLoader`, or multiring.data's Loader.
    """
    if not is_initialized():
        return BalanceWatch(loader)
    return BalanceWatch(loader, local_size(), _every)


def _every(own: TrainingCounts) -> list[TrainingCounts]:
    found: list[Any] = allgather_object(own, name="balance")
    return found
