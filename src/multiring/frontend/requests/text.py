"""What an operation of a framework does, as the line of text that stands in its program (native/entry/call.h)."""

ALL_REDUCE, BROADCAST, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = range(5)  # multiring.h's numbers
NO_WIRE = "-"


def call_text(  # noqa: PLR0913 -- all that the line says
    collective: int,
    op: int,
    process_set: int,
    name: str,
    *,
    root: int = 0,
    factors: tuple[float, float] = (1.0, 1.0),
    wire: str | None = None,
) -> str:
    """Return the line.

    Args:
        collective: one of those above.
        op: by Horovod's number.
        process_set: its number.
        name: what the ranks match it by; "": the order in which they come to it.
        root: of a broadcast: a rank of the whole job.
        factors: before and after a reduction.
        wire: how float32 travels between hosts.
    """
    before, after = factors
    return f"{collective} {op} {root} {process_set} {before!r} {after!r} {wire or NO_WIRE} {name}"
