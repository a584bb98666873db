"""Contents of chunks during a proof, and the rules for moves that change them.

Every proof uses these rules.
"""

from collections.abc import Sequence
from typing import NamedTuple

from multiring._schedule.kinds import Kind
from multiring._schedule.moves import Move
from multiring._schedule.promise import Promise
from multiring._schedule.versions import Version
from multiring.errors import ScheduleError


class Content(NamedTuple):
    """The state of one chunk during a proof."""

    mask: int  # the ranks whose contributions the chunk holds: bit r is rank r
    home: int
    roundings: int  # the most REDUCEs that a contribution has passed
    codings: int  # the most lossy wires that a contribution has passed
    version: Version  # identifies how the bits were computed


def result_of(
    promise: Promise, move: Move, chunk: int, held: Content, operands: Sequence[Content], version: Version
) -> Content:
    """Return the content that `move` writes over `held`, from one operand of each of its peers.

    Raises:
        ScheduleError: the rules forbid this move.
    """
    result = 0
    for operand in operands:
        if operand.home != held.home:
            raise ScheduleError(f"a piece of block {operand.home} does not belong in chunk {chunk}")
        if operand.mask == 0:
            raise ScheduleError("the rank's own operand is empty")
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
            raise ScheduleError(
                f"last is {move.last}, but chunk {chunk} gets contributions of ranks {ranks_in(result)}"
            )
    if held.mask == result:
        raise ScheduleError(f"chunk {chunk} already has this content")
    codings = max(operand.codings for operand in operands)
    is_final = result == promise.complete and move.kind is not Kind.REDUCE
    return bounded(promise, chunk, Content(result, held.home, roundings, codings, version), is_final=is_final)


def kept_of(promise: Promise, chunk: int, coded: Content) -> Content:
    """Return the content that remains in a chunk after a SEND has encoded it for its peers.

    Raises:
        ScheduleError: the rules forbid this move.
    """
    if coded.mask != promise.complete:
        raise ScheduleError(f"chunk {chunk} is rounded for its peers before it is finished")
    return bounded(promise, chunk, coded, is_final=True)


def bounded(promise: Promise, chunk: int, content: Content, *, is_final: bool) -> Content:
    """Return `content`, unless a contribution passed a lossy wire more than once per axis and direction.

    Raises:
        ScheduleError: a contribution passed more lossy wires than `promise` allows.
    """
    most = promise.codings * (2 if is_final else 1)
    if content.codings > most:
        raise ScheduleError(
            f"chunk {chunk} is coded {content.codings} times, want at most {most}: use lossy wires on direct axes only"
        )
    return content


def wants(rank: int, chunk: int, content: Content, mask: int) -> None:
    """Raise ScheduleError unless `rank` may end with `content` in `chunk`."""
    if content.mask != mask:
        raise ScheduleError(
            f"rank {rank} ends with contributions of ranks {ranks_in(content.mask)} in chunk {chunk},"
            f" want ranks {ranks_in(mask)}"
        )


def ranks_in(mask: int) -> list[int]:
    """Return the ranks in `mask`, for error messages."""
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
