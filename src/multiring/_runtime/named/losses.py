"""The lost ranks of a set, and errors for operations that cannot start any more."""

from multiring.errors import MultiringError, PeerLostError, StateError


class Losses:
    """The lost ranks of one set.

    A dead rank is reported before a rank that left, because the death may be the reason for leaving. The object is true
    if any rank is lost.
    """

    def __init__(self) -> None:
        self._errors: dict[int, PeerLostError] = {}

    def __bool__(self) -> bool:
        return bool(self._errors)

    @property
    def first(self) -> int:
        """The rank of the set whose loss is reported."""
        return next(iter(self._errors))

    def note(self, rank: int, world_rank: int, *, died: bool, why: str) -> None:
        """Record the loss of `rank` of the set, which is `world_rank` in the world."""
        verb = "died" if died else "left the job"
        lost = {rank: PeerLostError(f"rank {world_rank} {verb} ({why}); operations that waited for it have not run")}
        self._errors = lost | self._errors if died else self._errors | lost

    def cause(self, world_rank: int) -> PeerLostError:
        """Return the error of the rank whose loss is reported.

        If no loss is recorded yet, the error names `world_rank`.
        """
        gone = PeerLostError(f"rank {world_rank} is gone; operations that waited for it have not run")
        return next(iter(self._errors.values()), gone)


def refusal(title: str, broken: MultiringError | None) -> MultiringError:
    """Return the error of an operation that cannot start.

    The error is `broken`, or says that this rank has joined.
    """
    if broken is None:
        return StateError(f"{title}: this rank has joined; wait for the join first")
    text = str(broken)
    return type(broken)(text if text.startswith(f"{title}: ") else f"{title}: {text}")
