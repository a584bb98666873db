"""The referee: the launcher's part in the vote on the next generation."""

from multiring._agreement.succession import VoteOutcome
from multiring._agreement.vote_messages import (
    ACCEPT,
    ASK,
    DECIDED,
    PROMISE,
    PROPOSE,
    REFUSE,
    VoteMessage,
    decode,
    encode,
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
        is_question, ballot = message.kind == ASK, message.ballot
        vote = self._vote.promise(ballot) if is_question else self._vote.accept(ballot, message.members)
        kind = REFUSE if vote.promised != ballot else PROMISE if is_question else ACCEPT
        self._vote = vote
        answer = VoteMessage(kind, vote.generation, ballot=vote.promised, vote=vote)
        outcome.sends.append((sender, encode(answer)))
        return outcome
