"""What chunks hold while programs are proven, and what a move may put there: the rules that every proof shares."""

from collections.abc import Sequence
from typing import NamedTuple

from multiring.errors import ScheduleError
from multiring.schedule.kinds import Kind
from multiring.schedule.moves import Move
from multiring.schedule.promise import Promise
from multiring.schedule.versions import Version


class Content(NamedTuple):
    """What a chunk holds."""

    mask: int  # whose contributions: bit r is rank r
    home: int
    roundings: int  # REDUCEs that a contribution in it has passed, at most
    codings: int  # lossy wires that a contribution in it has passed, at most
    version: Version  # how its bits came about


def result_of(
    promise: Promise, move: Move, chunk: int, held: Content, operands: Sequence[Content], version: Version
) -> Content:
    """Return what `move` makes of `operands`, one from each of its peers, where `held` is now.

    Raises:
        ScheduleError: it may not.
    """
    result = 0
    for operand in operands:
        if operand.home != held.home:
            raise ScheduleError(f"a piece of block {operand.home} does not belong in chunk {chunk}")
        if operand.mask == 0:
            raise ScheduleError("nothing is in its own operand")
        if operand.mask & result:
            raise ScheduleError(f"ranks {ranks_in(operand.mask & result)} would be summed twice in chunk {chunk}")
        result |= operand.mask
    roundings = max(operand.roundings for operand in operands)
    if move.kind is Kind.REDUCE:
        roundings += 1
        if roundings > promise.roundings:
            raise ScheduleError(
                f"chunk {chunk} is rounded {roundings} times, this accumulation allows {promise.roundings}"
            )
        if move.last != (result == promise.complete):
            raise ScheduleError(f"last is {move.last}, but ranks {ranks_in(result)} are in chunk {chunk}")
    if held.mask == result:
        raise ScheduleError(f"chunk {chunk} holds that already")
    codings = max(operand.codings for operand in operands)
    is_final = result == promise.complete and move.kind is not Kind.REDUCE
    return bounded(promise, chunk, Content(result, held.home, roundings, codings, version), is_final=is_final)


def kept_of(promise: Promise, chunk: int, coded: Content) -> Content:
    """Return what a SEND leaves of a chunk that it codes for its peers.

    Raises:
        ScheduleError: it may not.
    """
    if coded.mask != promise.complete:
        raise ScheduleError(f"chunk {chunk} is rounded for its peers before it is finished")
    return bounded(promise, chunk, coded, is_final=True)


def bounded(promise: Promise, chunk: int, content: Content, *, is_final: bool) -> Content:
    """Return `content`; a contribution may be coded once an axis on its way in, and as often on its way back."""
    most = promise.codings * (2 if is_final else 1)
    if content.codings > most:
        raise ScheduleError(
            f"chunk {chunk} is coded {content.codings} times, want at most {most}: code axes that are direct"
        )
    return content


def wants(rank: int, chunk: int, content: Content, mask: int) -> None:
    """Raise ScheduleError unless `content` is what `rank` has to end with in `chunk`."""
    if content.mask != mask:
        raise ScheduleError(f"rank {rank} ends with {ranks_in(content.mask)} in chunk {chunk}, want {ranks_in(mask)}")


def ranks_in(mask: int) -> list[int]:
    """Return the ranks in `mask`, for errors."""
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
