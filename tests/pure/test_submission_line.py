"""The line of submissions keeps the program's order, and a waiting thread submits its own operation."""

import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from tests.support.held_locks import outcomes_in_a_fork

from multiring._frontend import submission_line
from multiring._frontend.submission_line import OwnSubmission, Submission, SubmissionLine
from multiring.errors import StateError

LIMIT_S = 100.0
SOON_S = 0.05


class Copy:
    """Ends when the test says so."""

    def __init__(self, *, has_ended: bool = False, fails: bool = False) -> None:
        self.over = threading.Event()
        self._fails = fails
        if has_ended:
            self.over.set()

    def query(self) -> bool:
        self._raise()
        return self.over.is_set()

    def synchronize(self) -> None:
        self._raise()
        assert self.over.wait(LIMIT_S)

    def _raise(self) -> None:
        if self._fails:
            raise RuntimeError("an illegal address")


class Posted:
    """A submitted operation that has ended."""

    def __init__(self, result: object) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self) -> object:
        return self._result


@pytest.fixture
def line() -> SubmissionLine:
    return SubmissionLine()


def posting(order: list[Any], what: object) -> Callable[[], Posted]:
    def steps() -> Posted:
        order.append(what)
        return Posted(what)

    return steps


def overtaking(line: SubmissionLine, late_s: float) -> list[object]:
    """Return the order in which two operations are posted, of which the second could be posted first.

    The copy of the first one ends after `late_s` seconds, or once the second one has ended.
    """
    order: list[object] = []
    late = Copy()
    first = line.put(posting(order, "first"), [late])
    second = line.put(posting(order, "second"), [Copy(has_ended=True)])
    timer = threading.Timer(late_s, late.over.set)
    timer.start()
    found = second.wait()
    late.over.set()
    timer.cancel()
    assert (found, first.wait()) == ("second", "first")
    return order


def test_a_waiting_thread_does_not_overtake(line: SubmissionLine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert overtaking(line, SOON_S) == ["first", "second"]
    monkeypatch.setattr(SubmissionLine, "is_next", lambda *_: True)
    assert overtaking(SubmissionLine(), LIMIT_S / 2) == ["second", "first"]


def test_a_waiting_thread_submits_the_next_operation_itself(
    line: SubmissionLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(Submission, "await_events", lambda _: goes_on.wait(LIMIT_S))  # a slow thread of the line
    monkeypatch.setattr(submission_line, "_POLL_S", LIMIT_S)
    places: list[int] = []
    order: list[object] = []

    def steps() -> Posted:
        places.append(threading.get_ident())
        assert not line.is_ahead()  # an operation that this one consists of is posted at once
        return Posted(1)

    pending = line.put(steps, [Copy(has_ended=True)])
    assert line.is_ahead()
    assert pending.wait() == 1
    assert places == [threading.get_ident()]
    assert line.put(posting(order, 2), [Copy(has_ended=True)]).wait() == 2
    assert order == [2]
    assert not line.is_ahead()
    goes_on.set()


def test_the_lines_thread_submits_what_nobody_waits_for(line: SubmissionLine) -> None:
    order: list[object] = []
    pending = line.put(posting(order, 1), [Copy(has_ended=True)])
    until_s = time.monotonic() + LIMIT_S
    while not pending.done():
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert order == [1]
    assert pending.wait() == 1


def test_an_operation_is_submitted_once(line: SubmissionLine) -> None:
    order: list[object] = []
    for number in range(200):
        pending = line.put(posting(order, number), [Copy(has_ended=True)])
        if number % 3:
            pending.wait()
    line.drain()
    assert order == list(range(200))


@pytest.mark.parametrize("waits_s", [0.0, SOON_S])
def test_a_failed_copy_raises_and_the_line_goes_on(line: SubmissionLine, waits_s: float) -> None:
    order: list[object] = []
    failed = line.put(posting(order, "failed"), [Copy(fails=True)])
    good = line.put(posting(order, "good"))
    time.sleep(waits_s)
    with pytest.raises(RuntimeError, match="an illegal address"):
        failed.wait()
    assert good.wait() == "good"
    assert order == ["good"]
    line.close()


def test_an_operation_for_which_the_thread_waits_next_needs_no_line() -> None:
    order: list[object] = []
    late = Copy()
    own = OwnSubmission(posting(order, 1), [late], order.append)
    assert not own.done()
    threading.Timer(SOON_S, late.over.set).start()
    assert order == []
    assert own.wait() == 1
    assert late.over.is_set()


def test_an_error_before_an_operation_is_handed_on(line: SubmissionLine) -> None:
    order: list[object] = []
    handed: list[Exception] = []
    for made in (
        line.put(posting(order, "line"), [Copy(fails=True)], decline=handed.append),
        OwnSubmission(posting(order, "own"), [Copy(fails=True)], handed.append),
    ):
        with pytest.raises(RuntimeError, match="an illegal address"):
            made.wait()
    assert ["an illegal address" in str(each) for each in handed] == [True, True]
    assert order == []
    line.close()


def test_copies_of_later_operations_start_while_an_earlier_one_waits(line: SubmissionLine) -> None:
    order: list[object] = []
    late, started = Copy(), []

    def prepare(what: str, copy: Copy) -> Callable[[], list[Copy]]:
        def begin() -> list[Copy]:
            started.append(what)
            return [copy]

        return begin

    blocker = line.put(posting(order, "blocker"), [late])
    pending = [
        line.put(posting(order, each), prepare=prepare(each, Copy(has_ended=True))) for each in ("first", "second")
    ]
    late.over.set()
    assert [each.wait() for each in (*pending, blocker)] == ["first", "second", "blocker"]
    assert order == ["blocker", "first", "second"]
    assert sorted(started) == ["first", "second"]


@pytest.mark.parametrize("waits_s", [0.0, SOON_S])
def test_an_operation_is_prepared_once_and_then_awaited(line: SubmissionLine, waits_s: float) -> None:
    order: list[object] = []
    copy, count = Copy(), []

    def begin() -> list[Copy]:
        count.append(1)
        return [copy]

    def end() -> None:
        order.append("copied")
        copy.over.set()

    pending = line.put(posting(order, 1), prepare=begin)
    time.sleep(waits_s)
    threading.Timer(SOON_S, end).start()
    assert pending.wait() == 1
    assert (order, count) == (["copied", 1], [1])


# ---- Ctrl-C in a thread that waits ----


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_while_copies_are_awaited_leaves_the_operation_to_the_line(
    line: SubmissionLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission_line, "_POLL_S", LIMIT_S)
    here, order = threading.get_ident(), list[object]()

    class Interrupting(Copy):
        def synchronize(self) -> None:
            if threading.get_ident() == here:
                raise KeyboardInterrupt
            super().synchronize()

    late = Copy()
    blocker = line.put(posting(order, "blocker"), [late])
    pending = line.put(posting(order, "first"), [Interrupting(has_ended=True)])
    later = line.put(posting(order, "second"))
    late.over.set()
    with suppress(KeyboardInterrupt):  # not raised where the line's thread was first
        pending.submit()
    assert ended([blocker, pending, later]) == ["blocker", "first", "second"]
    assert order == ["blocker", "first", "second"]


def ended(all_of_them: list[Submission]) -> list[object]:
    """Return the results, in bounded time: another thread waits."""
    found: list[object] = []

    def wait() -> None:
        for each in all_of_them:
            try:
                found.append(each.wait())
            except (KeyboardInterrupt, StateError) as error:
                found.append(type(error).__name__)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "a wait hangs after Ctrl-C"
    return found


def test_ctrl_c_in_the_submission_fails_it_and_the_line_goes_on(line: SubmissionLine) -> None:
    order: list[object] = []
    late = Copy()
    blocker = line.put(posting(order, "blocker"), [late])
    broken, good = line.put(interrupted), line.put(posting(order, "good"))
    late.over.set()
    assert ended([blocker, broken, good]) == ["blocker", "KeyboardInterrupt", "good"]
    assert not line.is_ahead()


def test_ctrl_c_in_a_preparation_is_no_reason_to_go_without_its_copies(line: SubmissionLine) -> None:
    order: list[object] = []
    late, here = Copy(), threading.get_ident()

    def prepare() -> list[Copy]:
        if threading.get_ident() == here:
            raise KeyboardInterrupt
        return []

    blocker = line.put(posting(order, "blocker"), [late])
    broken = line.put(posting(order, "broken"), prepare=prepare)
    with suppress(KeyboardInterrupt):  # not raised where the line's thread was first
        broken.prepare()
    late.over.set()
    assert ended([blocker, broken])[1] in ("broken", "StateError")
    assert ("broken" in order) == (ended([broken]) == ["broken"])
    line.drain()


def test_a_preparation_that_fails_raises_and_the_line_goes_on(line: SubmissionLine) -> None:
    def prepare() -> list[Copy]:
        raise RuntimeError("no memory")

    failed, good = line.put(posting([], 1), prepare=prepare), line.put(posting([], 2))
    with pytest.raises(RuntimeError, match="no memory"):
        failed.wait()
    assert good.wait() == 2


class Ended:
    """An event that has happened. Its methods have no locks of Python's, like those of an event of CUDA."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


# Python drops the error of a signal that comes in a finalizer, such as that of a thread that has ended.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_time_leaves_no_wait_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGALRM comes at a random time in place of SIGINT."""
    monkeypatch.setattr(submission_line, "_POLL_S", LIMIT_S)
    monkeypatch.setattr(Submission, "await_events", lambda _: time.sleep(0.001))  # this thread submits most
    dice, hits = random.Random(1), 0  # noqa: S311 -- no secret
    former = signal.signal(signal.SIGALRM, interrupted)
    try:
        for _ in range(400):
            line, order = SubmissionLine(), list[Any]()
            pending = [line.put(posting(order, each), [Ended()]) for each in range(3)]
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-6, 3e-4))
                for each in pending:
                    each.wait()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except (KeyboardInterrupt, StateError):
                signal.setitimer(signal.ITIMER_REAL, 0)
                hits += 1
            found = ended(pending)
            posted = [each for each in range(3) if found[each] == each]
            assert set(posted) <= set(order)
            assert order == sorted(order), "the order of the program, and each operation once"
            line.drain()
            assert not line.is_ahead()
            line.close()
    finally:
        signal.signal(signal.SIGALRM, former)
    assert hits > 20


def test_a_fork_refuses_operations_whose_thread_it_has_not(line: SubmissionLine) -> None:
    copy = Copy()
    open_one = line.put(lambda: Posted("it"), [copy])
    calls = {
        "wait": open_one.wait,
        "await": open_one.await_submission,
        "put": lambda: line.put(lambda: Posted("more")),
        "drain": line.drain,
    }
    outcomes = outcomes_in_a_fork(calls)
    assert list(outcomes) == list(calls), "a call in the fork did not end"
    assert all("StateError: " in each and "was forked from a rank" in each for each in outcomes.values()), outcomes
    copy.over.set()
    assert open_one.wait() == "it"
    line.close()
