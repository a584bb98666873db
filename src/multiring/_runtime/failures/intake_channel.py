"""A process's channel to the launcher for newcomers, which come in while the ranks stand at a commit.

A newcomer says that it is ready. The ranks learn that it waits, and are all ready at their next commit. The launcher
then gives each process a place in the job's next formation (`FormationPlace`). All close the present formation, find
each other with the new secret, and tell the launcher. Once all have, it opens the formation. If a process is lost
before, it gives new places to the others. So either all ranks go on as the new formation, or none does.

Each line of text is one message, as in `launcher_channel`:

    process to launcher  H NUMBER PROOF          the first line: this process has this number in the job
                         A                       the answer to W
                         C                       the ranks have committed since they last changed
                         Y FORMATION GENERATION TEXT
                                                 this rank is at the intake, and newcomers are to be told the text
                         J FORMATION             this process has met all others of the formation
                         N FORMATION REASON      it has not
                         P                       the answer to P
    launcher to process  W                       the launcher watches this process now
                         D NUMBER                so many newcomers wait
                         S ADMISSION             a place in the next formation
                         X                       the ranks must go on as they are
                         O FORMATION             all have met
                         P                       does this process answer?
"""

import logging
import threading
from collections.abc import Callable

from multiring._limits.processes import start_thread
from multiring._runtime.failures.formation_place import FormationPlace
from multiring._runtime.failures.launcher_channel import LauncherChannel, LauncherMessage
from multiring.errors import StateError

COMMITTED, READY, JOINED, NOT_JOINED, PING, WAITING, ADMITTED, NOT_NOW, OPENED = "CYJNPDSXO"
_log = logging.getLogger("multiring")
_SLICE_S = 0.2  # the longest time between two checks for Ctrl-C
_LOOK_S = 3600.0  # between two looks at a channel on which nothing comes


class IntakeChannel:
    """This process's end of the channel.

    Args:
        address: the address of the launcher's socket.
        number: this process's number in the job.
        proof: see `intake_proof`.

    Raises:
        OSError: the launcher does not answer.
    """

    def __init__(self, address: str, number: int, proof: str) -> None:
        self.formation = 0  # the present one
        self.newcomers = 0  # how many wait
        self._channel = LauncherChannel(address, number, proof)
        self._changed = threading.Condition()
        self._place: FormationPlace | None = None  # the last one
        self._opened = 0
        self._refusals = 0
        self._why = ""  # why the launcher does not answer any more
        self._told_commit: tuple[int, int] | None = None
        start_thread(
            threading.Thread(target=self._run, name="multiring intake", daemon=True),
            "this process cannot start its thread for newcomers",
        )

    def note_commit(self, generation: int) -> None:
        """Tell the launcher that generation `generation` has committed. Later calls do nothing."""
        if self._told_commit != (self.formation, generation):
            self._told_commit = self.formation, generation
            self._say(COMMITTED)

    def come(self, generation: int, told: str) -> FormationPlace | None:
        """Wait with the other ranks for places in the next formation; None if the ranks must go on as they are.

        Raises:
            StateError: the launcher does not answer.
        """
        with self._changed:
            before = self._refusals
        self._say(f"{READY} {self.formation} {generation} {told}")
        self._wait_until(lambda: self._is_later(self.formation) or self._refusals > before)
        return self._place if self._is_later(self.formation) else None

    def place(self) -> FormationPlace:
        """Wait, as a newcomer, for this process's place.

        Raises:
            StateError: the launcher does not answer.
        """
        self._say(f"{READY} 0 0 ")
        return self._after(0)

    def opened(self, place: FormationPlace) -> FormationPlace | None:
        """Tell that this process has met all others; return None when the formation is open, or a later place.

        Raises:
            StateError: the launcher does not answer.
        """
        number = place.formation
        self._say(f"{JOINED} {number}")
        self._wait_until(lambda: self._opened >= number or self._is_later(number))
        if self._opened >= number:
            self.formation = number
            return None
        return self._place

    def failed(self, place: FormationPlace, why: str) -> FormationPlace:
        """Tell that this process has not met the others; wait for a later place.

        Raises:
            StateError: the launcher does not answer.
        """
        self._say(f"{NOT_JOINED} {place.formation} {' '.join(why.split())}")
        return self._after(place.formation)

    def is_withdrawn(self, place: FormationPlace) -> bool:
        """Return whether the launcher has given a later place, so that nobody meets by this one any more."""
        return bool(self._why) or self._is_later(place.formation)

    def _after(self, formation: int) -> FormationPlace:
        self._wait_until(lambda: self._is_later(formation))
        place = self._place
        if place is None:
            raise StateError("the launcher gave no place")
        return place

    def _is_later(self, formation: int) -> bool:
        return self._place is not None and self._place.formation > formation

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            while not is_so():
                if self._why:
                    raise StateError(f"this process cannot form a job with newcomers: {self._why}")
                self._changed.wait(_SLICE_S)

    def _say(self, line: str) -> None:
        try:
            self._channel.send(line.encode())
        except OSError as error:
            self._stop(f"the launcher does not answer any more ({error})")

    def _stop(self, why: str) -> None:
        with self._changed:
            self._why = self._why or why
            self._changed.notify_all()

    def _run(self) -> None:
        for message in self._channel.first_messages:
            self._hear(message)
        while not self._why:
            try:
                messages = self._channel.receive(_LOOK_S)
                for message in messages or ():
                    self._hear(message)
            except (OSError, ValueError) as error:
                _log.warning("a message of the launcher was not understood: %s", error)
                messages = None
            if messages is None:
                self._stop("the launcher does not answer any more")

    def _hear(self, message: LauncherMessage) -> None:
        if message.kind == PING:
            self._say(PING)
            return
        with self._changed:
            if message.kind == WAITING:
                self.newcomers = int(message.rest)
            elif message.kind == ADMITTED:
                self._place = FormationPlace.decode(message.rest)
            elif message.kind == OPENED:
                self._opened = int(message.rest)
            elif message.kind == NOT_NOW:
                self._refusals += 1
            self._changed.notify_all()
