"""The errors for ranks that disagree on a named operation or wait for each other."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from multiring._agreement import Deadlock
from multiring._runtime.group.handles import told_apart
from multiring._runtime.named.signature_text import STRUCTURE, first_difference
from multiring.errors import DisagreementError, Signature, StallError


def disagreement(name: str, signatures: Mapping[int, Signature], ranks: Sequence[int]) -> DisagreementError:
    """Return the error for a named operation whose signatures differ between ranks.

    Args:
        name: the operation's name.
        signatures: the signatures by rank of the set.
        ranks: the world rank of each rank of the set. The error's text gives world ranks.
    """
    first, by_rank = first_difference(signatures)
    said = told_apart({ranks[rank]: value for rank, value in by_rank.items()})
    remedy = "pass the same keys and types, in the same order, on all ranks; " if first == STRUCTURE else ""
    text = f"operation {name!r}: the ranks do not agree on the {first}: {said}; {remedy}inputs are intact"
    return DisagreementError(text, signatures)


def deadlock(title: str, found: Deadlock, ranks: Sequence[int]) -> StallError:
    """Return the error for the operation `title`, which is part of a deadlock."""
    waiting: dict[str, list[int]] = defaultdict(list)
    for rank, name in sorted(found.blocked.items()):
        waiting[name].append(rank)
    told = [
        f"{named(waiting[name], ranks)} {'waits' if len(waiting[name]) == 1 else 'wait'} for operation {name!r},"
        f" to which {named(missing, ranks)} {'has' if len(missing) == 1 else 'have'} not come"
        for name, missing in sorted(found.names.items(), key=lambda each: waiting[each[0]])
        if waiting[name]
    ]
    return StallError(f"{title}: the ranks wait for each other: {'; '.join(told)}; inputs are intact")


def named(found: Iterable[int], ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 3, 4": the world ranks of the set's ranks `found`."""
    world = [ranks[rank] for rank in found]
    return f"{'rank' if len(world) == 1 else 'ranks'} {', '.join(map(str, world))}"
