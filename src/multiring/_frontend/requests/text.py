"""The description of a collective as a line of text, which a compiled program contains (native/entry/call.h)."""

ALL_REDUCE, BROADCAST, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = range(5)  # the numbers in multiring.h
NO_WIRE = "-"


def call_text(  # noqa: PLR0913 -- the fields of the line
    collective: int,
    op: int,
    process_set: int,
    name: str,
    *,
    root: int = 0,
    factors: tuple[float, float] = (1.0, 1.0),
    wire: str | None = None,
) -> str:
    """Return the line of text for a collective.

    Args:
        collective: one of the constants above.
        op: Horovod's number of the reduction operation.
        process_set: the number of the process set.
        name: the ranks match the operation by this name. They match operations with the name "" in the order of calls.
        root: the root of a broadcast, a rank of the whole job.
        factors: the factors before and after a reduction.
        wire: the type in which float32 travels between hosts.
    """
    before, after = factors
    return f"{collective} {op} {root} {process_set} {before!r} {after!r} {wire or NO_WIRE} {name}"
