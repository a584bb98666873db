"""The line of submissions keeps the program's order, and a waiting thread submits its own operation."""

import threading
import time
from collections.abc import Callable

import pytest

from multiring._frontend import submission_line
from multiring._frontend.submission_line import OwnSubmission, Submission, SubmissionLine

LIMIT_S = 10.0
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


def posting(order: list[object], what: object) -> Callable[[], Posted]:
    def steps() -> Posted:
        order.append(what)
        return Posted(what)

    return steps


def overtaking(line: SubmissionLine) -> list[object]:
    """Return the order in which two operations are posted, of which the second could be posted first."""
    order: list[object] = []
    late = Copy()
    first = line.put(posting(order, "first"), [late])
    second = line.put(posting(order, "second"), [Copy(has_ended=True)])
    threading.Timer(SOON_S, late.over.set).start()
    assert (second.wait(), first.wait()) == ("second", "first")
    return order


def test_a_waiting_thread_does_not_overtake(line: SubmissionLine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert overtaking(line) == ["first", "second"]
    monkeypatch.setattr(SubmissionLine, "is_next", lambda *_: True)
    assert overtaking(SubmissionLine()) == ["second", "first"]


def test_a_waiting_thread_submits_the_next_operation_itself(
    line: SubmissionLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Submission, "await_events", lambda _: time.sleep(SOON_S))  # a slow thread of the line
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
    own = OwnSubmission(posting(order, 1), [late])
    assert not own.done()
    threading.Timer(SOON_S, late.over.set).start()
    assert order == []
    assert own.wait() == 1
    assert late.over.is_set()


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
