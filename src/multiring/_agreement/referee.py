"""The referee: the launcher's part in the vote on the next generation."""

from multiring._agreement.succession import VoteOutcome
from multiring._agreement.vote_messages import (
    ASK,
    DECIDED,
    PROPOSE,
    VoteMessage,
    decode,
    encode,
    voted,
)
from multiring._agreement.votes import Vote


class Referee:
    """The launcher's part in the vote: it helps one side of two equal halves, and never both."""

    def __init__(self) -> None:
        self._vote = Vote(0)
        self._decided = VoteMessage(DECIDED, -1)  # the latest decision that it has heard of

    def hear(self, sender: int, data: bytes) -> VoteOutcome:
        """A message has come from member `sender`; see `Succession.hear`.

        Raises:
            ValueError: `data` is no message of a vote.
        """
        message, outcome = decode(data), VoteOutcome()
        if message.kind == DECIDED:
            if message.generation > self._decided.generation:
                self._decided = message
            if message.generation >= self._vote.generation:
                self._vote = Vote(message.generation + 1)
            return outcome
        if message.generation < self._vote.generation:
            if message.generation <= self._decided.generation:
                outcome.sends.append((sender, encode(self._decided)))
            return outcome
        if message.kind not in (ASK, PROPOSE):
            return outcome
        if message.generation > self._vote.generation:
            self._vote = Vote(message.generation)
        kind, self._vote = voted(self._vote, message)
        answer = VoteMessage(kind, self._vote.generation, ballot=self._vote.promised, vote=self._vote)
        outcome.sends.append((sender, encode(answer)))
        return outcome
