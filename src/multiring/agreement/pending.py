"""An operation that ranks of a subtree have come to and that is not decided: who came, and what they said."""

from dataclasses import dataclass, field

from multiring.agreement.messages import FEW, Arrival, Voice


@dataclass(slots=True)
class Pending:
    """What one rank knows of one operation; for places see `Book`."""

    come: int = 0  # places that have come, or that said that they differ
    voices: dict[str, Voice] = field(default_factory=dict)  # by terms
    is_told: bool = False  # the parent knows all that it needs

    def add(self, place: int, arrival: Arrival) -> None:
        """Note that the ranks of a place have come."""
        self.come |= place
        for voice in arrival.voices:
            known = self.voices.get(voice.terms)
            self.voices[voice.terms] = voice if known is None else _both(known, voice)

    def is_settled(self, joined: int, everybody: int) -> bool:
        """Return whether the parent is to know: ranks differ, or all places have come or `joined`."""
        return len(self.voices) > 1 or (self.come | joined) == everybody


def _both(known: Voice, other: Voice) -> Voice:
    ranks = known.ranks if len(known.ranks) >= FEW else [*known.ranks, *other.ranks][:FEW]
    return Voice(known.terms, known.number + other.number, ranks)
