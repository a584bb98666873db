"""Checks that end a job: a rank that dies, an exception on one rank, and Ctrl-C. Each check needs its own job."""

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np

from multiring._frontend import lifecycle
from multiring.adapters.conformance.adapter import Adapter, NonconformanceError, kind_of, require
from multiring.adapters.conformance.rank import Rank
from multiring.errors import PeerLostError


def lose_a_rank(adapter: Adapter, reach: Callable[[], object], *, fails: int | None = None) -> float:
    """Train until a rank is lost, and return the time until PeerLostError, in seconds.

    All ranks of the job call it.

    Args:
        adapter: the framework's adapter.
        reach: called once the ranks are training. A test can wait here before it kills a rank.
        fails: a rank that raises an ArithmeticError after a few steps; None if another process kills a rank.

    Raises:
        NonconformanceError: another error was raised, or it does not name a rank.
        ArithmeticError: on the rank `fails`.
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
        require("rank" in str(found), f"the error does not name a rank: {found}")
    return time.monotonic() - began


def _fail_at(wanted: int, step: int) -> None:
    if step == wanted:
        raise ArithmeticError("an error of one rank's own")


def be_interrupted(adapter: Adapter, *, after_s: float = 0.5) -> float:
    """Interrupt a sum by Ctrl-C on rank 0, and return the time to KeyboardInterrupt.

    The result is in seconds. Only rank 0 calls the sum, so this call waits until the signal comes. The other ranks
    return 0 at once. They must stay in the job until rank 0 has returned. All ranks of the job call it.

    Args:
        adapter: the framework's adapter.
        after_s: the delay of the signal, in seconds.

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
    raise NonconformanceError("the sum ended, although no other rank took part")
