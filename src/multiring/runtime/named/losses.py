"""Ranks of a set that are gone, and what is said of operations that cannot begin any more."""

from multiring.errors import MultiringError, PeerLostError, StateError


class Losses:
    """The ranks of one set that are gone, deaths first: who leaves may do so for one. True where there are any."""

    def __init__(self) -> None:
        self._errors: dict[int, PeerLostError] = {}

    def __bool__(self) -> bool:
        return bool(self._errors)

    @property
    def first(self) -> int:
        """The rank of the set that counts."""
        return next(iter(self._errors))

    def note(self, rank: int, world_rank: int, *, died: bool, why: str) -> None:
        """Note that `rank` of the set, `world_rank` of the world, is gone."""
        verb = "died" if died else "left the job"
        lost = {rank: PeerLostError(f"rank {world_rank} {verb} ({why}); what waited for it has not run")}
        self._errors = lost | self._errors if died else self._errors | lost

    def cause(self, world_rank: int) -> PeerLostError:
        """Return the error of the rank that counts; of `world_rank`, where it is not known yet how that went."""
        gone = PeerLostError(f"rank {world_rank} is gone; what waited for it has not run")
        return next(iter(self._errors.values()), gone)


def refusal(title: str, broken: MultiringError | None) -> MultiringError:
    """Return why the operation cannot begin: `broken`, or that this rank has joined."""
    if broken is None:
        return StateError(f"{title}: this rank has joined; wait for that first")
    text = str(broken)
    return type(broken)(text if text.startswith(f"{title}: ") else f"{title}: {text}")
