"""The messages between the members of a group, and their encoding.

Messages are JSON. Python's C code encodes and decodes a hundred names in tens of microseconds, and the decoder detects
malformed messages. Reports go up the tree. Orders go down; every rank passes them on unchanged:

    ["r", seen, arrivals, last, asks, answer]   a rank's report of its subtree, see `Report`
    ["o", position, decisions, question]        the root's orders, see `Orders`
    ["l", rank]                                 a rank is lost; up and down
    ["s", rank]                                 a rank is silent; down
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from multiring._agreement.decisions import Deadlock, Decision, Joined, Lost, Missing, Ready, Refused, Silent
from multiring._agreement.runs import Runs, ranks_in

FEW = 8  # the maximum number of ranks that are listed for each terms
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Voice(NamedTuple):
    """The ranks that announced an operation with the same terms."""

    terms: str
    number: int  # the number of ranks that announced these terms
    ranks: Sequence[int]  # the first few ranks that announced these terms


class Arrival(NamedTuple):
    """The ranks of a subtree that have announced an operation.

    There is one voice if all ranks of the subtree have the same terms, and several voices if some ranks differ.
    """

    name: str
    voices: Sequence[Voice]


@dataclass(slots=True)
class Answer:
    """The answer of a subtree to the root's question."""

    names: dict[str, Runs]  # for each operation announced in the subtree, the ranks that have not announced it
    blocked: dict[str, Runs]  # for each undecided operation, the ranks that have announced it and are blocked
    held: dict[str, Runs]  # for each other operation, the ranks that are blocked on it
    unjoined: Runs  # the ranks that have not joined
    joined: int  # the number of ranks that have joined
    silent: list[int]  # the ranks that did not answer
    waits: dict[str, Runs] = field(default_factory=dict)  # for each operation, the ranks with a thread that waits


class Last(NamedTuple):
    """The last known rank to join among some ranks.

    The rank that waited least counts as the last.
    """

    rank: int
    waited_us: int


class Report(NamedTuple):
    """A rank's report to its parent about its subtree."""

    seen: int  # the number of decisions the rank had received when it sent the report
    arrivals: Sequence[Arrival]
    last: Last | None  # the last rank to join, if the whole subtree has joined
    asks: bool  # whether a rank asks which ranks are missing
    answer: tuple[int, Answer] | None  # the number of a question, and the answer to it


class Orders(NamedTuple):
    """The root's message to all ranks."""

    position: int  # the number of decisions before these orders
    decisions: list[Decision]
    question: int | None  # the number of a new question about missing ranks, if any


def encode_report(report: Report, below: int) -> bytes:
    """Return the bytes of the report of a subtree of `below` ranks."""
    arrivals = [_arrival_row(arrival, below) for arrival in report.arrivals]
    answer = None
    if report.answer is not None:
        question, told = report.answer
        answer = [question, told.names, told.blocked, told.held, told.unjoined, told.joined, told.silent]
        answer += [told.waits] if told.waits else []
    return _encode(["r", report.seen, arrivals, report.last, int(report.asks), answer]).encode()


def encode_orders(position: int, rows: list[list[object]], question: int | None, size: int) -> tuple[Orders, bytes]:
    """Return the root's orders to a group of `size` ranks, and their bytes.

    Args:
        position: the number of decisions before these.
        rows: the decisions in the form of the functions `*_row`. The root decodes them like all other ranks.
        question: the number of a new question, if any.
        size: the number of ranks in the group.
    """
    decisions = [_decision(row, range(size)) for row in rows]
    return Orders(position, decisions, question), _encode(["o", position, rows, question]).encode()


def encode_notice(notice: Lost | Silent) -> bytes:
    """Return the bytes of the message about a lost or silent rank."""
    return _encode(["l" if isinstance(notice, Lost) else "s", notice.rank]).encode()


def ready_row(name: str, terms: str, joined: int) -> list[object]:
    """Return a `Ready` in the form in which it is sent."""
    return ["r", name, terms, joined]


def refused_row(name: str, voices: Sequence[Voice]) -> list[object]:
    """Return a `Refused` in the form in which it is sent."""
    return ["x", *_voices_row(name, voices)]


def joined_row(last: int) -> list[object]:
    """Return a `Joined` in the form in which it is sent."""
    return ["j", last]


def missing_row(names: dict[str, Runs], blocked: dict[str, Runs], unjoined: Runs, silent: list[int]) -> list[object]:
    """Return a `Missing` in the form in which it is sent."""
    return ["m", names, blocked, unjoined, silent]


def deadlock_row(blocked: dict[str, Runs], names: dict[str, Runs]) -> list[object]:
    """Return a `Deadlock` in the form in which it is sent."""
    return ["d", blocked, names]


def decode(message: bytes, size: int, below: range | None) -> Report | Orders | Lost | Silent:
    """Decode a message of a group of `size` ranks.

    Args:
        message: the bytes.
        size: the number of ranks in the group.
        below: the ranks of the sender's subtree if the sender is a child; None if it is the parent.

    Raises:
        ValueError: the message is malformed; the text says why.
    """
    try:
        content = json.loads(message.decode())
    except RecursionError:
        raise ValueError(f"its {len(message)} bytes are nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}, got {message[:40]!r}") from None
    ranks = range(size)
    match content:
        case ["r", seen, list(arrivals), last, 0 | 1 as asks, answer] if below is not None:
            return Report(
                _number(seen),
                [_arrival(row, below) for row in arrivals],
                None if last is None else _last(last, below),
                bool(asks),
                None if answer is None else _answer(answer, below),
            )
        case ["o", position, list(rows), question] if below is None:
            return Orders(
                _number(position),
                [_decision(row, ranks) for row in rows],
                None if question is None else _number(question),
            )
        case ["l", rank]:
            return Lost(_rank(rank, ranks))
        case ["s", rank] if below is None:
            return Silent(_rank(rank, ranks))
    raise ValueError(f"want {'orders' if below is None else 'a report'}, got {_shown(content)}")


def _last(row: object, below: range) -> Last:
    match row:
        case [rank, waited_us]:
            return Last(_rank(rank, below), _number(waited_us))
    raise ValueError(f"want [rank, microseconds] of the last to join, got {_shown(row)}")


def _arrival_row(arrival: Arrival, below: int) -> list[object]:
    if len(arrival.voices) > 1:
        return _voices_row(arrival.name, arrival.voices)
    (voice,) = arrival.voices
    # If all ranks of the subtree have announced the operation, the parent needs no list of them.
    if voice.number == below:
        return [arrival.name, voice.terms]
    return [arrival.name, voice.terms, voice.number, list(voice.ranks)]


def _voices_row(name: str, voices: Sequence[Voice]) -> list[object]:
    return [name, [[voice.terms, voice.number, list(voice.ranks)] for voice in voices]]


def _arrival(row: object, below: range) -> Arrival:
    match row:
        case [str(name), str(terms)]:
            return Arrival(name, (Voice(terms, len(below), below[:FEW]),))
        case [str(name), terms, count, ranks]:
            return Arrival(name, (_voice([terms, count, ranks], below),))
        case [str(name), list(rows)]:
            return Arrival(name, _voices(rows, below))
    raise ValueError(f"want a name and the ranks' terms, got {_shown(row)}")


def _voices(rows: list[Any], ranks: range) -> list[Voice]:
    voices = [_voice(row, ranks) for row in rows]
    if len({voice.terms for voice in voices}) != len(voices) or len(voices) < 2:
        raise ValueError(f"want two or more different terms, got {_shown([voice.terms for voice in voices])}")
    if sum(voice.number for voice in voices) > len(ranks):
        raise ValueError(f"{sum(voice.number for voice in voices)} of {len(ranks)} ranks are counted")
    return voices


def _voice(row: object, ranks: range) -> Voice:
    match row:
        case [str(terms), count, list(named)]:
            number = _number(count)
            if not 0 < len(named) <= min(number, FEW) or number > len(ranks):
                raise ValueError(f"{len(named)} ranks are listed for {number} of {len(ranks)} with the same terms")
            return Voice(terms, number, [_rank(rank, ranks) for rank in named])
    raise ValueError(f"want terms, a count and ranks, got {_shown(row)}")


def _answer(row: object, below: range) -> tuple[int, Answer]:
    match row:
        case [question, names, blocked, held, unjoined, joined, list(silent), *waits] if len(waits) <= 1:
            return _number(question), Answer(
                names=_runs_by_name(names, below),
                blocked=_runs_by_name(blocked, below),
                held=_runs_by_name(held, below),
                unjoined=_runs(unjoined, below),
                joined=_number(joined),
                silent=[_rank(rank, below) for rank in silent],
                waits=_runs_by_name(waits[0] if waits else {}, below),
            )
    raise ValueError(f"want an answer, got {_shown(row)}")


def _decision(row: object, ranks: range) -> Decision:
    match row:
        case ["r", str(name), str(terms), joined]:
            return Ready(name, terms, _rank(joined, ranks))
        case ["x", str(name), list(rows)]:
            voices = _voices(rows, ranks)
            said = sorted((rank, voice.terms) for voice in voices for rank in voice.ranks)
            return Refused(name, dict(said), {voice.terms: voice.number for voice in voices})
        case ["j", last]:
            return Joined(_rank(last, ranks))
        case ["m", names, blocked, unjoined, list(silent)]:
            return Missing(
                names=_ranks_by_name(names, ranks),
                blocked=_name_by_rank(blocked, ranks),
                unjoined=ranks_in(_runs(unjoined, ranks)),
                silent=tuple(_rank(rank, ranks) for rank in silent),
            )
        case ["d", blocked, names]:
            return Deadlock(blocked=_name_by_rank(blocked, ranks), names=_ranks_by_name(names, ranks))
    raise ValueError(f"want a decision, got {_shown(row)}")


def _ranks_by_name(value: object, ranks: range) -> dict[str, tuple[int, ...]]:
    # In a stalled job many operations wait for the same ranks; they share one tuple.
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    found = {}
    for name, runs in _runs_by_name(value, ranks).items():
        key = tuple(runs)
        if key not in known:
            known[key] = ranks_in(runs)
        found[name] = known[key]
    return found


def _name_by_rank(value: object, ranks: range) -> dict[int, str]:
    by_name = _runs_by_name(value, ranks)
    return dict(sorted((rank, name) for name, runs in by_name.items() for rank in ranks_in(runs)))


def _runs_by_name(value: object, within: range) -> dict[str, Runs]:
    match value:
        case dict():
            return {name: _runs(runs, within) for name, runs in value.items()}
    raise ValueError(f"want ranks by name, got {_shown(value)}")


def _runs(value: object, within: range) -> Runs:
    if type(value) is not list or len(value) % 2:
        raise ValueError(f"want runs of ranks, got {_shown(value)}")
    least = within.start
    for bound in value:
        if type(bound) is not int or not least <= bound <= within.stop:
            raise ValueError(f"want runs of ranks of {within.start} to {within.stop - 1}, got {_shown(bound)}")
        least = bound + 1
    return value


def _rank(value: object, ranks: range) -> int:
    if type(value) is not int or value not in ranks:
        raise ValueError(f"want {ranks.start} to {ranks.stop - 1}, got {_shown(value)}")
    return value


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"want an integer >= 0, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value[:40] if isinstance(value, str) else value)
