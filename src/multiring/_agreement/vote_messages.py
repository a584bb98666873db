"""The messages of the vote on the next generation, and their encoding as JSON.

Every message names the generation that it would end and what the sender knows of ended members and of newcomers:

    [kind, generation, ended, newcomers, ...]
    "c" call       doubts, leaving                     a member asks the leader for a vote, or says what it knows
    "a" ask        ballot                              the leader asks for promises
    "p" promise    ballot, vote, doubts, leaving       a member promises
    "n" refuse     ballot                              a member has promised this later ballot
    "v" propose    ballot, members                     the leader proposes the next generation's members
    "y" accept     ballot                              a member accepts
    "d" decided    members                             the next generation's members
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from multiring._agreement.votes import NO_BALLOT, Ballot, Vote

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
CALL, ASK, PROMISE, REFUSE, PROPOSE, ACCEPT, DECIDED = "capnvyd"
# Which fields follow the common ones, by kind.
_FIELDS = {
    CALL: ("doubts", "leaving"),
    ASK: ("ballot",),
    PROMISE: ("ballot", "vote", "doubts", "leaving"),
    REFUSE: ("ballot",),
    PROPOSE: ("ballot", "members"),
    ACCEPT: ("ballot",),
    DECIDED: ("members",),
}

_NO_VOTE = Vote(0)
_LIMIT = 1 << 62  # larger numbers are not counted, and their digits cost time


@dataclass(frozen=True, slots=True)
class VoteMessage:
    """A message of the vote. Fields that a kind does not have keep their defaults."""

    kind: str
    generation: int
    ended: Mapping[int, Vote | None] = field(default_factory=dict)
    newcomers: frozenset[int] = frozenset()
    ballot: Ballot = NO_BALLOT
    vote: Vote = _NO_VOTE
    members: tuple[int, ...] = ()
    doubts: frozenset[int] = frozenset()
    leaving: bool = False


def voted(vote: Vote, message: VoteMessage) -> tuple[str, Vote]:
    """Return the kind of the answer to a question or a proposal, and the vote after it, the same if it is refused."""
    is_question = message.kind == ASK
    after = vote.promise(message.ballot) if is_question else vote.accept(message.ballot, message.members)
    if after.promised != message.ballot:
        return REFUSE, vote
    return PROMISE if is_question else ACCEPT, after


def encode(message: VoteMessage) -> bytes:
    """Return the message as bytes."""
    ended = [[member, _row(vote)] for member, vote in sorted(message.ended.items())]
    row: list[object] = [message.kind, message.generation, ended, sorted(message.newcomers)]
    for name in _FIELDS[message.kind]:
        value: Any = getattr(message, name)
        if name == "vote":
            value = _row(value)
        elif name == "doubts":
            value = sorted(value)
        row.append(value)
    return _encode(row).encode()


def decode(data: bytes) -> VoteMessage:
    """Return the message.

    Raises:
        ValueError: `data` is no message of a vote.
    """
    try:
        row = json.loads(data)
        kind, generation, ended, newcomers, *rest = row
        fields: dict[str, Any] = {name: _read(name, value) for name, value in zip(_FIELDS[kind], rest, strict=True)}
        return VoteMessage(
            kind,
            _number(generation),
            {_number(member): _vote(vote) for member, vote in ended},
            frozenset(_numbers(newcomers)),
            **fields,
        )
    except RecursionError:
        raise ValueError(
            f"{data[:100]!r} is no message of a vote: its {len(data)} bytes are nested too deeply"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{data[:100]!r} is no message of a vote: {error}") from None


def _row(vote: Vote | None) -> list[object] | None:
    return None if vote is None else [vote.generation, vote.members, vote.promised, vote.accepted_in, vote.accepted]


def _vote(row: Any) -> Vote | None:
    if row is None:
        return None
    generation, members, promised, accepted_in, accepted = row
    return Vote(_number(generation), _numbers(members), _ballot(promised), _ballot(accepted_in), _numbers(accepted))


def _ballot(row: Any) -> Ballot:
    number, member = row
    return Ballot(_number(number), _number(member))


def _numbers(row: Any) -> tuple[int, ...]:
    return tuple([_number(each) for each in row])


def _number(value: Any) -> int:
    if type(value) is not int or not -1 <= value < _LIMIT:
        raise ValueError(f"want an integer from -1 to {_LIMIT - 1}, got {str(value)[:40]}")
    return value


def _read(name: str, value: Any) -> object:
    if name == "ballot":
        return _ballot(value)
    if name == "vote":
        if (vote := _vote(value)) is None:
            raise ValueError("a promise without a vote")
        return vote
    if name == "members":
        return _numbers(value)
    if name == "doubts":
        return frozenset(_numbers(value))
    if type(value) is not bool:
        raise ValueError(f"{value!r} is no bool")
    return value
