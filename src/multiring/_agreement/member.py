"""Member: one rank's part in the agreement on the order of named operations."""

from collections.abc import Callable, Sequence

from multiring._agreement.book import Book
from multiring._agreement.decisions import AgreementOutcome, Joined, Lost, Missing, Silent
from multiring._agreement.inquiry import Gathering, Own
from multiring._agreement.messages import (
    Answer,
    Arrival,
    Last,
    Orders,
    Report,
    Voice,
    decode,
    encode_notice,
    encode_orders,
    encode_report,
    joined_row,
    ready_row,
    refused_row,
)
from multiring._agreement.tree import height_of, place_of


class Member:
    """One rank's part in the agreement.

    Every method handles an event and returns its outcome. A rank reports an operation to its parent once all ranks of
    its subtree have announced the operation. So a round of p ranks takes at most radix + 1 messages per rank. At most 2
    ceil(log_radix p) of the messages follow one another. Neither number depends on the number of operations in the
    round. The root decides, and sends all decisions to all ranks in one sequence. Messages between two ranks must
    arrive once and in order. Messages of different pairs of ranks may overtake each other.

    The class is not thread-safe. A method that raises `ValueError` changes nothing.
    """

    def __init__(self, rank: int, size: int, radix: int = 16) -> None:
        place = place_of(rank, size, radix)
        self.rank, self.size = rank, size
        self.parent, self.depth, self.height = place.parent, place.depth, place.height
        self._levels = height_of(size, radix)
        self._below = {ranks.start: ranks for ranks in place.children}
        self._book = Book(rank, self._below)
        self._lost: Lost | None = None
        # The rest is the state of inquiries.
        self._blocked: str | None = None
        # Returns the names of operations for which threads of this rank wait when it answers a question.
        self.waits: Callable[[], Sequence[str]] = tuple
        self._question = 0
        self._gathering: Gathering | None = None
        self._asked = False  # whether this rank has asked, and no question of the root has come since then
        self._awaiting = False  # whether this rank waits for an answer
        self._again = False  # at the root: whether a rank asked after the current question was sent

    @property
    def patience(self) -> int:
        """The time to wait before calling `conclude`; 0 means no limit.

        The unit is the longest time that a message takes. The wait must start again whenever the value changes, and at
        each decision. A rank waits longer than the ranks whose answers it needs. So the neighbour of a silent rank is
        the first to report it.
        """
        if self._gathering is not None:
            return self.height
        return 2 * self._levels + self.depth + 1 if self._awaiting else 0

    def announce(self, name: str, terms: str) -> AgreementOutcome:
        """Announce one operation of this rank; see `announce_all`."""
        return self.announce_all([(name, terms)])

    def announce_all(self, operations: Sequence[tuple[str, str]]) -> AgreementOutcome:
        """Announce these operations of this rank.

        Several operations take no more messages than one. An operation that was refused before this call is not
        announced. Instead the outcome's notes contain its `Refused` or `Deadlock`, once for each refusal, restricted to
        this operation. After a loss the notes contain the `Lost`.

        Args:
            operations: pairs of a name and the terms on which the ranks must agree.

        Raises:
            ValueError: a name is in flight, occurs twice or is not valid Unicode; or this rank has joined.
        """
        outcome = AgreementOutcome()
        if self._is_lost(outcome):
            return outcome
        self._book.check_announcement(operations)
        arrivals = []
        for name, terms in operations:
            late = self._book.late(name)
            if late is None:
                arrivals.append(Arrival(name, (Voice(terms, 1, (self.rank,)),)))
            else:
                outcome.notes.append(late)
        self._pass_on(self._book.come(arrivals), outcome)
        return outcome

    def join(self, waited_us: int = 0) -> AgreementOutcome:
        """Announce that this rank has joined.

        The rank then announces nothing more until all ranks have joined. A joined rank counts as having announced every
        operation.

        Args:
            waited_us: the microseconds since this rank joined. The agreement uses them to order ranks that joined
                before it began.

        Raises:
            ValueError: this rank has joined already.
        """
        outcome = AgreementOutcome()
        if self._is_lost(outcome):
            return outcome
        self._book.check_in_step()
        self._pass_on(self._book.join(Last(self.rank, waited_us)), outcome)
        return outcome

    def wait_for(self, name: str | None) -> AgreementOutcome:
        """Record that this rank's program is blocked until the operation `name` ends.

        None means that the program is not blocked.
        """
        self._blocked = name
        return AgreementOutcome()

    def inquire(self) -> AgreementOutcome:
        """Ask which ranks are missing.

        All ranks get a `Missing`, and a `Deadlock` if operations wait for each other. Ranks that ask at the same time
        share an answer. If a rank does not answer, there is no result until `conclude` is called.
        """
        outcome = AgreementOutcome()
        if not self._is_lost(outcome):
            self._pass_on((), outcome, asks=True)
        return outcome

    def conclude(self) -> AgreementOutcome:
        """Stop waiting for the answers of an inquiry.

        The caller must call this method when `patience` has passed. Children of this rank that have not answered are
        listed in `Missing.silent`. If the parent does not answer, a note `Silent` names the parent, on this rank and on
        waiting ranks below this rank.
        """
        outcome = AgreementOutcome()
        if self._gathering is not None:
            self._pass_on((), outcome, must_answer=True)
        elif self._awaiting and self.parent is not None:
            self._take_silent(Silent(self.parent), outcome)
        return outcome

    def lost(self, rank: int) -> AgreementOutcome:
        """Report that a rank is lost.

        Nothing more is decided, because every operation needs all ranks. This method must be called on all neighbours
        of the lost rank in the tree. They inform the other ranks.

        Raises:
            ValueError: `rank` is this rank, or not a rank of the group.
        """
        if not 0 <= rank < self.size or rank == self.rank:
            raise ValueError(f"rank {rank} is lost: want a rank other than {self.rank} in a group of {self.size}")
        outcome = AgreementOutcome()
        if self._lost is None:
            self._take_lost(Lost(rank), outcome, told_by=None)
        return outcome

    def receive(self, sender: int, message: bytes) -> AgreementOutcome:
        """Handle a message of another rank.

        Raises:
            ValueError: the message is invalid; the text says why.
        """
        outcome = AgreementOutcome()
        if self._lost is not None:
            return outcome
        try:
            received = self._understood(sender, message)
        except ValueError as error:
            raise ValueError(f"rank {self.rank} cannot use a message of rank {sender}: {error}") from error
        match received:
            case Report():
                self._take_report(sender, received, outcome)
            case Orders():
                self._take_orders(received, message, outcome)
            case Lost():
                self._take_lost(received, outcome, told_by=sender)
            case Silent():
                self._take_silent(received, outcome)
        return outcome

    def _understood(self, sender: int, message: bytes) -> Report | Orders | Lost | Silent:
        below = self._below.get(sender)
        if below is None and sender != self.parent:
            raise ValueError("the sender is not next to this rank in the tree")
        received = decode(message, self.size, below)
        if isinstance(received, Report):
            self._book.check_report(sender, received)
        elif isinstance(received, Orders) and received.position != self._book.seen:
            raise ValueError(f"the orders follow {received.position} decisions, want {self._book.seen}")
        return received

    def _take_report(self, sender: int, report: Report, outcome: AgreementOutcome) -> None:
        changed = self._book.take_report(sender, report)
        if report.answer is not None and self._gathering is not None:
            question, answer = report.answer
            if question == self._gathering.question:  # ignores a late answer to a question that was concluded
                self._gathering.answers[sender] = answer
        self._pass_on(changed, outcome, asks=report.asks)

    def _pass_on(
        self, changed: Sequence[str], outcome: AgreementOutcome, *, asks: bool = False, must_answer: bool = False
    ) -> None:
        """Report the news to the parent; at the root, decide."""
        settled, last = self._book.settled(changed)
        if self.parent is None:
            self._decide(settled, last, outcome, asks=asks)
            gathered = self._gathered(must_answer=must_answer)
            if gathered is not None:
                self._decide_inquiry(*gathered, outcome)
            return
        asks = asks and not self._asked
        if asks:
            self._asked = self._awaiting = True
        gathered = self._gathered(must_answer=must_answer)
        if settled or last is not None or asks or gathered is not None:
            answer = None if gathered is None else (gathered[0].question, gathered[1])
            message = encode_report(Report(self._book.seen, settled, last, asks, answer), self._size_below())
            outcome.messages.append((self.parent, message))

    def _decide(self, settled: Sequence[Arrival], last: Last | None, outcome: AgreementOutcome, *, asks: bool) -> None:
        rows = []
        for name, voices in settled:
            if len(voices) > 1:
                rows.append(refused_row(name, voices))
            else:
                rows.append(ready_row(name, voices[0].terms, self.size - voices[0].number))
        if last is not None:
            rows.append(joined_row(last.rank))
        starts = asks and self._gathering is None
        if asks and not starts:
            self._again = True
        if rows or starts:
            self._order(rows, outcome, asks=starts)

    def _decide_inquiry(self, gathering: Gathering, answer: Answer, outcome: AgreementOutcome) -> None:
        # Answers from the time before all ranks joined say nothing about later operations.
        rows = [] if gathering.is_outdated else gathering.verdict(answer)
        again = self._again or gathering.is_outdated
        self._again = False
        self._order(rows, outcome, asks=again)

    def _order(self, rows: list[list[object]], outcome: AgreementOutcome, *, asks: bool) -> None:
        orders, message = encode_orders(self._book.seen, rows, self._question + 1 if asks else None, self.size)
        self._take_orders(orders, message, outcome)

    def _take_orders(self, orders: Orders, message: bytes, outcome: AgreementOutcome) -> None:
        self._send_down(message, outcome)
        outcome.decisions += orders.decisions
        for decision in orders.decisions:
            ended = self._book.apply(decision)
            if self._gathering is not None:
                self._gathering.decided.update(ended)
                self._gathering.is_outdated |= isinstance(decision, Joined)
            if isinstance(decision, Missing):
                self._awaiting = self._asked
        if orders.question is not None:
            self._question = orders.question
            self._gathering = Gathering(orders.question, list(self._below.values()))
            self._asked = False
            if self.parent is not None:
                self._awaiting = True
                self._pass_on((), outcome)

    def _gathered(self, *, must_answer: bool) -> tuple[Gathering, Answer] | None:
        """Return the question and the combined answer, once the answer is complete.

        With `must_answer`, return the incomplete answer.
        """
        gathering = self._gathering
        if gathering is None or not (must_answer or gathering.is_complete()):
            return None
        self._gathering = None
        own = Own(self.rank, self._book.pending, self._book.joined, self._blocked, self.waits())
        return gathering, gathering.merged(own)

    def _is_lost(self, outcome: AgreementOutcome) -> bool:
        if self._lost is not None:
            outcome.notes.append(self._lost)
        return self._lost is not None

    def _take_lost(self, lost: Lost, outcome: AgreementOutcome, *, told_by: int | None) -> None:
        self._lost = lost
        self._gathering, self._awaiting = None, False
        outcome.decisions.append(lost)
        message = encode_notice(lost)
        outcome.messages += ((rank, message) for rank in self._neighbours() if rank not in (told_by, lost.rank))

    def _take_silent(self, silent: Silent, outcome: AgreementOutcome) -> None:
        if self._awaiting:
            outcome.notes.append(silent)
        self._asked = self._awaiting = False
        self._send_down(encode_notice(silent), outcome)

    def _send_down(self, message: bytes, outcome: AgreementOutcome) -> None:
        outcome.messages += ((child, message) for child in self._below)

    def _neighbours(self) -> list[int]:
        return [*self._below] if self.parent is None else [self.parent, *self._below]

    def _size_below(self) -> int:
        return 1 + sum(len(ranks) for ranks in self._below.values())
