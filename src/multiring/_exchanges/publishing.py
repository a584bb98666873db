"""Rank 0 publishes one text by all ways that it needs; the other ranks try all ways until one has the text."""

import time
from collections.abc import Callable, Sequence

from multiring._exchanges.contract import ExchangeError, PlaceExchange
from multiring.errors import LaunchError

_TURN_S = 0.25  # how long to wait for one way before the next one gets its turn


class Publication:
    """What rank 0 has published. Close it once all ranks have met, or cannot meet any more."""

    def __init__(self, ways: Sequence[PlaceExchange]) -> None:
        self._ways = ways

    def close(self) -> None:
        """Stop telling, and remove what was made for it."""
        for way in self._ways:
            way.close()


def publish(ways: Sequence[PlaceExchange], text: str, advice: str) -> Publication:
    """Tell `text` to the other ranks by the first way that surely reaches all of them, and by those before it.

    A library or a program may be missing on some hosts only. So rank 0 goes on to the next way, unless it knows that
    all ranks have used one; the ways of last resort are left out if another works.

    Raises:
        LaunchError: no way works here. The text names each way, why it does not work, and `advice`.
    """
    failures, used = {}, list[PlaceExchange]()
    try:
        for way in ways:
            if used and way.is_last_resort:
                continue
            try:
                reached_all = way.publish(text)
            except ExchangeError as error:
                failures[way.name] = str(error)
                way.close()
                continue
            used.append(way)
            if reached_all:
                break
    except BaseException:
        Publication(ways).close()  # the way that was interrupted may have made something
        raise
    if not used:
        raise LaunchError(f"rank 0 found no way to tell the other ranks where to meet: {_listed(failures)}. {advice}")
    return Publication(used)


def fetch(
    ways: Sequence[PlaceExchange],
    limit_s: float,
    advice: str,
    say: Callable[[Callable[[], str]], None],
    fault_of: Callable[[str], str] = lambda _: "",
) -> str:
    """Return the text that rank 0 has published.

    Args:
        ways: the ways to try, in turn.
        limit_s: how long to wait for rank 0.
        advice: what the user can do if no way works, for the error.
        say: gets a function that tells what the call waits for, now and then.
        fault_of: returns why a text cannot be of the present program, or "". It is asked where a way may return what a
            former program of the same step has left. Such a text is passed over.

    Raises:
        LaunchError: rank 0 has published nothing in time, or no way works here. The text names each way, what has
            failed in it, and `advice`.
    """
    latest = time.monotonic() + limit_s
    failures: dict[str, str] = {}
    pending = list(ways)

    def found() -> str:
        return _listed({way.name: failures.get(way.name, way.waits_for) for way in ways})

    try:
        while pending and (left_s := latest - time.monotonic()) > 0:
            for way in list(pending):
                try:
                    text = way.fetch(min(_TURN_S, left_s))
                except ExchangeError as error:
                    failures[way.name] = str(error)
                    pending.remove(way)
                    continue
                if text is None:
                    continue
                fault = fault_of(text) if way.may_be_stale else ""
                if not fault:
                    return text
                way.waits_for = f"only what a former program of this step has left ({fault})"
                time.sleep(max(min(_TURN_S, latest - time.monotonic()), 0.0))
            say(lambda: f"rank 0 has not told where to meet: {found()}")
    finally:
        for way in ways:
            way.close()
    within = f" within {limit_s:g} s" if pending else ""
    raise LaunchError(f"this rank was not told where to meet{within}: {found()}. {advice}")


def _listed(failures: dict[str, str]) -> str:
    return "; ".join(f"{name}: {text}" for name, text in failures.items())
