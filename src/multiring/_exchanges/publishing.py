"""Rank 0 publishes one text by all ways that it needs; the other ranks try all ways until one has the text."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from multiring._exchanges.background_call import BackgroundCall
from multiring._exchanges.contract import ExchangeError, PlaceExchange
from multiring.errors import LaunchError

_LAST_RESORT_S = 15.0  # how long the ranks may take to meet by the other ways
_END_S = 5.0
_TURN_S = 0.25  # how long to wait for one way before the next one gets its turn


class Publication:
    """What rank 0 has published. Close it once all ranks have met, or cannot meet any more.

    Args:
        ways: the ways by which it is published.
        later: ways by which it is published, too, if it is not closed soon: other hosts may lack the first ones.
        text: the text.
    """

    def __init__(self, ways: Sequence[PlaceExchange], later: Sequence[PlaceExchange] = (), text: str = "") -> None:
        self._ways, self._later = ways, later
        self._closed = threading.Event()
        self._adding = BackgroundCall(lambda: self._add(text)) if later else None

    def close(self) -> None:
        """Stop telling, and remove what was made for it."""
        self._closed.set()
        for way in self._ways:
            way.close()
        if self._adding is not None and self._adding.is_over(_END_S):  # otherwise its thread closes what it makes
            self._close_later()

    def _add(self, text: str) -> None:
        if self._closed.wait(_LAST_RESORT_S):
            return
        for way in self._later:
            with suppress(ExchangeError):  # the others name in their errors what they have looked for
                way.publish(text)
        if self._closed.is_set():
            self._close_later()

    def _close_later(self) -> None:
        for way in self._later:
            way.close()


def publish(ways: Sequence[PlaceExchange], text: str, advice: str) -> Publication:
    """Tell `text` to the other ranks by the first way that surely reaches all of them, and by those before it.

    A library or a program may be missing on some hosts only. So rank 0 goes on to the next way, unless it knows that
    all ranks have used one. If another way works, those of last resort are used only once the ranks have not met for a
    while.

    Raises:
        LaunchError: no way works here. The text names each way, why it does not work, and `advice`.
    """
    failures, used, later = {}, list[PlaceExchange](), list[PlaceExchange]()
    try:
        for way in ways:
            if used and way.is_last_resort:
                later.append(way)
                continue
            try:
                reached_all = way.publish(text)
            except ExchangeError as error:
                failures[way.name] = str(error)
                way.close()
                continue
            used.append(way)
            if reached_all:
                later.clear()
                break
    except BaseException:
        Publication(ways).close()  # the way that was interrupted may have made something
        raise
    if not used:
        raise LaunchError(f"rank 0 found no way to tell the other ranks where to meet: {_listed(failures)}. {advice}")
    return Publication(used, later, text)


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
