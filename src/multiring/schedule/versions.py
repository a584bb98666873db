"""Versions: how the bits of a chunk came about, as numbers that are like where the bits are.

A version is a rank's own contribution, the combination of versions in an order, or a version after a lossy wire.
"""

from multiring.schedule.kinds import Wire

Version = int


class Versions:
    """Numbers histories: like ones alike, whatever rank they came about on."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], Version] = {}
        self._coded: dict[Version, Wire] = {}  # what was coded, and by what

    def own(self, rank: int, home: int) -> Version:
        """Return the version of `rank`'s contribution to block `home`."""
        return self._number("own", rank, home)

    def combined(self, versions: tuple[Version, ...], *, last: bool) -> Version:
        """Return what a REDUCE makes of `versions`, in this order."""
        return self._number("combined", versions, last)

    def coded(self, version: Version, wire: Wire) -> Version:
        """Return what is left of `version` after the wire; a second time it takes nothing more."""
        if not wire or self._coded.get(version) is wire:
            return version
        number = self._number("coded", version, wire)
        self._coded[number] = wire
        return number

    def _number(self, *history: object) -> Version:
        return self._numbers.setdefault(history, len(self._numbers) + 1)
