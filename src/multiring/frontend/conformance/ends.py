"""What ends a job: a rank that dies, an exception on one rank, Ctrl-C. Each wants a job of its own."""

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np

from multiring.errors import PeerLostError
from multiring.frontend import lifecycle
from multiring.frontend.conformance.adapter import Adapter, NonconformanceError, kind_of, require
from multiring.frontend.conformance.rank import Rank


def lose_a_rank(adapter: Adapter, reach: Callable[[], object], *, fails: int | None = None) -> float:
    """Train until a rank is gone, and return after how many seconds this one was told: PeerLostError.

    All ranks of the job call it.

    Args:
        adapter: of the framework.
        reach: is called once the ranks are at work, where whoever kills one may wait for it.
        fails: the rank that raises an error of its own instead, which its caller gets.

    Raises:
        NonconformanceError: something else was raised, or the lost rank is not named.
        ArithmeticError: on the rank that fails.
    """
    adapter.init()
    here = Rank(adapter, lifecycle.rank(), lifecycle.size())
    trainer = here.trainer({"weight": np.zeros(1000, np.float32)}, 0.5)
    slopes = {"weight": np.ones(1000, np.float32)}
    trainer.step(slopes)
    reach()
    began = time.monotonic()
    try:
        for step in range(1 << 30):
            if here.rank == fails:
                _fail_at(3, step)
            began = time.monotonic()
            trainer.step(slopes)
            trainer.parameters()
            here.reduced(slopes["weight"])
    except Exception as error:
        if here.rank == fails:
            raise
        found = kind_of(error)
        if not isinstance(found, PeerLostError):
            raise NonconformanceError(f"{type(found).__name__}: {found}; want PeerLostError") from error
        require("rank" in str(found), f"no rank is named in: {found}")
    return time.monotonic() - began


def _fail_at(wanted: int, step: int) -> None:
    if step == wanted:
        raise ArithmeticError("an error of one rank's own")


def be_interrupted(adapter: Adapter, *, after_s: float = 0.5) -> float:
    """Wait for the other ranks in a sum, which rank 0 never gets: Ctrl-C comes; return how long that took, in seconds.

    The other ranks return 0 at once, and have to stay for longer than rank 0 takes. All ranks of the job call it.

    Args:
        adapter: of the framework.
        after_s: when the signal comes.

    Raises:
        NonconformanceError: the sum ended in another way.
    """
    adapter.init()
    here = Rank(adapter, lifecycle.rank(), lifecycle.size())
    here.goes_on()
    if here.rank:
        return 0.0
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(after_s, interrupt).start()
    try:
        here.reduced(np.ones(1000, np.float32))
    except KeyboardInterrupt:
        return time.monotonic() - sent[0]
    except Exception as error:
        raise NonconformanceError(f"{type(error).__name__}: {error}; want KeyboardInterrupt") from error
    raise NonconformanceError("the sum ended, though no other rank came")
