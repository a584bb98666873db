"""An undecided operation of a subtree: the ranks that have announced it, and their terms."""

from dataclasses import dataclass, field

from multiring._agreement.messages import FEW, Arrival, Voice


@dataclass(slots=True)
class PendingRecord:
    """One rank's record of one operation; `Book` explains places."""

    come: int = 0  # the places whose ranks have announced it, or have reported different terms
    voices: dict[str, Voice] = field(default_factory=dict)  # the voices by their terms
    is_told: bool = False  # whether the operation was reported to the parent

    def add(self, place: int, arrival: Arrival) -> None:
        """Record that the ranks of a place have announced the operation."""
        self.come |= place
        for voice in arrival.voices:
            known = self.voices.get(voice.terms)
            self.voices[voice.terms] = voice if known is None else _both(known, voice)

    def is_settled(self, joined: int, everybody: int) -> bool:
        """Return whether to report the operation to the parent.

        An operation is reported if ranks differ, or if all places have announced it or joined.
        """
        return len(self.voices) > 1 or (self.come | joined) == everybody


def _both(known: Voice, other: Voice) -> Voice:
    ranks = known.ranks if len(known.ranks) >= FEW else [*known.ranks, *other.ranks][:FEW]
    return Voice(known.terms, known.number + other.number, ranks)
