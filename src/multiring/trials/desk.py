"""What a rank has been told about its trials, and what it waits for."""

import signal
import threading
import time
from typing import Any

from multiring._runtime.group.generation_end import GenerationEnd
from multiring.errors import MultiringError, StateError
from multiring.trials.messages import (
    Message,
    PruneAnswer,
    RoundDecision,
    StudyEnd,
    TrialAssignment,
    TrialMessages,
    TrialStop,
)
from multiring.trials.standings import OwnRecords
from multiring.trials.trial import TrialStoppedError

_LOOK_S = 1.0  # the longest time between two looks for Ctrl-C
_INTERRUPT_S = 5.0  # a rank that was told to end its trial is interrupted after this time


class TrialDesk:
    """This rank's end of a study: its next assignment, answers, and news that end its trial.

    Args:
        holder: the rank that holds the study.
    """

    def __init__(self, holder: int = 0) -> None:
        self.messages: TrialMessages | None = None
        self._holder = holder
        self._changed = threading.Condition()
        self._telling = threading.Lock()  # so that a message is either in the standing or sent to the new holder
        self._records = OwnRecords()
        self._next: list[TrialAssignment | StudyEnd] = []
        # By trial and question, or round.
        self._answers: dict[tuple[int, int], Any] = {}
        self._serial = -1  # the trial that runs here now, or -1
        self._is_main = False  # whether it runs in the main thread, which a signal can interrupt
        self._end: GenerationEnd | None = None
        self._stopped = -1, ""  # the last trial that was told to end, and why
        self._error: MultiringError | None = None

    def receive(self, sender: int, message: Message) -> None:
        """Take a message. The call does not block."""
        del sender
        with self._changed:
            if isinstance(message, TrialAssignment):
                if self._records.knows(message.serial):
                    return  # of the rank that holds the study now, which did not know
                self._records.begin(message, time.monotonic())
                self._next.append(message)
            elif isinstance(message, StudyEnd):
                self._next.append(message)
                if self._serial >= 0:  # after an error only
                    self._stopped = self._serial, f"the study cannot go on: {message.error}"
                    self._stop(self._serial)
            elif isinstance(message, PruneAnswer):
                self._records.note(message)
                self._answers[message.serial, message.question] = message
            elif isinstance(message, RoundDecision):
                self._answers[message.serial, message.round] = message
            elif isinstance(message, TrialStop):
                self._stopped = message.serial, message.why
                self._stop(message.serial)
            self._changed.notify_all()

    def fail(self, error: MultiringError) -> None:
        """End the study on this rank."""
        with self._changed:
            if self._error is None:
                self._error = error
                self._stop(self._serial)
            self._changed.notify_all()

    def move(self, holder: int) -> None:
        """Tell everything to another rank from now on, which holds the study, and first what is not over here."""
        with self._telling:
            if self._holder == holder:
                return
            self._holder = holder
            if self.messages is not None:
                with self._changed:
                    standing = self._records.standing(time.monotonic())
                self.messages.send(holder, standing)

    def tell(self, message: Any) -> None:
        """Send a message to the rank that holds the study."""
        if self.messages is None:
            raise StateError("the study is over")
        with self._telling:
            with self._changed:
                self._records.note(message)
            self.messages.send(self._holder, message)

    def next(self) -> TrialAssignment | StudyEnd:
        """Wait for the next trial of this rank, or for the end of the study.

        Raises:
            PeerLostError: a rank is lost, and the others do not go on without it.
            StateError: the ranks that are left cannot go on.
        """
        with self._changed:
            while not self._next and self._error is None:
                self._changed.wait(_LOOK_S)
            ends = [each for each in self._next if isinstance(each, StudyEnd)]
            if ends:  # ranks leave after it, so it comes before the news of their loss
                return ends[0]
            if self._error is not None:
                raise self._error
            return self._next.pop(0)

    def answer(self, serial: int, question: int) -> PruneAnswer:
        """Wait for the answer to a question of the trial.

        Raises:
            TrialStoppedError: the trial is over.
        """
        found: PruneAnswer = self._awaited(serial, question)
        return found

    def decision(self, serial: int, number: int) -> RoundDecision:
        """Wait for the decision after round `number` of a member of a population.

        Raises:
            TrialStoppedError: the member was told to end.
        """
        found: RoundDecision = self._awaited(serial, number)
        return found

    def _awaited(self, serial: int, question: int) -> Any:
        with self._changed:
            while (serial, question) not in self._answers:
                self.require_running(serial)
                self._changed.wait(_LOOK_S)
            return self._answers.pop((serial, question))

    def require_running(self, serial: int) -> None:
        """Raise an error if the trial does not run here any more.

        Raises:
            PeerLostError: a rank is lost, and the others do not go on without it.
            TrialStoppedError: the trial was told to end, or its objective has returned.
        """
        if self._error is not None:
            raise self._error
        why = self.why_stopped(serial)
        if why is not None:
            raise TrialStoppedError(f"the trial is over: {why}")
        if serial != self._serial:
            raise TrialStoppedError("the trial is over: its objective has returned")

    def require_ranks(self) -> None:
        """Raise PeerLostError if a rank is lost, and the others do not go on without it."""
        if self.messages is not None:
            self.messages.wait_until_handled(_LOOK_S)
        if self._error is not None:
            raise self._error

    def why_stopped(self, serial: int) -> str | None:
        """Return why the trial was told to end; None if it was not."""
        stopped, why = self._stopped
        return why if stopped == serial else None

    def begin(self, serial: int, end: GenerationEnd) -> None:
        """Note that this thread runs a trial now, whose operations `end` can make fail."""
        with self._changed:
            self._serial, self._end = serial, end
            self._is_main = threading.current_thread() is threading.main_thread()
            # The first rank's answers may have come before this rank has begun.
            self._answers = {key: each for key, each in self._answers.items() if key[0] == serial}
            if self.why_stopped(serial) is not None or self._error is not None:
                self._stop(serial)

    def leave(self) -> None:
        """Note that the trial's objective has ended here. It is not interrupted any more."""
        with self._changed:
            self._serial, self._end = -1, None

    def _stop(self, serial: int) -> None:
        """Make the operations of the trial fail, and interrupt its program if that does not end it."""
        if self._end is None or serial != self._serial:
            return
        error = self._error
        self._end.finish(str(error) if error is not None else f"the trial is over: {self._stopped[1]}")
        if self._is_main:
            self._interrupt_later(serial)

    def _interrupt_later(self, serial: int) -> None:
        timer = threading.Timer(_INTERRUPT_S, self._interrupt, [serial])
        timer.name, timer.daemon = "multiring study interrupt", True
        timer.start()

    def _interrupt(self, serial: int) -> None:
        """Raise KeyboardInterrupt in a program that computes on, as Ctrl-C does."""
        with self._changed:  # `leave` waits for it, so that no other trial is hit
            if serial != self._serial or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                return
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self._interrupt_later(serial)
